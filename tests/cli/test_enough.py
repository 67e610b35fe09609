"""What few images cost: the page and the messages of the commands hold what was measured."""

import torch

from gramwatch.cli import enough
from gramwatch.cli.enough import few_to_calibrate, few_to_fit
from gramwatch.inputs.demo import digits, small_mlp, train
from lab.benchmarks import sample_sizes


def test_the_messages_hold_what_was_measured():
    rows = sample_sizes.read()
    by_calibration = sample_sizes.losses(rows, enough.MISSED_BY_CALIBRATION, "calibrated", "fitted")
    by_fit = sample_sizes.losses(rows, enough.MISSED_BY_FIT, "fitted", "calibrated")
    assert by_calibration == enough.MISSED_BY_CALIBRATION
    assert by_fit == enough.MISSED_BY_FIT


def test_recommended_numbers_hardly_miss_what_most_images_find():
    rows = sample_sizes.read()
    few = {enough.CALIBRATION_IMAGES: 0}
    assert sample_sizes.losses(rows, few, "calibrated", "fitted")[enough.CALIBRATION_IMAGES] <= enough.HARDLY
    few = {enough.IMAGES_OF_A_CLASS: 0}
    assert sample_sizes.losses(rows, few, "fitted", "calibrated")[enough.IMAGES_OF_A_CLASS] <= enough.HARDLY


def test_what_few_images_cost_is_said_only_where_it_costs():
    assert few_to_calibrate(enough.CALIBRATION_IMAGES) is None
    assert few_to_fit(10 * enough.IMAGES_OF_A_CLASS, 10) is None
    for said, number in ((few_to_calibrate(144), "1,000"), (few_to_fit(120, 10), "100 of each class")):
        assert said is not None
        assert f"{number} are recommended" in said
    assert few_to_calibrate(20) is not None
    assert few_to_fit(3, 10) is not None


def test_a_network_is_measured_for_every_pair_of_numbers(monkeypatch):
    data = digits()
    torch.manual_seed(0)
    model = small_mlp()
    train(model, data.train, data.train_labels, epochs=5)
    images = {"digits": data.train, "pool": data.test, "others": data.held_out}
    subject = sample_sizes.Subject(
        model, lambda x: x, "digits", {"others": "test"}, (360, 721), (40, 200), 300, 50, None, None
    )
    monkeypatch.setattr(
        sample_sizes.Subject,
        "images",
        lambda self, name, split, count: images["pool" if split == "test" and name == "digits" else name][
            :count
        ],
    )
    monkeypatch.setattr(sample_sizes, "DRAWS", 5)
    rows = list(sample_sizes.measured("mlp", subject))
    assert {(row["fitted"], row["calibrated"]) for row in rows} == {
        (f, c) for f in (360, 721) for c in (40, 200)
    }
    result = {(row["set"], row["fitted"], row["calibrated"]): row for row in rows}
    assert all(row["low"] <= row["found"] + 1 and row["found"] <= row["high"] + 1 for row in rows)
    assert result["others", 721, 200]["found"] > result["ordinary", 721, 200]["found"] + 20
