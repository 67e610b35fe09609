"""Selection: Benjamini-Hochberg and Storey by their definitions, the rate they keep, and what is too few."""

import math

import numpy as np
import pytest
import torch

import gramwatch
from gramwatch import Detection, GramwatchWarning, InputError


def by_definition(p: np.ndarray, fdr: float, ordinary: float = 1.0, most: float = 1.0) -> set[int]:
    """The k smallest, for the largest k with p_(k) <= fdr k / (m pi)."""
    order = np.argsort(p, kind="stable")
    ks = [k for k in range(1, len(p) + 1) if p[order[k - 1]] <= min(fdr * k / (len(p) * ordinary), most)]
    return set(order[: max(ks, default=0)].tolist())


@pytest.mark.parametrize("seed", range(20))
def test_the_selected_are_those_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    p = np.where(rng.random(60) < 0.3, rng.random(60) ** 6, rng.random(60)).clip(1e-6)
    result = gramwatch.select(torch.from_numpy(p), 0.1, ranking=10**6)
    assert set(result.indices.tolist()) == by_definition(p, 0.1)
    ordinary = min(1.0, (1 + (p >= 0.5).sum()) / 30)
    result = gramwatch.select(torch.from_numpy(p), 0.1, "storey", ranking=10**6)
    assert set(result.indices.tolist()) == by_definition(p, 0.1, ordinary, 0.5 - 1e-9)
    assert result.ordinary == pytest.approx(ordinary)
    assert len(result) == int(result.is_selected.sum())
    if len(result):
        assert result.threshold == p[result.is_selected.numpy()].max()
        assert result.needed is None


def test_ties_are_selected_together_and_rounding_costs_none():
    p = torch.tensor([0.03, 0.03, 0.03, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])
    assert gramwatch.select(p.double(), 0.1, ranking=10**6).indices.tolist() == [0, 1, 2]
    result = gramwatch.select(torch.full((7,), 0.1, dtype=torch.float64), 0.1)  # 0.1 * 7 / 7
    assert len(result) == 7


def test_storey_selects_no_p_value_of_a_half():
    result = gramwatch.select(torch.tensor([0.001] * 95 + [0.5] * 5), 0.3, "storey")
    assert len(result) == 95


@pytest.mark.parametrize("procedure", ["bh", "storey"])
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")
def test_the_realised_rate_over_splits_is_at_most_what_was_asked(procedure, share):
    rng = np.random.default_rng(0)
    n, m, fdr, rates = 1_000, 200, 0.1, []
    ordinary = np.arange(m) >= share * m
    for _ in range(1_000):
        scores = rng.standard_normal(m) + 3.29 * ~ordinary
        p = (1 + n - np.searchsorted(np.sort(rng.standard_normal(n)), scores)) / (n + 1)
        chosen = gramwatch.select(torch.from_numpy(p), fdr, procedure).is_selected.numpy()
        rates.append((chosen & ordinary).sum() / max(1, chosen.sum()))
    error = np.std(rates) / len(rates) ** 0.5
    assert np.mean(rates) <= fdr + 2 * error
    assert np.mean(rates) > 0.2 * fdr


@pytest.mark.parametrize(("outliers", "images"), [(1, 100), (3, 100), (7, 400)])
def test_it_says_how_many_calibration_images_it_would_take(outliers, images):
    def p_values(ranking: int) -> torch.Tensor:
        values = [1 / (ranking + 1)] * outliers + [0.9] * (images - outliers)
        return torch.tensor(values, dtype=torch.float64)

    with pytest.warns(GramwatchWarning, match=f"{outliers} of {images} images"):
        result = gramwatch.select(p_values(50), 0.1, ranking=50)
    needed = result.needed
    assert needed == math.ceil(images / (0.1 * outliers) - 1e-9) - 1
    assert f"{needed:,} calibration images" in repr(result)
    assert len(gramwatch.select(p_values(needed), 0.1)) == outliers
    with pytest.warns(GramwatchWarning, match=f"at least {needed:,}"):
        assert len(gramwatch.select(p_values(needed - 1), 0.1)) == 0


def test_nothing_is_said_of_the_calibration_if_it_is_not_the_reason():
    result = gramwatch.select(torch.tensor([0.3, 0.5, 0.9]), 0.1, ranking=1_000)
    assert len(result) == 0
    assert result.threshold == 0


def test_a_detection_can_be_given():
    p = torch.tensor([0.001, 0.5]).double()
    empty = torch.zeros(2)
    detection = Detection(torch.zeros(2, 3), empty.long(), empty, p, p < 0.05)
    assert gramwatch.select(detection).is_selected.tolist() == [True, False]


def test_no_images_no_selection():
    assert len(gramwatch.select(torch.zeros(0))) == 0


@pytest.mark.parametrize("wrong", [[[0.5]], [0.0, 0.5], [1.5], [math.nan]])
def test_what_is_no_p_value_is_refused(wrong):
    with pytest.raises(InputError, match="p-values"):
        gramwatch.select(torch.tensor(wrong))


def test_wrong_arguments_are_named():
    p = torch.tensor([0.5])
    with pytest.raises(ValueError, match="fdr"):
        gramwatch.select(p, 1.0)
    with pytest.raises(ValueError, match="procedure"):
        gramwatch.select(p, 0.1, "bonferroni")
