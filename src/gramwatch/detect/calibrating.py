"""Calibrating: the rule and the ranks from measurements, and the rounding of scores in other batches."""

from typing import Any

import torch
from torch import Tensor

from gramwatch.detect.contract import Contract
from gramwatch.detect.distributed import Group
from gramwatch.detect.measurement import (
    Calibration,
    Measurement,
    check_enough,
    warn_of_calibration,
    warn_of_rounding,
)
from gramwatch.detect.split import KeptInputs, halves
from gramwatch.errors import CalibrationError, GramwatchError, in_short
from gramwatch.inputs.batches import on_device

RUN_AGAIN = 32
"""The number of calibration inputs that are run again in other batches."""
SIZES_AGAIN = (1, 7)
"""The sizes of these batches. Kernels differ most for a single input and for an odd number of them."""


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
