"""Several detectors of one network at once: fitted, or measured, from the same forward passes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gramwatch.detector import Collector, GramDetector, Measurement, batches_of
from gramwatch.errors import InputError
from gramwatch.observation import Observation, Observer
from gramwatch.rivals.base import Rival
from gramwatch.taps import Inputs, on_device

Detector = GramDetector | Rival
Measured = dict[str, Measurement | Tensor]
"""What each method says of a set: Gram its deviations, the others their scores."""


def fit_together(detectors: Mapping[str, Detector], loader: Iterable[Any], *, progress: bool = True) -> None:
    """Fit several detectors of one network from one pass over the training data."""
    rivals = [d for d in detectors.values() if isinstance(d, Rival)]
    grams = {name: d for name, d in detectors.items() if isinstance(d, GramDetector)}
    waiting = [rival for rival in rivals if rival.record.fitted]
    left_out: dict[str, Tensor | int] = dict.fromkeys(grams, 0)
    for gram in grams.values():
        gram.forget_calibration()
    if waiting or grams:
        watch = _Watch(waiting, grams)
        for inputs, labels in batches_of(loader, "fitting", progress):
            inputs = on_device(inputs, watch.model)
            observation, collected = watch(inputs, labels)
            for name, collector in collected.items():
                left_out[name] = left_out[name] + grams[name].take(
                    inputs, observation.logits, collector.statistics
                )
            for name in grams.keys() - collected.keys():
                left_out[name] = left_out[name] + grams[name].take_alone(inputs)
            for rival in waiting:
                rival.take(observation)
    for name, gram in grams.items():
        gram.finish(int(left_out[name]))
    for rival in rivals:
        rival.finish()


def measure_together(
    detectors: Mapping[str, Detector], loader: Iterable[Any], doing: str, progress: bool
) -> Measured:
    """Every detector over one set, all that need no passes of their own from the same forward passes."""
    alone = {name: d for name, d in detectors.items() if isinstance(d, Rival) and d.alone}
    rivals = {name: d for name, d in detectors.items() if isinstance(d, Rival) and not d.alone}
    grams = {name: d for name, d in detectors.items() if isinstance(d, GramDetector)}
    watch = _Watch(list(rivals.values()), grams) if rivals or grams else None
    parts: dict[str, list[Any]] = {name: [] for name in detectors}
    for inputs, _ in batches_of(loader, doing, progress):
        if watch is not None:
            inputs = on_device(inputs, watch.model)
            observation, collected = watch(inputs, None)
            for name, collector in collected.items():
                parts[name].append(grams[name].measured(inputs, observation.logits, collector.statistics))
            for name in grams.keys() - collected.keys():
                parts[name].append(grams[name].measure(inputs))
            for name, rival in rivals.items():
                parts[name].append(rival.judged(observation).cpu())
        for name, rival in alone.items():
            parts[name].append(rival.score_inputs(inputs)[1].cpu())
    if not next(iter(parts.values())):
        raise InputError(f"the loader yielded no example: {doing} needs some")
    return {
        name: torch.cat(each) if isinstance(each[0], Tensor) else Measurement.joined(each)
        for name, each in parts.items()
    }


def shared_observer(rivals: Iterable[Rival]) -> Observer:
    """An observer that collects what all of them need."""
    rivals = list(rivals)
    first = rivals[0]
    for rival in rivals:
        if rival.model is not first.model or (rival.features, rival.taps) != (first.features, first.taps):
            raise ValueError("detectors that share a pass must have the same model, features and taps")
    needs = frozenset().union(*(rival.needs for rival in rivals))
    return Observer(first.model, needs, taps=first.taps, features=first.features)


class _Watch:
    """Runs the network once for all: an observation for the rivals, collected statistics for Gram."""

    def __init__(self, rivals: Sequence[Rival], grams: Mapping[str, GramDetector]) -> None:
        self._grams = grams
        self.model = rivals[0].model if rivals else next(iter(grams.values())).model
        self._observer = shared_observer(rivals) if rivals else Observer(self.model)

    def __call__(self, inputs: Inputs, labels: Tensor | None) -> tuple[Observation, dict[str, Collector]]:
        """What was seen of a batch. A Gram detector with too many statistics for one pass is left out."""
        collected = {name: gram.collector(inputs) for name, gram in self._grams.items()}
        collected = {name: each for name, each in collected.items() if not self._grams[name].is_large(inputs)}
        return self._observer(inputs, labels, list(collected.values())), collected
