"""The figures that stand inside sentences: `<!--=NAME-->...<!--/-->`. `FIGURES` has each by its name."""

import functools
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from gramwatch.detect.exchange import LATE, SILENT
from gramwatch.detect.measurement import calibration_needs
from gramwatch.detect.threshold import range_of_rates
from gramwatch_lab.figures import across
from lab.benchmarks import effort, photographs, rehearsal
from lab.benchmarks.cells import DOCS, cell, data, rows
from lab.benchmarks.explain import OURS


def percent(share: float, digits: int = 1) -> str:
    """A share in percent."""
    return f"{100 * share:.{digits}f} %"


def span(values: Iterable[float], form: str = ".0f") -> str:
    """The least and the most; one number if both look the same."""
    listed = list(values)
    ends = dict.fromkeys(format(end, form) for end in (min(listed), max(listed)))
    return " to ".join(ends)


def joined(words: Iterable[str]) -> str:
    """Words with commas, and `and` before the last."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


# --- cost --------------------------------------------------------------------------------------------


def speed() -> str:
    """What today's guard takes of the GPU's time: the rows with most members, in bfloat16."""
    kept = data("data/ways-cuda.json")
    members = max(row["members"] for row in kept["rows"])
    today = [row for row in kept["rows"] if row["members"] == members and row["way"] == "bfloat16"]
    where = joined(f"the plain {row['network']}" for row in today)
    share = span(100 * row["busy_guard"] for row in today)
    on = kept["device_name"].removeprefix("NVIDIA ")
    return f"On an {on}, a guard takes {share} % more of the GPU's time than {where} in bfloat16"


def single_images() -> str:
    """How long one image takes when the pass is recorded, in times the plain network."""
    rows_of_one = [row for row in data("data/guard-cuda.json")["rows"] if row["batch"] == 1]
    return joined(f"{1 + row['full_recorded']['median']:.2f} ({row['network']})" for row in rows_of_one)


def ways_on_gpu() -> str:
    """The GPU of the figures on cost, and their last day."""
    kept = data("data/ways-cuda.json")
    return f"{kept['device_name']}, last on {kept['date']}"


def more_than_gram(kind: str) -> str:
    """How much more than Gram the guard costs with full batches."""
    full = [row for row in data("data/guard-cuda.json")["rows"] if row["batch"] > 1]
    if kind == "clock":
        return span((row["full_more"]["median"] for row in full), ".2f")
    return span((row["busy_full"] - row["busy_gram"] for row in full), ".3f")


@functools.cache
def bounds_of_resnet50(half: bool = False) -> str:
    """The memory of all bounds of ResNet-50 with 1,000 classes, by the function in docs/limits.md."""
    import torch

    import gramwatch
    from gramwatch.inputs.foreign import import_torchvision
    from tests.pages import blocks

    names: dict[str, Any] = {"gramwatch": gramwatch}
    (block,) = [block for block in blocks(DOCS / "limits.md") if "def bounds_in_bytes" in block.code]
    block.run(names)
    size = names["bounds_in_bytes"](import_torchvision().models.resnet50(), torch.rand(2, 3, 64, 64), 1000)
    return f"{size / (2e9 if half else 1e9):.1f} GB"


def architectures() -> str:
    """How many architectures the tests guard."""
    from tests.test_architectures import CASES

    return str(len(CASES))


# --- tables of results -------------------------------------------------------------------------------


def tnr(network: str, ood: str, column: str = "tnr", digits: int = 1) -> Callable[[], str]:
    """Gram's TNR on a set."""
    return lambda: f"{cell(f'results/table2-{network}.csv', column, method='Gram', ood=ood):.{digits}f} %"


def networks_of_rehearsal() -> str:
    """The number of networks, and of their families."""
    names = rehearsal.kept_figures(DOCS / "results")[0]
    return f"{len(names)} networks of {len({rehearsal.family_of(name) for name in names})} families"


def studies() -> list[across.Study]:
    """The networks that were trained on scenes."""
    return photographs.studies_of(DOCS / "results", "scenes")


def ahead_on_scenes() -> str:
    """On how many networks Guard's mean is ahead of every single method's, and where it is not."""
    ahead = {s.name: s.mean("Guard") - s.mean(s.best()) for s in studies()}
    behind = [f"{s.name}: {-ahead[s.name]:.1f} behind {s.best()}" for s in studies() if ahead[s.name] <= 0]
    return f"on {sum(gap > 0 for gap in ahead.values())} of {len(ahead)} networks ({'; '.join(behind)})"


def close_pairs() -> str:
    """On how many pairs of a network and a set Guard is at most a point behind."""
    gaps = [gap for study in studies() for gap in photographs.behind(study).values()]
    return f"{sum(gap <= 1.0 for gap in gaps)} of {len(gaps)}"


def costly_faults() -> str:
    """The mean AUROC of faults that cost accuracy."""
    return span(float(row[2]) for row in across._costly(studies())[1:])


def accuracies() -> str:
    """The accuracies of the networks by OpenOOD's recipe."""
    return joined(row["accuracy"] for row in rows("results/networks.csv") if row["network"] == "ResNet-18")


def share_of_products() -> str:
    """The products of lean Gram, as a share of the paper's Gram's."""
    points = {effort.effort_of(point): point for point in data("data/effort.json")["points"]}
    return percent(effort.mean_of(points[photographs.LEAN], "cost"))


