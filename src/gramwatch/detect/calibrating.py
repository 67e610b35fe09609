"""Calibrating: whole loaders measured, by one or several processes; the rule and the ranks from that.

A few inputs are run again in other batches, to measure the rounding of their scores.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gramwatch.detect.contract import Contract
from gramwatch.detect.distributed import Group, together
from gramwatch.detect.measurement import (
    Calibration,
    Measurement,
    check_enough,
    warn_of_calibration,
    warn_of_rounding,
)
from gramwatch.detect.progress import Counted, checksums
from gramwatch.detect.split import KeptInputs, halves
from gramwatch.errors import CalibrationError, GramwatchError, InputError, in_short
from gramwatch.inputs.batches import Inputs, count_examples, on_device, on_device_ahead
from gramwatch.watch import Network

RUN_AGAIN = 32
"""The number of calibration inputs that are run again in other batches."""
SIZES_AGAIN = (1, 7)
"""The sizes of these batches. Kernels differ most for a single input and for an odd number of them."""


# --- measurements ------------------------------------------------------------------------------------


def measured_all(
    network: Network,
    loader: Iterable[Any],
    measure: Callable[[Inputs], Mapping[str, Measurement]],
    doing: str,
    progress: bool,
    kept: KeptInputs | None = None,
    sharded: bool | None = None,
) -> dict[str, Measurement]:
    """The measurements of a whole loader, by detector, on the CPU. Ranks measure their parts.

    The result has the batches in turns: the first of every rank, the second of every rank, and so on. If the
    ranks deal out the batches of one loader, this is the order of the loader. The running numbers of the
    inputs that are `kept` are those of this order.
    """
    numbers: list[int] = []
    parts: list[Mapping[str, Measurement]] = []
    counted = Counted()
    with together(network.model, doing) as group:
        part = group.part(loader, network.inputs_of, sharded)
        numbered = network.numbered(part, doing, progress and group.rank == 0)
        read = ((number, inputs) for number, inputs, _ in numbered)
        watched = read if kept is None else _keeping(kept, read, group)
        for number, inputs in on_device_ahead(watched, network.model):
            numbers.append(number)
            if group.size > 1:
                counted = counted.joined(Counted.of(checksums(inputs)))
            parts.append(measure(inputs))
        group.compare(part, [counted])
        counts = [len(next(iter(measured.values()))) for measured in parts]
        mine = {
            name: Measurement.joined([part[name] for part in parts]) for name in (parts[0] if parts else ())
        }
        reading = None if kept is None else kept.reading()
        ranks = group.gather((numbers, counts, _sharing_logits(mine), reading))
        turns = _in_turns([(numbers, counts) for numbers, counts, _, _ in ranks])
        if kept is not None:
            readings = [reading for *_, reading in ranks if reading is not None]
            kept.settle(readings, _firsts(turns, group.size), group.rank)
        return _ordered([measured for _, _, measured, _ in ranks], turns, doing)


def _keeping(
    kept: KeptInputs, read: Iterable[tuple[int, Inputs]], group: Group
) -> Iterator[tuple[int, Inputs]]:
    """The batches, which `kept` takes in before they are moved to a GPU."""
    first = usual = 0
    for number, inputs in read:
        usual = usual or count_examples(inputs)
        if group.size > 1:  # the batches of the other ranks are not known: see `KeptInputs`
            first = (number * group.size + group.rank) * usual
        kept.add(inputs, first)
        first += count_examples(inputs)
        yield number, inputs


_Turn = tuple[int, int, int, int]
"""A batch: its number, its rank, its place among all examples rank by rank, and its number of examples."""


def _in_turns(ranks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[_Turn]:
    """The batches of all ranks in turns, from the numbers of the batches and of the examples in each."""
    turns: list[_Turn] = []
    start = 0
    for rank, (numbers, counts) in enumerate(ranks):
        for number, count in zip(numbers, counts, strict=True):
            turns.append((number, rank, start, count))
            start += count
    return sorted(turns)


def _firsts(turns: Sequence[_Turn], ranks: int) -> list[list[int]]:
    """The running number of the first example of each batch, for every rank."""
    firsts: list[list[int]] = [[] for _ in range(ranks)]
    running = 0
    for _, rank, _, count in turns:
        firsts[rank].append(running)
        running += count
    return firsts


def _ordered(
    ranks: Sequence[dict[str, Measurement]], turns: Sequence[_Turn], doing: str
) -> dict[str, Measurement]:
    """One measurement of all ranks, in turns."""
    with_examples = [measured for measured in ranks if measured]
    if not with_examples:
        raise InputError(f"the loader yielded no example: {doing} needs some")
    if len(ranks) == 1:
        return with_examples[0]
    order = torch.cat([torch.arange(start, start + count) for _, _, start, count in turns])
    return _sharing_logits(
        {
            name: Measurement.of_pieces([measured[name] for measured in with_examples])[order]
            for name in with_examples[0]
        }
    )


def _sharing_logits(measured: dict[str, Measurement]) -> dict[str, Measurement]:
    """The same with one copy of equal logits: detectors that share a pass have the same."""
    first = next(iter(measured.values()), None)
    return {
        name: replace(measurement, logits=first.logits)
        if first is not None and measurement.logits.equal(first.logits)
        else measurement
        for name, measurement in measured.items()
    }


# --- calibration -------------------------------------------------------------------------------------


@torch.inference_mode()
def calibrate(
    detector: Contract,
    group: Group,
    measurement: Measurement,
    kept: KeptInputs,
    numbers: Tensor | None = None,
    split: bool = True,
    progress: bool = False,
) -> None:
    """`Detector.calibrate` from the measurement of all examples of a loader, and the inputs kept of it.

    Args:
        detector: the fitted detector.
        group: the ranks of this run.
        measurement: of all examples.
        kept: the sample of inputs. Those of the half that ranks are dropped.
        numbers: the running numbers of the examples that calibrate. None: all.
        split: as for `calibrate`.
        progress: show a progress bar (on a terminal only).

    """
    numbers = torch.arange(len(measurement)) if numbers is None else numbers
    calibration = group.once(
        lambda: calibrated(detector, measurement[numbers], split, kept.seed, numbers, kept.copies(numbers))
    )
    standard = numbers[measurement.finite[numbers]]
    if calibration.how["split"]:
        standard = standard[halves(standard, kept.seed)[0]]
    kept.restrict(standard)
    calibration = detector.rehearsed(calibration, measurement[standard], kept, group, progress)
    rounding = _rounding(detector, group, calibration, measurement, kept)
    detector.forget_calibration()
    detector._calibration = calibration.tolerating(2 * rounding, detector.level)


def calibrated(
    detector: Contract,
    measurement: Measurement,
    split: bool,
    seed: int,
    numbers: Tensor | None = None,
    copies: int = 0,
) -> Calibration:
    """The calibration from the measurement of in-distribution examples with these running numbers."""
    numbers = torch.arange(len(measurement)) if numbers is None else numbers
    warn_of_calibration(measurement.finite, copies)
    measurement, numbers = measurement[measurement.finite], numbers[measurement.finite]
    rule = detector.rule()
    split = split and rule.standardises
    check_enough(len(measurement), detector.level, split)
    detector.check_calibration(measurement)
    how: dict[str, Any] = {"per_class": detector.per_class, "split": split, "seed": seed}
    try:
        calibration = Calibration.of(measurement, rule, detector.level, numbers=numbers, **how)
    except GramwatchError:
        raise
    except ValueError as error:
        raise CalibrationError(str(error)) from None
    detector.check_rule(calibration.rule)
    return calibration


def _rounding(
    detector: Contract, group: Group, calibration: Calibration, measurement: Measurement, kept: KeptInputs
) -> Tensor:
    """The largest change of each kind of score when inputs are run again in other batches, `(kinds,)`.

    If the network cannot be run on other batches, a warning says so, and the change is taken for zero.
    """
    rule, scores = calibration.rule, calibration.scores
    largest, problem = torch.zeros(scores.shape[1], dtype=torch.float64), ""
    numbers = kept.numbers[:RUN_AGAIN].tolist()
    try:
        for size in SIZES_AGAIN:
            for chosen, inputs in kept.batches(size, numbers):
                again = detector.measure(on_device(inputs, detector.model)).changed(Tensor.cpu)
                change = (rule(again) - rule(measurement[chosen])).abs()
                # An overflow that depends on the batch is no rounding.
                change = torch.where(change.isfinite(), change, 0.0)
                largest = largest.maximum(change.amax(0))
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        problem = in_short(error)
    ranks = group.gather((largest, problem))
    largest = torch.stack([of_rank for of_rank, _ in ranks]).amax(0)
    if group.rank == 0:
        warn_of_rounding(float(largest[0]), scores[:, 0], next(filter(None, (p for _, p in ranks)), ""))
    return largest
