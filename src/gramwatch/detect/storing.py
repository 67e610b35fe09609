"""Storing: the files and checkpoints of detectors, and the probe that tells whether a network has changed."""

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from gramwatch.detect import probe
from gramwatch.detect.contract import Contract
from gramwatch.detect.passes import measure, plan_for
from gramwatch.detect.progress import Counted
from gramwatch.errors import ArtifactError, warn, warn_once
from gramwatch.files import artifact
from gramwatch.files.writing import check_writable
from gramwatch.inputs.adapters import adapted
from gramwatch.inputs.batches import Inputs, device_of, on_device
from gramwatch.watch import Look, Network
from gramwatch.watch.running import is_compiled

_C = TypeVar("_C", bound=Contract)


def write(detector: Contract, path: str | PathLike[str], batches: int | None = None) -> None:
    """Write a detector to a file, or the checkpoint of a fit after so many batches."""
    check_writable(path)
    header, tensors = detector.contents()
    header |= {"network": artifact.fingerprint(detector.model), "metadata": detector.metadata}
    header["counted"] = detector.counted.as_json()
    if batches is not None:
        header["read"] = detector._fits.read.as_json()
    if detector.network.adapters:
        header["adapters"] = detector.network.adapters
    if detector._recipe is not None and (answered := probed(detector, detector._recipe)) is not None:
        header["probe"] = answered
    artifact.write(path, {**header, "batches": batches}, tensors)


def restored(
    kind: type[_C],
    saved: artifact.Saved,
    model: nn.Module | Network,
    accept_other_weights: bool = False,
    check_probe: bool = True,
) -> _C:
    """The detector in an opened file. The adapters in the file are used unless the network has its own."""
    network = adapted(saved.adapters, Network.of(model))
    detector = saved.restored(kind, network, network.model, accept_other_weights)
    with artifact.reading(saved.path):
        counted = Counted.from_json(saved.header.get("counted"))
        for leaf in detector.leaves:
            leaf._examples = counted
        if saved.header.get("batches") is None:
            detector.check_fitted()
        stored = saved.header.get("probe")  # files of earlier versions have none
        if stored is None:
            return detector
        then, inputs = probe.Answer.from_json(stored), probe.made(stored["input"])
    detector._recipe = stored["input"]
    if check_probe and saved.same_weights:
        _compare(detector, then, inputs, saved.path)
    return detector


def _answer(detector: Contract, inputs: Inputs) -> probe.Answer:
    """The logits of a batch of one, and the score if the detector is calibrated.

    Everything is prepared anew, so that nothing is kept of an input that is made up. A compiled network
    would be compiled for it, and a method that is `alone` prepares by itself: they have no score.
    """
    with probe.plainly(detector.network):
        logits, score = probe.logits_of(detector.network, inputs), None
        compiled = any(map(is_compiled, detector.model.modules()))
        if detector._calibration is not None and not detector.alone and not compiled:
            plan = plan_for(detector.leaves, Look(detector.network, inputs))
            (observations,) = plan.run(inputs)
            (measured,) = measure([detector], detector.leaves, [observations])
            score = float(detector.calibration(logits.device).judged(measured).score)
        return probe.Answer.of(logits, score)


def probed(
    detector: Contract, recipe: Any, prepare: Callable[[Any], Inputs] = lambda made: made
) -> dict[str, Any] | None:
    """The probe for a file. None if the network cannot be run on an input that is made up, or is random.

    `prepare` makes the network's input of what the recipe makes.
    """
    try:
        inputs = prepare(on_device(probe.made(recipe), detector.model))
        answer = probe.repeatable(_answer(detector, inputs), detector.network, inputs)
        return None if answer is None else answer.to_json(recipe)
    except Exception as error:  # whatever the network raises
        why = f"{type(error).__name__}: {error!s:.200}"
        warn_once(detector.network.module, f"no probe is saved: the network fails on made-up inputs ({why})")
        return None


def _compare(detector: Contract, then: probe.Answer, inputs: Inputs, path: Path) -> None:
    """Warn if the network or the detector answers the probe otherwise than when the file was written."""
    device = device_of(detector.model)
    if then.device != ("cpu" if device is None else device.type):
        return
    try:
        now = _answer(detector, on_device(inputs, detector.model))
    except Exception as error:  # whatever the network raises
        differs = f"it fails: {type(error).__name__}: {error!s:.200}"
    else:
        differs = then.differences(now, now.rounding(detector.network.dtype))
    if differs:
        warn(
            f"{path}: the network answers the probe otherwise than when the file was written: {differs}. "
            "Its tensors are the same, so its code differs (an activation, pooling, padding, an epsilon, "
            "a buffer that is not saved), or this library's. The false-alarm rate does not hold: build "
            "the network as it was, or fit and calibrate anew. check_probe=False does not look"
        )


def resume(detector: Contract, checkpoint: str | PathLike[str] | None) -> tuple[int, Any]:
    """Continue from the checkpoint of an interrupted fit.

    Return the number of batches in it, and what they were; None if the file does not say.
    """
    if checkpoint is None:
        return 0, None
    check_writable(checkpoint)
    if not Path(checkpoint).exists():
        return 0, None
    saved = artifact.read(checkpoint)
    batches = saved.batches()
    before = restored(type(detector), saved, detector.network)
    detector._recipe = before._recipe
    remedy = "delete it to start anew"
    for name, mine, theirs in differences(detector, before):
        raise ArtifactError(f"{checkpoint} was begun with {name} = {theirs!r}, not {mine!r}: {remedy}")
    _check_members(detector, before, checkpoint, remedy)
    detector.take_over(before)
    for leaf in detector.leaves:
        leaf._examples = before.counted
    with artifact.reading(saved.path):
        begun = saved.header.get("read")
        if begun is not None:
            artifact.check_types(begun, examples=int, checksum=int)
    return batches, begun


def _check_members(
    detector: Contract, before: Contract, checkpoint: str | PathLike[str], remedy: str
) -> None:
    """Refuse a checkpoint whose members differ from those of the detector."""
    for name, earlier in before.members.items():
        member = detector.members[name]
        if type(member) is not type(earlier):
            raise ArtifactError(f"{checkpoint} was begun with {earlier.name} as {name}: {remedy}")
        for setting, mine, theirs in differences(member, earlier):
            what = f"{setting} = {theirs!r}, not {mine!r}, for {name}"
            raise ArtifactError(f"{checkpoint} was begun with {what}: {remedy}")


def differences(one: Contract, other: Contract) -> Iterator[tuple[str, Any, Any]]:
    """The settings in which two detectors differ: name, value of the one, value of the other."""
    theirs = other.settings_as_json()
    for name, mine in one.settings_as_json().items():
        if mine != theirs[name]:
            yield name, mine, theirs[name]
