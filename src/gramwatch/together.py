"""Several detectors of one network at once: fitted, or measured, from the same forward passes."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gramwatch.batches import on_device_ahead
from gramwatch.detector import GramDetector, Measurement
from gramwatch.errors import InputError
from gramwatch.guard import Guard
from gramwatch.joint import JointMeasurement, Part, joined_parts
from gramwatch.methods.base import Method
from gramwatch.watch import Single, Watch

Detector = GramDetector | Method | Guard
Measured = dict[str, Measurement | Tensor | JointMeasurement]
"""What each method says of a set: Gram its deviations, a guard what its members say, others their scores."""


def fit_together(detectors: Mapping[str, Detector], loader: Iterable[Any], *, progress: bool = True) -> None:
    """Fit several detectors of one network from one pass over the training data.

    A member of a guard that is given by itself too takes part once.
    """
    guards = [each for each in detectors.values() if isinstance(each, Guard)]
    for each in (*guards, *_singles(detectors)):
        if isinstance(each, Guard | GramDetector):
            each.forget_calibration()
    if _waiting(detectors):
        watch: Watch | None = None
        network = next(iter(detectors.values())).network
        batches = network.batches(loader, "fitting", progress)
        for inputs, labels in on_device_ahead(batches, network.model):
            if watch is None:
                for guard in guards:
                    guard.settle(inputs)
                if not _waiting(detectors):
                    break  # all that need training data were left out
                watch = Watch(_waiting(detectors))
            watch.take(inputs, labels)
        if waiting := _waiting(detectors):
            (watch or Watch(waiting)).finish()
    for each in _singles(detectors):
        if isinstance(each, Method) and not each.record.fitted:
            each.finish()


class Together:
    """Measures any number of sets, all detectors that need no passes of their own from the same passes.

    What is found out about the network at the first batch serves all sets.

    Args:
        detectors: of one network, fitted, by name.

    """

    def __init__(self, detectors: Mapping[str, Detector]) -> None:
        self._detectors = detectors
        self._guarded = any(isinstance(each, Guard) for each in detectors.values())
        self._singles = _singles(detectors)
        self._alone = [each for each in self._singles if isinstance(each, Method) and each.alone]
        watching = [each for each in self._singles if each not in self._alone]
        self._watch = Watch(watching) if watching else None

    def measure(self, loader: Iterable[Any], doing: str, progress: bool = True) -> Measured:
        """What every detector says of one set."""
        parts: dict[Single, list[Part]] = {each: [] for each in self._singles}
        logits: list[Tensor] = []
        network = self._singles[0].network
        batches = (inputs for inputs, _ in network.batches(loader, doing, progress))
        for inputs in on_device_ahead(batches, network.model):
            if self._watch is not None:
                seen, found = self._watch.measure(inputs)
                if self._guarded:
                    logits.append(seen.cpu())
                for each, part in found.items():
                    parts[each].append(part.cpu() if isinstance(part, Tensor) else part)
            for rival in self._alone:
                parts[rival].append(rival.score_inputs(inputs)[1].cpu())
        if not next(iter(parts.values())):
            raise InputError(f"the loader yielded no example: {doing} needs some")
        joined = {each: joined_parts(list_of_parts) for each, list_of_parts in parts.items()}
        measured: Measured = {}
        for name, detector in self._detectors.items():
            if isinstance(detector, Guard):
                of_members = {member: joined[each] for member, each in detector.members.items()}
                measured[name] = JointMeasurement(torch.cat(logits), of_members)
            else:
                measured[name] = joined[detector]
        return measured


def _waiting(detectors: Mapping[str, Detector]) -> list[Single]:
    """Those that need training data."""
    return [each for each in _singles(detectors) if isinstance(each, GramDetector) or each.record.fitted]


def _singles(detectors: Mapping[str, Detector]) -> list[Single]:
    """Those that look for themselves, each once: detectors given, and members of guards."""
    found: dict[Single, None] = {}
    for each in detectors.values():
        found |= dict.fromkeys(each.members.values() if isinstance(each, Guard) else (each,))
    return list(found)
