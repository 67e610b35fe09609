"""A member with a fitted rule is one file: a method, its rule, and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import gramwatch
from gramwatch.detect.measurement import FittedRule, Measurement
from gramwatch.files.artifact import FINITE, POSITIVE, Field
from gramwatch.methods import METHODS, Method, Record, register
from gramwatch.observe.observation import Observation
from tests.guarded import images, made


@dataclass(frozen=True)
class Deviates(FittedRule):
    """How many standard deviations the two highest logits lie from their mean."""

    mean_: Tensor | None = None
    scale_: Tensor | None = None
    kept: ClassVar = {
        "mean_": Field(("values",), torch.float64, FINITE),
        "scale_": Field(("values",), torch.float64, POSITIVE),
    }

    def fit(self, measured: Measurement) -> "Deviates":
        return Deviates(measured.values.mean(0), measured.values.std(0))

    def __call__(self, measured: Measurement) -> Tensor:
        distance = ((measured.values - self.mean_) / self.scale_).norm(dim=1)
        return torch.where(measured.finite, distance, torch.inf).unsqueeze(1)


class TopTwo(Method):
    """The two highest logits, compared with those of calibration examples."""

    name = "top_two"
    record = Record("top two", "none", "|| (v - E[v]) / std(v) ||, v the two highest logits", fitted=False)
    rule_kind = Deviates

    def measured(self, observation: Observation) -> Measurement:
        values = observation.logits.double().topk(2).values
        return Measurement(values, observation.logits, values.isfinite().all(1))

    def score(self, observation: Observation) -> Tensor:
        return self.scored(self.measured(observation))

    @classmethod
    def values_in(cls, header: Mapping[str, Any]) -> int:
        return 2


@pytest.fixture
def known():
    register(TopTwo)
    yield
    del METHODS[TopTwo.name]


def test_it_is_fitted_saved_loaded_and_explained_like_the_others(known, tmp_path):
    net = made()
    guard = gramwatch.Guard(net, members=["gram", "top_two", "energy"])
    guard.fit(images(400, 0).split(100), progress=False).calibrate(images(400, 1).split(100), progress=False)
    guard.save(tmp_path / "guard")
    loaded, seen = gramwatch.load(tmp_path / "guard", net), images(20, 2)
    assert torch.equal(loaded(seen).score, guard(seen).score)
    rule = guard.calibration().rule.rules["top_two"]
    part = guard.measure(seen).parts["top_two"]
    assert torch.equal(rule(part)[:, 0], guard.calibration().rule.member_scores(guard.measure(seen))[:, 1])
    explained = loaded.explain(seen[:2])
    torch.testing.assert_close(explained.members.sum(1), explained.detection.score)


def test_it_judges_by_itself(known, tmp_path):
    net = made()
    alone = TopTwo(net).calibrate(images(400, 1).split(100), progress=False)
    alone.save(tmp_path / "alone")
    seen = images(20, 2)
    assert torch.equal(gramwatch.load(tmp_path / "alone", net)(seen).score, alone(seen).score)
