"""The promise of a monitor, tried on shipped monitors with their default seed, over many calibration sets.

A world is a calibration set and a stream, drawn anew from one distribution. What a monitor promises, it
promises over worlds. A draw from sorted scores that is the same in all worlds breaks it. One world cannot
show that.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import kstest

from gramwatch import Detection, Monitor
from gramwatch.detect.measurement import AsMeasured, Calibration
from gramwatch.detect.threshold import p_value
from gramwatch.stream.sequential import POWERS, Evidence, OnlineRanks, PowerBets

LEVEL = 0.95


class Scored:
    """A detector that is calibrated with these scores."""

    level = LEVEL

    def __init__(self, scores: np.ndarray) -> None:
        self.scores = torch.from_numpy(scores)

    def calibration(self) -> Calibration:
        return Calibration.restored(AsMeasured(), self.scores.unsqueeze(1), LEVEL, {"split": True})

    def __call__(self, scores: np.ndarray) -> Detection:
        result = torch.from_numpy(scores)
        p, logits = p_value(result, self.scores), torch.zeros(len(result), 2)
        return Detection(logits, logits.argmax(1), result, p, p <= 1 - LEVEL)


def worlds(size: int, count: int, replicas: int) -> list[list[Monitor]]:
    """Calibration sets of this size, with the monitors of all replicas."""
    rng = np.random.default_rng([size, replicas])
    detectors = [Scored(rng.standard_normal(size)) for _ in range(count)]
    return [[Monitor(detector, replica=(i, replicas)) for i in range(replicas)] for detector in detectors]


def first_bets(monitor: Monitor) -> np.ndarray:
    """The mean of `eps p^(eps-1)` for the first image of a world, over images and lots, for each eps."""
    chances = np.diff(ndtr(np.concatenate([[-np.inf], monitor._grid, [np.inf]])))
    equal = monitor._ranks.counts[0, 0]
    higher = equal[::-1].cumsum()[::-1] - equal
    low, high = (number / (1 + equal.sum()) for number in (higher, higher + 1 + equal))
    return np.array([((high**eps - low**eps) / (high - low) * chances).sum() for eps in POWERS])


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_mean_of_the_first_bet_is_one_for_every_number_of_calibration_images(replicas):
    sizes, sets = np.linspace(19, 2_599, 20).astype(int), 48 // replicas
    deviations = []
    for size in sizes:
        bets = np.array(
            [np.mean([first_bets(frame) for frame in world], 0) for world in worlds(size, sets, replicas)]
        )
        deviations.append((bets.mean(0) - 1) / (bets.std(0) / sets**0.5))
    assert np.abs(deviations).max() < 5
    assert np.square(deviations).mean() < 2.2


def test_lots_are_uniform_over_calibration_sets_and_differ_between_replicas():
    """A small lot that all monitors share would be a small p-value in all of them."""
    lots = np.array(
        [
            [1 - frame._random.random(3) for frame in world]
            for size in (19, 600)
            for world in worlds(size, 200, 2)
        ]
    )
    for replica in range(2):
        for image in range(3):
            assert kstest(lots[:, replica, image], "uniform").pvalue > 1e-3
    assert np.abs(np.corrcoef(lots.reshape(len(lots), 6).T) - np.eye(6)).max() < 0.2


def strengths(monitors: Sequence[Monitor], scores: np.ndarray) -> np.ndarray:
    """The strength of monitors after each image of their streams, `(images, monitors)`, all at once."""
    bins = np.stack([monitor._bins(row) for monitor, row in zip(monitors, scores, strict=True)])
    lots = np.stack([1 - monitor._random.random(scores.shape[1]) for monitor in monitors])
    ranks = OnlineRanks(np.concatenate([monitor._ranks.counts for monitor in monitors]))
    evidence, bets, zero = Evidence(len(bins), PowerBets.count), PowerBets(), np.zeros(len(bins), np.int64)
    strengths_of = []
    for image in range(scores.shape[1]):
        evidence.add(bets(ranks.rank(bins[:, image], zero, lots[:, image])))
        strengths_of.append(evidence.strength)
    return np.stack(strengths_of)


@pytest.mark.parametrize(("size", "replicas"), [(19, 1), (1_360, 1), (517, 2), (1_602, 4)])
def test_a_false_alarm_within_200_images_is_as_rare_as_promised(size, replicas):
    """At most t / A = 2 %, by the mean strength of the replicas."""
    mean_time, images, count = 10_000, 200, 400
    monitors = list(chain.from_iterable(worlds(size, count, replicas)))
    scores = np.random.default_rng(size).standard_normal((len(monitors), images))
    result = strengths(monitors, scores)
    alarms = (result.reshape(images, count, replicas).mean(2) >= mean_time).any(0)
    assert alarms.mean() <= images / mean_time

    watched = Scored(np.random.default_rng([size, replicas]).standard_normal(size))
    first = Monitor(watched, replica=(0, replicas))
    first.update(watched(scores[0]))
    np.testing.assert_array_equal(first._history.curves()[1], result[:, 0])
