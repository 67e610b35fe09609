"""Whether a guard's map finds what was planted, and how far the score falls without it.

    python -m lab.benchmarks.explain --data sets --weights weights --guards guards

Three networks: the DenseNet on CIFAR-10, a ResNet-18 and a ViT on scenes. Test images get (a) a patch of
Tiny ImageNet with soft edges and matched colours, (b) an artefact: a dead block, a blurred or noisy region,
a logo.
Definitions of the map are compared on development images. The figures of the page come from other images.
Writes docs/data/explain.json, its figures into docs/explain.md, and docs/images/explain-*.png.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import gramwatch
from gramwatch import Guard
from gramwatch.detect import detector
from gramwatch.explain.explained import Explained
from gramwatch.explain.frame import INK, INSIDE, OUTSIDE, SMALL, Words, framed, plain, write_picture
from gramwatch.inputs import networks
from gramwatch.inputs.networks import Loaded
from gramwatch.observe import places
from gramwatch_lab import datasets
from gramwatch_lab.datasets.images import resized
from lab.benchmarks import document
from lab.benchmarks.bound_maps import by_bounds
from lab.benchmarks.cells import DOCS
from lab.benchmarks.measure import machine, save
from lab.benchmarks.planted import Planted, damaged, patched
from lab.benchmarks.rival_maps import rival_maps

BATCH = 20
OURS = "Guard's map"
MIDDLE = "middle of the image"
RIVALS = ("activation norm", "Grad-CAM", "gradient of the score", MIDDLE)
DEVELOPMENT = 500
"""The first test images. Definitions were chosen on them, and the figures are of other images."""
NEAR = 1 / 32
"""A peak is near a region if it lies this share of the image's side outside, or less."""
REMOVED = (0.02, 0.05, 0.1, 0.2, 0.3)
"""Shares of the image that are painted over."""
DRAWS = 2000
FEWEST = 10
"""Of fewer flagged images, no difference is marked."""


@dataclass(frozen=True)
class Subject:
    """A network and its images."""

    key: str
    title: str
    network: str
    weights: str
    inside: str
    train: int
    calibration: int
    size: int
    source: int
    """The size of the images that patches are cut from."""


SCENES = ("scenes", 2400, 500, 128, 80)
SUBJECTS = (
    Subject("resnet18", "ResNet-18, scenes", "torchvision:resnet18", "resnet18_scenes.safetensors", *SCENES),
    Subject("vit", "ViT, scenes", "timm:vit_tiny_patch16_224", "vit_scenes.safetensors", *SCENES),
    Subject("densenet", "DenseNet, CIFAR-10", "densenet", "densenet.pth", "cifar10", 1500, 400, 32, 64),
)


# --- networks and images -----------------------------------------------------------------------------


def prepared(subject: Subject, args: argparse.Namespace) -> tuple[Loaded, Guard, Tensor]:
    """The network, its guard, and test images that the guard has not seen, from 0 to 1."""
    loaded = networks.load(subject.network, args.weights / subject.weights)
    how: dict[str, Any] = {"root": args.data}
    if subject.inside == "scenes":
        how |= {"size": subject.size, "grey": False, "classes": loaded.class_names}
    test = datasets.load(subject.inside, split="test", **how).images
    test = test[torch.randperm(len(test), generator=torch.Generator().manual_seed(1))]
    kept = args.guards / f"{subject.key}.safetensors"
    if not kept.exists():
        train = datasets.load(subject.inside, split="train", count=subject.train, **how).images
        guard = Guard(loaded.network)
        guard.fit(map(loaded.prepare, train.split(50)), progress=False)
        guard.calibrate(map(loaded.prepare, test[: subject.calibration].split(50)), progress=False)
        guard.save(kept)
    # From its file, because gradients cannot be taken through tensors of a calibration.
    guard = gramwatch.load(kept, loaded.network)
    guard.metadata["classes"] = list(loaded.class_names)
    return loaded, guard, test[subject.calibration :].float() / 255


def planted(subject: Subject, images: Tensor, root: Path, seed: int) -> dict[str, Planted]:
    """The images with patches and with artefacts."""
    others = datasets.load("tiny_imagenet", root, count=len(images), grey=False, seed=seed).images
    sources = resized(others, subject.source).float() / 255
    return {"patch": patched(images, sources, seed), "artefact": damaged(images, seed)}


