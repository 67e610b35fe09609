"""Every method on the demo's networks: Guard, Gram and all others, from one pass over the data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.detect.detector import Detector
from gramwatch.evaluation.evaluate import Evaluation, evaluate, fit_together
from gramwatch.explain.frame import pyplot
from gramwatch.guard.guard import MEMBERS, Guard, why_not
from gramwatch.inputs.batches import on_device
from gramwatch.inputs.demo import digits, outlier_sets, small_convnet, small_mlp, train
from gramwatch.methods import METHODS
from gramwatch.watch import Look, Network

GUARD, GRAM = "guard", "gram"
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {"convnet": small_convnet, "mlp": small_mlp}
"""The demo's networks."""


def method_names(chosen: str | Iterable[str], every: Sequence[str] | None = None) -> list[str]:
    """The names of the chosen methods; `"all"` for all there are, registered ones included."""
    every = (GUARD, GRAM, *METHODS) if every is None else every
    names = [name.strip() for name in chosen.split(",")] if isinstance(chosen, str) else list(chosen)
    if names == ["all"]:
        return list(every)
    for name in names:
        if name not in every:
            raise ValueError(f"there is no method '{name}': choose from {', '.join(every)}, or all")
    return list(dict.fromkeys(names))


def fitted(
    network: nn.Module | Network,
    loader: Iterable[Any],
    methods: Iterable[str],
    say: Callable[[str], None] = print,
    *,
    progress: bool = True,
) -> dict[str, Detector]:
    """The chosen methods fitted on training data, by the titles that tables show.

    Methods that cannot be used on the network are left out, with the reason. Guard has its default settings.
    Its members are the very detectors that stand beside it: Gram looks at what it looks at in a guard.
    """
    methods, network = list(methods), Network.of(network)
    members = Guard(network).members
    detectors: dict[str, Detector] = {
        name: members[name] if name in members else METHODS[name](network)
        for name in dict.fromkeys([*methods, *(MEMBERS if GUARD in methods else ())])
        if name != GUARD
    }
    inputs, _ = next(network.batches(loader, "looking", progress=False))
    look = Look(network, on_device(inputs, network.model))
    reasons = {name: reason for name, detector in detectors.items() if (reason := why_not(detector, look))}
    for name, reason in reasons.items():
        say(f"{detectors.pop(name).title} is left out: {reason}")
    chosen: dict[str, Detector] = {}
    if GUARD in methods:
        chosen["Guard"] = Guard.of({name: detectors[name] for name in MEMBERS if name in detectors})
    chosen |= {detectors[name].title: detectors[name] for name in methods if name in detectors}
    if chosen:
        fit_together(chosen, loader, progress=progress)
    return chosen


def learning(methods: Iterable[str]) -> list[str]:
    """Those of the methods that need training data."""
    return [name for name in methods if name in (GUARD, GRAM) or METHODS[name].record.fitted]


def overviews(name: str, result: Evaluation) -> str:
    """AUROC and TNR of every method on every set, best mean first, and the protocol."""
    return (
        f"\n{name}, AUROC in percent\n\n{result.overview('auroc')}\n"
        f"\n{name}, TNR at 95 % TPR in percent\n\n{result.overview('tnr')}\n\n{result.protocol}"
    )


def run(
    methods: str | Iterable[str] = "all",
    networks: Iterable[str] = ("convnet", "mlp"),
    folder: str | PathLike[str] = "gramwatch-evaluation",
    say: Callable[[str], None] = print,
) -> dict[str, Evaluation]:
    """Train the demo's networks, evaluate every method on them; leave tables and pictures in `folder`."""
    from gramwatch.evaluation.comparison import draw_comparison

    chosen = method_names(methods)
    networks = list(networks)
    for name in networks:
        if name not in NETWORKS:
            raise ValueError(f"there is no network '{name}': choose from {', '.join(NETWORKS)}")
    pyplot()  # known to be there before anything is trained
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = digits()
    outliers: dict[str, Sequence[Tensor]] = {name: x.split(256) for name, x in outlier_sets(data).items()}
    training = list(zip(data.train.split(256), data.train_labels.split(256), strict=True))
    results = {}
    for name in networks:
        torch.manual_seed(0)
        network = NETWORKS[name]()
        train(network, data.train, data.train_labels)
        detectors = fitted(network, training, chosen, say)
        result = evaluate(detectors, data.test.split(256), outliers)
        results[name] = result
        say(overviews(name, result))
        result.to_csv(folder / f"{name}.csv")
        result.to_markdown(folder / f"{name}.md")
        title = f"Every method on the demo's {name}"
        draw_comparison(folder / f"{name}.png", result, title, table=f"{name}.md")
    pictures = " and ".join(str(folder / f"{name}.png") for name in results)
    say(f"\nLook at {pictures}; the tables are beside them.")
    return results
