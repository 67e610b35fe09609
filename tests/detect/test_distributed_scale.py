"""docs/scale.md: its figures are those of docs/data/scale.json, which hold what is promised."""

import json
import time

import pytest
import torch

from gramwatch import Guard
from lab.benchmarks import document, scale, scale_ranks
from tests.fed import quietly
from tests.guarded import images, made


@pytest.fixture
def result():
    return json.loads((document.DOCS / "data" / "scale.json").read_text(encoding="utf-8"))


def test_the_results_are_what_is_promised(result):
    rows = result["exactness"]
    assert {(row["ranks"], row["loader"]) for row in rows} == {
        (ranks, loader) for ranks in (1, 2, 3, 4, 8) for loader in scale_ranks.LOADERS
    }
    for row in rows:
        assert row["bounds"] > 100_000
        assert row["bounds_differing"] == row["counts_differing"] == 0
        assert row["sums"] > 10_000
        assert row["sums_difference"] <= 1e-6
        assert row["score_difference"] <= 1e-6
        assert row["all_ranks_equal"]
    assert any(0 in row["examples"] for row in rows)
    assert result["killed"]["seconds"] < 30
    assert all(f"rank {result['killed']['unlucky']} ended" in text for text in result["killed"]["said"])
    assert min(result["speed"][name] for name in ("best", "cpu_speed_up")) >= 1.7


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_the_size_of_a_state_is_computed_for_any_number_of_classes(storage):
    guard = Guard(made(), orders=(1, 2), storage=storage)
    quietly(guard.fit, images(200, 1).split(50), progress=False)
    tensors = guard.contents()[1]
    small = (
        "exponent",
        "ranks_",
        "classes_",
        "widths_",
        "width_",
        "count_",
    )  # a few bytes for each class, order or tap
    kept = [tensor for name, tensor in tensors.items() if not name.endswith(small)]
    actual = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    full = all(
        torch.equal(t, tensors[n.replace("ranks_", "widths_")]) for n, t in tensors.items() if "ranks_" in n
    )
    classes = len(guard.members["gram"].class_counts_)
    assert full  # else the whitening is smaller than computed
    assert scale.state_bytes(guard, classes, 200, half=storage == "float16") == actual


def test_other_programs_are_noticed():
    before = scale.busy_seconds()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert scale.busy_seconds() - before >= 0.15


def test_hours_and_traffic():
    assert scale.hours(7_200, rate=2, processes=1, share=0.5) == 1
    assert scale.hours(7_200, rate=2, processes=4, share=0.5) == 0.5
    assert scale.exchanged(10, 8) == {"all": 140, "busiest": 30}
    assert scale.exchanged(10, 5) == {"all": 80, "busiest": 30}
    assert [scale.size(n) for n in (5_000, 2.5e6, 361e6, 4.06e9, 2.1e12)] == [
        "5 kB", "2.5 MB", "361 MB", "4.1 GB", "2.1 TB",
    ]  # fmt: skip


def test_a_difference_is_found():
    expected = {"a bounds.minimum": torch.tensor([1.0, 2.0]), "a sums_": torch.tensor([1.0, -4.0])}
    expected |= {"score": torch.tensor([2.0]), "p_value": torch.tensor([0.5]), "a count_": torch.tensor(3)}
    found = {name: tensor.clone() for name, tensor in expected.items()}
    assert scale.compared(found, expected)["bounds_differing"] == 0
    found["a bounds.minimum"][0] += 1e-7
    found["a sums_"][0] += 0.04
    found["a count_"] += 1
    row = scale.compared(found, expected)
    assert (row["bounds_differing"], row["counts_differing"]) == (1, 1)
    assert row["sums_difference"] == pytest.approx(0.01)