# --- maps --------------------------------------------------------------------------------------------


def map_of(explanation: Explained, terms: dict[str, Tensor] | None = None) -> Tensor:
    """The map of an explanation, with other contributions of taps by member."""
    parts = explanation.parts
    if terms is not None:
        parts = tuple(replace(part, terms=terms.get(part.name)) for part in parts)
    heat = explanation._lookup.__self__._map(parts)[1]  # type: ignore[union-attr]
    assert heat is not None
    return heat


def alike(explanation: Explained) -> Tensor:
    """The map if all taps add the same to the score."""
    return map_of(explanation, {name: torch.ones_like(terms) for name, terms in explanation.taps.items()})


def seen_by(member: str) -> Callable[[Explained], Tensor]:
    """The map if one member alone says which pixels are unusual. Gram and profile have the same taps."""
    return lambda explanation: map_of(
        explanation,
        {member: sum(t.clamp_min(0) for t in explanation.taps.values())},  # type: ignore[dict-item]
    )


def apart(explanation: Explained) -> Tensor:
    """The map if each member shares its own contributions."""
    return sum(map_of(explanation, {name: terms}) for name, terms in explanation.taps.items())  # type: ignore[return-value]


def not_smoothed(explanation: Explained) -> Tensor:
    """The map without smoothing."""
    with mock.patch.object(places, "smoothed", lambda maps: maps):
        return map_of(explanation)


def not_weighed(explanation: Explained) -> Tensor:
    """The map if a tap counts by its contribution only, whatever its number of pixels."""
    share = places.Places.share

    def even(self: places.Places, amounts: Tensor, pixels: Tensor, grid: places.Grid) -> None:
        share(self, amounts / pixels.shape[1], pixels, grid)

    with mock.patch.object(places.Places, "share", even):
        return map_of(explanation)


def stronger(explanation: Explained) -> Tensor:
    """The map if pixels that are weaker than the median pixel do not count as unusual."""

    def excess(strength: Tensor) -> Tensor:
        return (strength - strength.median(1, keepdim=True).values).clamp_min(0)

    with mock.patch.object(detector, "contrasts", excess):
        return map_of(explanation)


CHOSEN = "as chosen"
DEFINITIONS: dict[str, Callable[[Explained], Tensor]] = {
    CHOSEN: map_of,
    "by strength only": seen_by("gram"),
    "by distance only": seen_by("profile"),
    "Gram's by strength, the profile's by distance": apart,
    "weaker pixels not unusual": stronger,
    "not smoothed": not_smoothed,
    "taps not weighed by their pixels": not_weighed,
    "all taps alike": alike,
    "Gram's by the bounds of channels": by_bounds,
}
"""Definitions of the map that are compared on development images."""


def middle(like: Tensor) -> Tensor:
    """A map that is highest in the middle of every image, `(N, H, W)`."""
    y, x = (torch.linspace(-1, 1, size).abs() for size in like.shape[-2:])
    return (2 - y[:, None].maximum(x) - 0.01 * (y[:, None] + x)).expand(len(like), -1, -1)


def near(mask: Tensor) -> Tensor:
    """Regions with a margin, `(N, H, W)`."""
    margin = max(1, round(NEAR * mask.shape[-1]))
    return F.max_pool2d(mask.unsqueeze(1).float(), 2 * margin + 1, 1, margin).squeeze(1) > 0


def pointing(maps: Tensor, mask: Tensor) -> Tensor:
    """Whether the peak of each map lies in the planted region, `(N,)`."""
    return mask.flatten(1).gather(1, maps.flatten(1).argmax(1, keepdim=True)).squeeze(1).float()


def aurocs(maps: Tensor, mask: Tensor) -> Tensor:
    """How well each map tells pixels of the region from others, `(N,)`."""
    ranks = maps.flatten(1).argsort(1).argsort(1).double()
    inside = mask.flatten(1).double()
    count, pixels = inside.sum(1), inside.shape[1]
    return ((ranks * inside).sum(1) - count * (count - 1) / 2) / (count * (pixels - count))


def in_batches(function: Callable[[Tensor], Any], images: Tensor) -> list[Any]:
    """The results of a function, batch by batch."""
    return [function(batch) for batch in images.split(BATCH)]


