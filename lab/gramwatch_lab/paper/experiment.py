"""The common part of all experiments: their options, their list, and the writing of results."""

import importlib
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gramwatch.errors import InputError, MissingDataError
from gramwatch.evaluation.compare import GRAM, method_names
from gramwatch.evaluation.evaluate import Evaluation, Row
from gramwatch.explain.frame import pyplot
from gramwatch.files import __version__
from gramwatch.inputs import networks
from gramwatch.methods import METHODS
from gramwatch_lab import datasets
from gramwatch_lab.figures import results
from gramwatch_lab.paper import published
from gramwatch_lab.paper.beside import Line, markdown_tables, write_csv
from gramwatch_lab.paper.cells import Cells
from gramwatch_lab.paper.scenes import SceneSubject
from gramwatch_lab.paper.sets import INDICATIVE, SCENES, OodSet, ood_sets
from gramwatch_lab.paper.subject import BLOCK_ENDS, MethodSpec, Subject

_CIFAR = "a CIFAR network: --network and --weights"
EXPERIMENTS = {
    "table2": ("Table 2 and the expanded table: Baseline, ODIN, Mahalanobis, Gram on every set", _CIFAR),
    "outlier_exposure": (
        "the comparison with Outlier Exposure, and both tables joining it with Gram",
        "--weights cross_entropy=FILE and outlier_exposure=FILE of one network",
    ),
    "ablation": ("twelve settings: statistic x metric x normalisation", _CIFAR),
    "depth": ("Fig. 1 and appendix: one stage or dense block at a time", _CIFAR),
    "order": ("Fig. 2 and appendix: one order of the Gram matrix at a time", _CIFAR),
    "triangle": ("row sums against the full triangle of the Gram matrix", _CIFAR),
    "trained": (
        "DPN, VD, Semantic and Outlier Exposure beside Gram and MSP",
        "--weights OBJECTIVE=FILE for each",
    ),
    "mlp": ("fully connected networks on MNIST, trained on the spot", "MNIST alone"),
    "mlp_study": ("what the MLPs' figures depend on", "MNIST alone"),
}
"""Every experiment: its module with a `run(options)`, its content, and its needs."""

TUNABLE = ("odin", "mahalanobis")
"""Methods that the published tables tune on outliers."""


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    output: Path
    network: str | None = None
    weights: Mapping[str, Path] = field(default_factory=dict)
    """Checkpoints, by a label: the objective that a network was trained with, where it matters."""
    in_distribution: str | None = None
    data: Path | None = None
    device: str = "cpu"
    subset: int | None = None
    methods: str | None = None
    tune: str = "none"
    auxiliary: str = ""
    """The set from which networks saw outliers in training."""
    sets: str = ""
    """Out-of-distribution sets to judge by, names with commas between them; all where none is named."""
    forms: bool = False
    """Whether the study of Guard also judges other forms of Gram."""
    batch: int | None = None
    say: Callable[[str], None] = print

    def subject(self, weights: Path | None = None) -> Subject:
        """The network to be judged, with the given weights or the only weights."""
        name = self.chosen_network()
        loaded = networks.load(name, weights or self.only_weights(), device=self.device)
        return self.study(loaded, self.inside())

    def chosen_network(self) -> str:
        """The network's name."""
        if self.network is None:
            names = ", ".join([*networks.NETWORKS, "timm:NAME", "torchvision:NAME"])
            raise InputError(f"which network? Give --network, one of {names}")
        return self.network

    def only_weights(self) -> Path:
        """The only checkpoint."""
        if len(self.weights) != 1:
            raise InputError(f"give the checkpoint of {self.network}: --weights FILE, once")
        return next(iter(self.weights.values()))

    def inside(self) -> str:
        """The in-distribution set: the chosen one, or else what the network is usually trained on."""
        grey = networks.record_of(self.chosen_network()).shape[0] == 1
        return self.in_distribution or ("mnist" if grey else "cifar10")

    def chosen_sets(self, in_distribution: str) -> list[OodSet]:
        """The out-of-distribution sets to judge by: those that were named, or all."""
        names = [name.strip() for name in self.sets.split(",") if name.strip()]
        return [ood_set for ood_set in ood_sets(in_distribution) if not names or ood_set.name in names]

    def study(self, loaded: networks.Loaded, in_distribution: str) -> Subject:
        """A loaded network with the chosen data, cells and device."""
        default = 500 if torch.device(self.device).type == "cuda" else 125
        kind = SceneSubject if in_distribution == SCENES else Subject
        return kind(
            loaded,
            in_distribution,
            Cells(self.output / "cells"),
            root=self.data,
            subset=self.subset,
            tuning=self.tune != "none",
            batch=self.batch or default,
            say=self.say,
        )


def run(name: str, options: Options) -> list[Line]:
    """Run an experiment of the paper."""
    if name not in EXPERIMENTS:
        raise InputError(f"there is no experiment '{name}': choose from {', '.join(EXPERIMENTS)}, or list")
    return computed(name, options)


def computed(module: str, options: Options) -> list[Any]:
    """The result of `run(options)` of a module of this package."""
    # Published figures are of full float32; in TF32, scores move in the third digit.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    pyplot()  # known to be there before anything is computed
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    result: list[Any] = importlib.import_module(f"gramwatch_lab.paper.{module}").run(options)
    options.say(f"{time.monotonic() - began:7.1f} s  in all; the tables and pictures are in {options.output}")
    return result