# --- explanations, monitors --------------------------------------------------------------------------


def explanation_row(key: str, kind: str) -> Any:
    """The row of a network for planted patches or artefacts."""
    (network,) = [network for network in data("data/explain.json")["networks"] if network["key"] == key]
    (row,) = [row for row in network["rows"] if row["kind"] == kind]
    return row


def pointing(
    kind: str, *, artefact: str = "", keys: tuple[str, ...] = ("resnet18", "vit", "densenet")
) -> str:
    """In how many flagged images the peak of the map lies inside the region."""
    planted = [explanation_row(key, kind) for key in keys]
    if artefact:
        return span(100 * row["by_artefact"][artefact]["pointing_because"] for row in planted) + " %"
    return span(100 * row[f"pointing: {OURS}"]["because"] for row in planted) + " %"


def alarm(place: int) -> Callable[[], str]:
    """The image at which a monitor raised its alarm."""
    return lambda: f"{data('data/fog.json')['rows'][place]['alarm_at']:,}"


# --- the tutorial, large data, texts -----------------------------------------------------------------


def all_flagged() -> str:
    """How many of the tutorial's photographs are flagged."""
    return str(sum(counts["flagged"] for counts in data("data/tutorial.json")["flagged"].values()))


def tutorial_seconds() -> str:
    """What the commands of the tutorial took."""
    kept = data("data/tutorial.json")
    took, busy = kept["seconds"], sum(kept["processor_seconds"].values())
    cores = {2: "two"}.get(kept["cores"], str(kept["cores"]))
    return (
        f"{sum(took.values())} seconds together on {cores} cores: {took['fit']} to fit, {took['score']} to "
        f"score and {took['report']} for the report. That is {busy} seconds of processor time"
    )


def text_runs() -> str:
    """What the networks for texts were trained on, how good they are, and what they took."""
    runs = data("data/text.json")
    counts = runs[0]["texts"]
    train, fit = (fmean(run["processor seconds"][part] for run in runs) for part in ("train", "fit"))
    right = span(100 * run["accuracy"] for run in runs)
    return (
        f"{counts['train']:,} sentences to train on, {counts['calibration']:,} to calibrate on, "
        f"{counts['test']:,} to test on, of three kinds. The networks are right on {right} % of the test "
        f"sentences. A run took {train:.0f} seconds of processor time to train and {fit:.0f} to fit "
        "and calibrate"
    )


def stream() -> str:
    """The memory of `gramwatch score`."""
    kept = data("data/stream.json")["memory"]
    return (
        f"{kept['images']:,} small images in {kept['seconds']:.0f} seconds on two cores. Its memory and that "
        f"of its {kept['workers']} workers was at most {kept['second_tenth']:.0f} MiB over the second tenth "
        f"of the images and at most {kept['last_tenth']:.0f} MiB over the last tenth"
    )


def padding() -> str:
    """What padding changed."""
    runs = [run["padding"] for run in data("data/text.json")]
    count, other = (sum(run[name] for run in runs) for name in ("texts", "other verdicts"))
    most = max(run["largest difference"] for run in runs)
    return (
        f"of {count} test sentences, judged alone and padded to 64 tokens, {other or 'no'} verdicts differ. "
        f"The largest difference of two scores is {most:.4f}"
    )


FIGURES: dict[str, Callable[[], str]] = {
    "architectures": architectures,
    "bounds": bounds_of_resnet50,
    "bounds in float16": lambda: bounds_of_resnet50(half=True),
    "fewest to calibrate": lambda: str(calibration_needs(0.95, split=True)),
    "range of 600": lambda: "from {:.1f} % to {:.1f} %".format(*(100 * r for r in range_of_rates(300, 0.95))),
    "rate with 100": lambda: percent(range_of_rates(50, 0.95)[1], 0),
    "silent": lambda: f"{SILENT:.0f}",
    "late": lambda: f"{LATE:.0f}",
    "speed": speed,
    "single images": single_images,
    "ways gpu": ways_on_gpu,
    "more than Gram, GPU": lambda: more_than_gram("busy"),
    "more than Gram, clock": lambda: more_than_gram("clock"),
    "iSUN": tnr("resnet34", "iSUN"),
    "iSUN published": tnr("resnet34", "iSUN", "tnr_published"),
    "nearest": tnr("densenet", "Tiny ImageNet, nearest", digits=0),
    "anti-aliased": tnr("densenet", "Tiny ImageNet, anti-aliased", digits=0),
    "rehearsal networks": networks_of_rehearsal,
    "scenes mean": ahead_on_scenes,
    "scenes pairs": close_pairs,
    "scenes faults": costly_faults,
    "openood accuracies": accuracies,
    "lean products": share_of_products,
    "pointing artefacts": lambda: pointing("artefact"),
    "pointing dead blocks": lambda: pointing("artefact", artefact="dead block"),
    "pointing patches": lambda: pointing("patch", keys=("densenet",)),
    "alarm online": alarm(0),
    "alarm fixed": alarm(1),
    "tutorial accuracy": lambda: percent(data("data/tutorial.json")["accuracy"]),
    "tutorial seconds": tutorial_seconds,
    "tutorial flagged": all_flagged,
    "tutorial explained": lambda: str(sum(group["images"] for group in data("data/tutorial.json")["groups"])),
    "text runs": text_runs,
    "stream": stream,
    "texts padding": padding,
}