def compared(guard: Guard, loaded: Loaded, case: Planted, clean: Tensor) -> dict[str, Any]:
    """Pointing and AUROC of every map, and which images were flagged because of what was planted."""
    maps: dict[str, list[Tensor]] = {}
    flagged, p_values = [], []
    for images in case.images.split(BATCH):
        inputs = loaded.prepare(images)
        explanation = guard.explain(inputs)
        assert explanation.map is not None
        flagged.append(explanation.detection.is_ood)
        p_values.append(explanation.detection.p_value)
        others = rival_maps(guard, inputs) | {MIDDLE: middle(explanation.map)}
        for name, heat in {OURS: explanation.map, **others}.items():
            maps.setdefault(name, []).append(heat)
    whole = {name: torch.cat(parts) for name, parts in maps.items()}
    return {
        "maps": whole,
        "pointing": {name: pointing(heat, case.mask) for name, heat in whole.items()},
        "near": {name: pointing(heat, near(case.mask)) for name, heat in whole.items()},
        "auroc": {name: aurocs(heat, case.mask) for name, heat in whole.items()},
        "because": torch.cat(flagged) & ~clean,
        "p_value": torch.cat(p_values),
    }


def interval(values: Tensor, seed: int = 0) -> list[float | None]:
    """The 95 % interval of a mean, by bootstrap."""
    if not len(values):
        return [None, None]
    draws = torch.randint(len(values), (DRAWS, len(values)), generator=torch.Generator().manual_seed(seed))
    ends = values.double()[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return [float(end) for end in ends]


def rows_of(figures: dict[str, Any], case: Planted, kind: str) -> dict[str, Any]:
    """The figures of one kind of planting."""
    because, row = figures["because"], {"kind": kind, "images": len(case.images)}
    row |= {"because": int(because.sum()), "chance": float(case.mask.double().mean())}
    row["chance_because"] = float(case.mask[because].double().mean()) if int(because.sum()) else None
    row["chance_near"] = float(near(case.mask)[because].double().mean()) if int(because.sum()) else None
    for measure in ("pointing", "near", "auroc"):
        ours = figures[measure][OURS].double()
        for name, values in figures[measure].items():
            own, flagged = values.double(), values.double()[because]
            cell = {"all": float(own.mean()), "because": float(flagged.mean()) if len(flagged) else None}
            if name != OURS:
                cell["ahead"] = interval(ours - own)
                cell["ahead_because"] = interval(ours[because] - flagged)
            row[f"{measure}: {name}"] = cell
    row["by_artefact"] = {}
    for artefact in dict.fromkeys(case.kinds):
        own = torch.tensor([name == artefact for name in case.kinds])
        hit = figures["pointing"][OURS]
        row["by_artefact"][artefact] = {
            "images": int(own.sum()),
            "because": int((own & because).sum()),
            "pointing": float(hit[own].mean()),
            "pointing_because": float(hit[own & because].mean()) if int((own & because).sum()) else None,
        }
    return row


# --- removing ----------------------------------------------------------------------------------------


def painted_over(images: Tensor, region: Tensor, steps: int = 30) -> Tensor:
    """Fill a region `(N, H, W)` from its surroundings: repeated means of neighbours."""
    hole = region.unsqueeze(1).to(images)
    known = (images * (1 - hole)).sum((2, 3), keepdim=True) / (1 - hole).sum((2, 3), keepdim=True).clamp_min(
        1
    )
    filled_in = images * (1 - hole) + known * hole
    for _ in range(steps):
        smooth = F.avg_pool2d(filled_in, 5, 1, 2, count_include_pad=False)
        filled_in = images * (1 - hole) + smooth * hole
    return filled_in


def top(maps: Tensor, share: float) -> Tensor:
    """The pixels with the largest values: a share of each map."""
    count = max(1, round(share * maps[0].numel()))
    chosen = torch.zeros_like(maps.flatten(1), dtype=torch.bool)
    return chosen.scatter(1, maps.flatten(1).topk(count, 1).indices, True).view_as(maps)


def removal(guard: Guard, loaded: Loaded, images: Tensor, maps: Tensor) -> list[dict[str, float]]:
    """By how much the score falls if the region with the highest map is painted over, or a random one.

    The random region is the region of another image's map: of the same size, and as ragged.
    """

    def score(pieces: Tensor) -> Tensor:
        return torch.cat(in_batches(lambda batch: guard(loaded.prepare(batch)).score, pieces))

    before, curve = score(images), []
    for share in REMOVED:
        own = before - score(painted_over(images, top(maps, share)))
        other = before - score(painted_over(images, top(maps.roll(1, 0), share)))
        low, high = interval(own - other)
        curve.append(
            {
                "share": share,
                "map": float(own.mean()),
                "random": float(other.mean()),
                "ahead_low": low,
                "ahead_high": high,
            }
        )
    return curve


# --- the study of one network --------------------------------------------------------------------------


def definitions(guard: Guard, loaded: Loaded, plants_of: dict[str, Planted]) -> dict[str, Any]:
    """Every definition of the map on development images."""
    figures: dict[str, Any] = {}
    for kind, plants in plants_of.items():
        maps: dict[str, list[Tensor]] = {}
        flagged = []
        for images in plants.images.split(BATCH):
            explanation = guard.explain(loaded.prepare(images), places=False)
            flagged.append(explanation.detection.is_ood)
            for name, definition in DEFINITIONS.items():
                maps.setdefault(name, []).append(definition(explanation))
        is_ood = torch.cat(flagged)
        for name, parts in maps.items():
            whole = torch.cat(parts)
            hit, auroc = pointing(whole, plants.mask), aurocs(whole, plants.mask)
            figures.setdefault(name, {})[kind] = {
                "pointing": float(hit.mean()),
                "pointing_flagged": float(hit[is_ood].mean()) if int(is_ood.sum()) else None,
                "auroc": float(auroc.mean()),
                "auroc_flagged": float(auroc[is_ood].mean()) if int(is_ood.sum()) else None,
                "flagged": int(is_ood.sum()),
            }
    return figures


Cases = list[tuple[Planted, dict[str, Any]]]
"""Images with a planted region and what was found, for each kind of planting."""


def studied(subject: Subject, args: argparse.Namespace) -> tuple[dict[str, Any], Cases]:
    """All figures of one network, and its cases."""
    start = time.monotonic()
    loaded, guard, images = prepared(subject, args)
    size = args.development
    result: dict[str, Any] = {"key": subject.key, "title": subject.title, "images": args.images}
    result |= {"train": subject.train, "calibration": subject.calibration, "development": size}
    assert size <= DEVELOPMENT
    result["definitions"] = definitions(guard, loaded, planted(subject, images[:size], args.data, 7))
    print(subject.key, "definitions", round(time.monotonic() - start), "s", flush=True)
    held = images[DEVELOPMENT : DEVELOPMENT + args.images]
    clean = torch.cat(in_batches(lambda batch: guard(loaded.prepare(batch)).is_ood, held))
    result["flagged_clean"] = float(clean.double().mean())
    cases: Cases = []
    result["rows"] = []
    for kind, case in planted(subject, held, args.data, 8).items():
        figures = compared(guard, loaded, case, clean)
        result["rows"].append(rows_of(figures, case, kind))
        cases.append((case, figures))
        print(subject.key, kind, round(time.monotonic() - start), "s", flush=True)
    case, figures = cases[1]
    result["removal"] = removal(
        guard, loaded, case.images[: args.removed], figures["maps"][OURS][: args.removed]
    )
    result["removed"] = args.removed
    result["cost"] = costs(guard, loaded, held[:BATCH])
    print(subject.key, "done", round(time.monotonic() - start), "s", flush=True)
    return result, cases


def costs(guard: Guard, loaded: Loaded, images: Tensor, rounds: int = 5) -> dict[str, float]:
    """The times of the network, of judging and of explaining, in CPU seconds of one thread: medians."""
    inputs, threads = loaded.prepare(images), torch.get_num_threads()
    torch.set_num_threads(1)

    def network() -> None:
        with torch.no_grad():
            loaded.network(inputs)

    functions = {
        "network": network,
        "judging": lambda: guard(inputs),
        "explaining without map": lambda: guard.explain(inputs, places=False),
        "explaining": lambda: guard.explain(inputs),
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            begun = time.process_time()
            function()
            times[name].append(time.process_time() - begun)
    torch.set_num_threads(threads)
    return {name: float(torch.tensor(values).median()) for name, values in times.items()}


# --- the page ----------------------------------------------------------------------------------------


def draw_cases(path: Path, title: str, cases: Cases, most: int = 4) -> None:
    """Images that were flagged because of what was planted: found on the left, missed on the right."""
    shown: list[tuple[Tensor, Tensor, Tensor, str]] = []
    for right in (1.0, 0.0):
        left = most
        for case, figures in cases:
            hits = figures["pointing"][OURS]
            numbers = (figures["because"] & (hits == right)).nonzero().flatten().tolist()
            if case.kinds[0] == "patch":
                numbers = numbers[: most // 2]
            else:  # different artefacts first
                numbers.sort(key=lambda i: [case.kinds[j] for j in numbers if j <= i].count(case.kinds[i]))
            for i in numbers[:left]:
                words = f"{case.kinds[i]}\n{'found' if right else 'missed'}"
                shown.append((case.images[i], figures["maps"][OURS][i], case.mask[i], words))
            left -= min(left, len(numbers))
    words = Words(f"Planted regions and the map: {title}", "", "The first images flagged because of it.")
    frame = framed(words, 2.4, 2, max(1, len(shown)))
    for column, (image, found_map, mask, label) in enumerate(shown):
        above, below = frame.axes[:, column]
        picture = image.permute(1, 2, 0).clamp(0, 1)
        above.imshow(picture.numpy(), interpolation="nearest")
        below.imshow(picture.mean(2).numpy(), cmap="gray", interpolation="nearest")
        strength = (found_map / found_map.max().clamp_min(1e-12)).sqrt()
        below.imshow(found_map.numpy(), cmap="inferno", alpha=(0.85 * strength).numpy())
        for axes in (above, below):
            axes.contour(mask.float().numpy(), [0.5], colors=["#00c8ff"], linewidths=0.9)
            axes.set_axis_off()
        above.set_title(label, fontsize=SMALL, color=INK)
    write_picture(frame.figure, path)


def draw_removal(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """By how much scores fall without a region: the map's, and a random one."""
    words = Words(
        "By how much the score falls if a region is painted over",
        "",
        "Images with an artefact. The random region is the region of another image's map.",
    )
    frame = framed(words, 2.2, 1, len(results), sharex=True)
    for axes, result in zip(frame.axes[0], results, strict=True):
        plain(axes)
        shares = [100 * point["share"] for point in result["removal"]]
        for name, colour in (("map", OUTSIDE), ("random", INSIDE)):
            axes.plot(
                shares, [point[name] for point in result["removal"]], "o-", ms=3, color=colour, label=name
            )
        axes.axhline(0, color=INK, lw=0.5)
        axes.set_title(result["title"], fontsize=SMALL, loc="left", color=INK)
        axes.set_xlabel("percent painted over", fontsize=SMALL)
        axes.legend(frameon=False, fontsize=SMALL)
    frame.axes[0, 0].set_ylabel("fall of the score", fontsize=SMALL)
    frame.write(path)


def percent(value: float | None) -> str:
    """A share in percent, or a dash."""
    return "-" if value is None or value != value else f"{100 * value:.0f}"


def mark(ends: Sequence[float | None]) -> str:
    """Whether ours is ahead or behind, by the interval of the difference."""
    if ends[0] is None or ends[1] is None:
        return ""
    return " +" if ends[0] > 0 else " -" if ends[1] < 0 else ""


COLUMNS = (
    ("pointing", "all"),
    ("pointing", "because"),
    ("near", "because"),
    ("auroc", "all"),
    ("auroc", "because"),
)


def proof_table(results: Sequence[dict[str, Any]]) -> str:
    """Pointing and AUROC of all maps."""
    names = ["pointing, all", "pointing, flagged", "near, flagged", "AUROC, all", "AUROC, flagged"]
    lines = [f"| network, planted | flagged because of it | map | {' | '.join(names)} |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for result in results:
        for row in result["rows"]:
            start = f"{result['title']}, {row['kind']} | {row['because']} of {row['images']}"
            for name in (OURS, *RIVALS):
                cells = []
                for measure, which in COLUMNS:
                    cell, ahead = row[f"{measure}: {name}"], "ahead" if which == "all" else "ahead_because"
                    enough = which == "all" or row["because"] >= FEWEST
                    marked = mark(cell[ahead]) if ahead in cell and enough else ""
                    cells.append(percent(cell[which]) + marked)
                lines.append(f"| {start} | {name} | {' | '.join(cells)} |")
                start = " | "
            shares = [row[name] for name in ("chance", "chance_because", "chance_near")]
            chance = [*map(percent, shares), "50", "50"]
            lines.append(f"|  |  | chance | {' | '.join(chance)} |")
    return "\n".join(lines)


def artefact_table(results: Sequence[dict[str, Any]]) -> str:
    """Pointing by kind of artefact."""
    lines = ["| network | planted | flagged because of it | pointing, all | pointing, flagged |"]
    lines.append("| --- | --- | ---: | ---: | ---: |")
    for result in results:
        for row in result["rows"]:
            for name, cell in row["by_artefact"].items():
                count = f"{cell['because']} of {cell['images']}"
                figures = f"{percent(cell['pointing'])} | {percent(cell['pointing_because'])}"
                lines.append(f"| {result['title']} | {name} | {count} | {figures} |")
    return "\n".join(lines)


def definition_table(results: Sequence[dict[str, Any]]) -> str:
    """Definitions of the map on development images."""
    titles = [result["title"] for result in results]
    lines = [f"| definition | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(titles)}"]
    for name in DEFINITIONS:
        cells = []
        for result in results:
            kinds = result["definitions"][name]
            cells.append(
                f"{percent(kinds['artefact']['pointing'])} / {percent(kinds['artefact']['auroc'])} / "
                f"{percent(kinds['patch']['auroc'])}"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def removal_table(results: Sequence[dict[str, Any]]) -> str:
    """The fall of the score by the share painted over."""
    lines = ["| network | painted over | map | random | difference, 95 % interval |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for result in results:
        for point in result["removal"]:
            ends = f"{point['ahead_low']:.2f} to {point['ahead_high']:.2f}"
            values = f"{point['map']:.2f} | {point['random']:.2f}"
            lines.append(f"| {result['title']} | {percent(point['share'])} % | {values} | {ends} |")
    return "\n".join(lines)


def cost_table(results: Sequence[dict[str, Any]]) -> str:
    """The times of explaining, as multiples of the network's pass and of judging."""
    lines = ["| network | judging | explaining without map | explaining | explaining / judging |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for result in results:
        cost = result["cost"]
        times = [cost[n] / cost["network"] for n in ("judging", "explaining without map", "explaining")]
        ratio = cost["explaining"] / cost["judging"]
        lines.append(f"| {result['title']} | {' | '.join(f'{t:.1f}' for t in times)} | {ratio:.1f} |")
    return "\n".join(lines)


def blocks(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The generated parts of docs/explain.md."""
    return {
        "proof": proof_table(results),
        "artefacts": artefact_table(results),
        "definitions": definition_table(results),
        "removal": removal_table(results),
        "cost": cost_table(results),
    }


def main() -> None:
    """Measure, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of the expanded sets")
    parser.add_argument("--weights", type=Path, help="the folder of the networks")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--development", type=int, default=250)
    parser.add_argument("--removed", type=int, default=100, help="images of the curve")
    parser.add_argument(
        "--guards", type=Path, default=Path("guards"), help="a folder where fitted guards are kept"
    )
    parser.add_argument("--only", nargs="*", default=[subject.key for subject in SUBJECTS])
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    path = args.docs / "data" / "explain.json"
    held = json.loads(path.read_text(encoding="utf-8"))["networks"] if path.exists() else []
    known = {result["key"]: result for result in held}
    if args.data is not None:
        for subject in SUBJECTS:
            if subject.key in args.only:
                known[subject.key], cases = studied(subject, args)
                again = json.loads(path.read_text(encoding="utf-8"))["networks"] if path.exists() else []
                known = {result["key"]: result for result in again} | {subject.key: known[subject.key]}
                kept = [known[subject.key] for subject in SUBJECTS if subject.key in known]
                save(path, {"kind": "explain", **machine(torch.device("cpu")), "networks": kept})
                draw_cases(args.docs / "images" / f"explain-{subject.key}.png", subject.title, cases)
    results = json.loads(path.read_text(encoding="utf-8"))["networks"]
    draw_removal(args.docs / "images" / "explain_removal.png", results)
    document.write()
    print(proof_table(results))


if __name__ == "__main__":
    main()