def methods_of(
    subject: Subject, chosen: str | Iterable[str], gram: Mapping[str, Any] | None = None
) -> list[MethodSpec]:
    """The chosen methods with the settings that the published tables were computed with.

    ODIN's and Mahalanobis' steps are in terms of images from 0 to 1; Mahalanobis looks at the ends of blocks.
    """
    moved = {"scale": list(subject.loaded.std)}
    ends = {"taps": list(BLOCK_ENDS.get(subject.loaded.name, ())) or "all"}
    special: dict[str, dict[str, Any]] = {
        "odin": moved,
        "mahalanobis": {**ends, **moved},
        "knn": {"k": 50, "most_examples": 50_000},  # the paper's, for CIFAR-10
    }
    specs = []
    for name in method_names(chosen, (GRAM, *METHODS)):
        if name == GRAM:
            taps = "paper" if hasattr(subject.network, "paper_taps") else "all"
            specs.append(MethodSpec("Gram", GRAM, {"taps": taps, **(gram or {})}))
        else:
            specs.append(MethodSpec(METHODS[name].record.title, name, special.get(name, {})))
    return specs


def entries_for(
    subject: Subject, ood: OodSet, method: str, tables: Sequence[str], trained: str = "cross_entropy"
) -> tuple[published.Entry, ...]:
    """The published figures to stand beside ours."""
    if ood.published is None:
        return ()
    # Some tables have only the mean over both networks.
    inside = subject.published_title
    for network in (subject.loaded.name, "resnet34 and densenet"):
        entries = published.find(inside, network, ood.published, method, tuple(tables), trained)
        if entries:
            return tuple(entries)
    return ()


def lines_of(
    subject: Subject,
    sets: Iterable[OodSet],
    methods: Iterable[str],
    rows: Iterable[Row],
    entries: Callable[[OodSet, str], tuple[published.Entry, ...]],
) -> list[Line]:
    """A line for every set and method, those without data too."""
    row_of = {(row.ood, row.method): row for row in rows}
    methods = list(methods)
    lines = []
    for ood_set in sets:
        for method in methods:
            beside = entries(ood_set, method)
            like = ood_set.published if beside and not ood_set.exact and ood_set.published else ""
            row = row_of.get((ood_set.title, method))
            if row is None and not ood_set.exact:
                # Without a figure of ours and a published one there is no line.
                beside = ()
            lines.append(Line(subject.title, subject.inside_title, ood_set.title, method, row, beside, like))
    return lines


def write(
    options: Options,
    name: str,
    title: str,
    lines: Sequence[Line],
    protocol: str,
    *,
    metrics: Sequence[str] = published.SHOWN,
    more: str = "",
    tallied: bool = True,
    rows: str = "out-of-distribution set",
) -> None:
    """Leave the CSV, the Markdown page and the picture, which is drawn from both, in the output folder."""
    folder = options.output
    write_csv(folder / f"{name}.csv", lines)
    page = [f"## {title}", "", f"    {command()}", "", f"{protocol} {surroundings(options)}", ""]
    tables = markdown_tables(lines, metrics, tallied, rows, whole=options.subset is None)
    page += [f"![{title}]({name}.png)", "", tables, *([more, ""] if more else [])]
    (folder / f"{name}.md").write_text("\n".join(page), encoding="utf-8")
    results.draw(folder / f"{name}.csv")
    options.say(f"\n{tables}{more}")


def command() -> str:
    """The command as it was given, without the folders of this machine."""
    words = [re.sub(r"(^|=)/.*/", r"\1", word) for word in sys.argv[1:]]
    return " ".join(["gramwatch", *words]) if words else "gramwatch paper"


def surroundings(options: Options) -> str:
    """The date and the machine of the run."""
    device = torch.device(options.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    today = time.strftime("%Y-%m-%d")
    return f"{today}, {where}, gramwatch {__version__}, PyTorch {torch.__version__.partition('+')[0]}."


def protocol_of(subject: Subject, evaluation: Evaluation, tuned: str = "") -> str:
    """The protocol in words: what was judged, what was drawn, who saw outliers."""
    fitted = "all" if subject.subset is None else f"{10 * subject.subset:,}"
    seen = tuned or "No method saw an outlier."
    marked = INDICATIVE.get(subject.in_distribution)
    images = f". {marked}" if marked else f", fitted on {fitted} training images."
    return f"{subject.title}, {subject.inside_title}{images} {evaluation.protocol} {seen}"


def untuned(methods: Iterable[MethodSpec]) -> str:
    """In words: no outlier was seen, and the methods that could be tuned on outliers were not."""
    names = [method.title for method in methods if method.kind in TUNABLE]
    return f"No method saw an outlier; {' and '.join(names)} untuned." if names else ""


def overview(data: Path | None, say: Callable[[str], None]) -> None:
    """Say which experiments there are, and which sets are present."""
    say("experiments (gramwatch paper NAME):")
    for name, (what, needed) in EXPERIMENTS.items():
        say(f"  {name:17} {what}\n{'':20}needs {needed}")
    say(f"\ndata in {data or datasets.default_root()}:")
    shown = {ood_set.name: None for inside in ("cifar10", "mnist") for ood_set in ood_sets(inside)}
    for name in ("cifar10", *shown):
        say(f"  {name:20} {'present' if _present(name, data) else 'not present'}")


def _present(name: str, data: Path | None) -> bool:
    try:
        datasets.load(name, data, count=1)
    except MissingDataError:
        return False
    return True
