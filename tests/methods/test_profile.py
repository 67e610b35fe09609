"""Profile: against its formula in loops; both sides; few examples; files, merging, bad inputs."""

import numpy as np
import pytest
import torch
from torch import nn

import gramwatch
from gramwatch import GramwatchWarning, NotFittedError
from gramwatch.detect.measurement import Measurement
from gramwatch.methods import METHODS, Profile
from gramwatch.methods.profile import MOST_CHANNELS, RIDGE, ProfileRule
from tests.guarded import Net, images, made, profile_distance, profiles


def measured(values: torch.Tensor) -> Measurement:
    return Measurement(values, torch.zeros(len(values), 2), torch.ones(len(values), dtype=torch.bool))


def test_the_score_is_its_formula():
    net, train, held_out, x = made(), images(400, 0), images(60, 1), images(12, 2, 1.5)
    detector = Profile(net, taps="all").fit(train.split(50), progress=False)
    detector.calibrate([held_out], split=False, progress=False)
    fitting = profiles(net, train, held_out)
    expected = [profile_distance(fitting, row) for row in profiles(net, train, x)]
    np.testing.assert_allclose(detector(x).score.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(detector.score_all([x], progress=False).numpy(), expected, rtol=1e-5)


def test_inputs_that_lie_too_near_are_as_unusual_as_inputs_too_far():
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(500, 6, generator=generator, dtype=torch.float64)
    rule = ProfileRule().fit(measured(usual))
    near, far = (rule(measured(torch.full((1, 6), value, dtype=torch.float64))).item() for value in (-4, 4))
    assert min(near, far) > rule(measured(usual)).max()
    assert near == pytest.approx(far, rel=0.2)


def test_numbers_that_go_together_are_unusual_apart():
    generator = torch.Generator().manual_seed(0)
    early = torch.randn(500, 1, generator=generator, dtype=torch.float64)
    late = early + 0.1 * torch.randn(500, 1, generator=generator, dtype=torch.float64)
    rule = ProfileRule().fit(measured(torch.cat([early, late], 1)))
    together, apart = rule(measured(torch.tensor([[1.5, 1.5], [1.5, -1.5]]).double()))[:, 0].tolist()
    assert apart > 2 * together


def test_a_left_out_example_has_no_share_in_the_covariance():
    values = torch.randn(30, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rule = ProfileRule().fit(measured(values))
    z = ((values - values.mean(0)) / values.std(0, correction=0)).numpy()
    whole = z.T @ z / len(z) + RIDGE * np.eye(8)
    expected = [np.sqrt(row @ np.linalg.inv(whole - np.outer(row, row) / len(z)) @ row / 8) for row in z]
    np.testing.assert_allclose(rule.left_out(measured(values))[:, 0].numpy(), expected, rtol=1e-9)


def test_few_examples_left_out_score_as_high_as_new_ones():
    """48 numbers of 50 examples: their own distances are too small, those of the left out are not."""
    own, left_out, new = [], [], []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        fitting, fresh = torch.randn(2, 50, 48, generator=generator, dtype=torch.float64)
        rule = ProfileRule().fit(measured(fitting))
        for found, scores in ((own, rule(measured(fitting))), (new, rule(measured(fresh)))):
            found.append(scores.median().item())
        left_out.append(rule.left_out(measured(fitting)).median().item())
    assert np.mean(own) < 0.6 * np.mean(new)
    assert 0.8 < np.mean(left_out) / np.mean(new) < 1.25


def test_a_number_that_never_varies_counts_nothing():
    values = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[:, 1] = -27.6
    rule = ProfileRule().fit(measured(values))
    moved = values.clone()
    moved[:, 1] = 5
    assert torch.equal(rule(measured(moved)), rule(measured(values)))


def test_a_guard_standardises_it_by_left_out_scores_and_keeps_its_rule(tmp_path):
    net, members = made(), ("gram", "profile", "energy")
    guard = gramwatch.Guard(net, members=members).fit(images(300, 0).split(50), progress=False)
    guard.calibrate([images(80, 1)], progress=False)
    rule = guard.calibration().rule
    fitting = guard.measure(images(80, 1))[gramwatch.detect.measurement.halves(80, 0)[0]]
    left_out = rule.rules["profile"].left_out(fitting.parts["profile"])[:, 0]
    assert rule.standard.median_[1] == left_out.quantile(0.5)
    guard.save(tmp_path / "guard.safetensors")
    back, x = gramwatch.load(tmp_path / "guard.safetensors", net), images(9, 2)
    for name in members:
        assert torch.equal(back(x).parts[name], guard(x).parts[name])
    assert torch.equal(back(x).score, guard(x).score)


def test_a_file_holds_the_rule(tmp_path):
    net, x = made(), images(9, 2)
    detector = Profile(net).fit([images(300, 0)], progress=False).calibrate([images(60, 1)], progress=False)
    detector.save(tmp_path / "profile.safetensors")
    back = gramwatch.load(tmp_path / "profile.safetensors", net)
    assert torch.equal(back(x).score, detector(x).score)
    assert torch.equal(back(x).p_value, detector(x).p_value)
    assert back.calibration().how["examples"] == 60


def test_parts_of_the_training_data_merge_into_the_whole():
    net, train, held_out, x = made(), images(300, 0), images(60, 1), images(9, 2)
    whole = Profile(net).fit(train.split(60), progress=False)
    first = Profile(net).fit([train[:120]], progress=False)
    first.merge(Profile(net).fit([train[120:]], progress=False))
    scores = [each.calibrate([held_out], progress=False)(x).score for each in (whole, first)]
    torch.testing.assert_close(*scores, rtol=1e-8, atol=0)


def test_there_is_no_score_before_a_calibration():
    detector = Profile(made()).fit([images(300, 0)], progress=False)
    with pytest.raises(NotFittedError, match="profile is not calibrated"):
        detector.score_all([images(5, 1)], progress=False)


def test_inputs_that_are_not_finite_are_out_of_distribution():
    detector = Profile(made()).fit([images(300, 0)], progress=False)
    detector.calibrate([images(60, 1)], progress=False)
    x = images(3, 2)
    x[1] = torch.inf
    with pytest.warns(GramwatchWarning, match="1 input"):
        found = detector(x)
    assert found.score.isinf().tolist() == [False, True, False]
    assert found.is_ood[1]


def test_an_image_that_switches_every_channel_off_has_a_finite_score():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 5, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(125, 3)).eval()
    detector = Profile(net).fit([images(300, 0)], progress=False).calibrate([images(60, 1)], progress=False)
    found = detector(torch.zeros(1, 1, 7, 7))
    assert found.score.isfinite().all()
    assert found.is_ood.all()


def test_of_many_channels_a_regular_part_counts():
    layers = (nn.Conv2d(1, 600, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(600, 3))
    net = nn.Sequential(*layers)
    detector = Profile(net.eval()).fit(images(400, 0).split(100), progress=False)
    assert detector.widths_.tolist() == [208, 208]  # 13 of 37 groups of 16
    assert max(detector.widths_.tolist()) <= MOST_CHANNELS
    detector.calibrate([images(60, 1)], progress=False)
    assert detector(images(4, 2)).score.isfinite().all()


def test_it_is_among_the_methods():
    assert METHODS["profile"] is Profile


def test_all_taps_at_once_give_what_one_after_the_other_gives():
    """On a GPU all taps are measured at once."""
    detector = Profile(made(), taps="all").fit(images(400, 0).split(50), progress=False)
    observation = detector.observe(images(8, 3))
    gaussians = detector._fitted_on(observation.logits.device).gaussians
    apart = detector.measured(observation).values
    assert len({len(gaussian.whitening) for gaussian in gaussians}) > 1
    together = detector._measured_together(observation)
    torch.testing.assert_close(together.log(), apart, rtol=1e-9, atol=1e-9)


class Repaired(Net):
    """Its features are finite whatever its input is."""

    def features(self, x):
        return super().features(x.nan_to_num(0.0, 1.0, -1.0))


def test_an_input_that_is_not_finite_is_infinite_though_its_features_are_not():
    profile = Profile(made(Repaired)).fit([images(300, 0)], progress=False)
    profile.calibrate([images(200, 1)], progress=False)
    x = images(4, 2)
    x[1, 0, 0, 0], x[2, 0, 3, 3] = torch.nan, torch.inf
    with pytest.warns(GramwatchWarning, match="2 input"):
        score = profile(x).score
    assert score.isinf().tolist() == [False, True, True, False]


def test_a_profile_that_is_not_finite_is_infinite_though_its_input_is():
    profile = Profile(made()).fit([images(300, 0)], progress=False)
    profile.calibrate([images(200, 1)], progress=False)
    x = images(3, 2)
    x[1] *= 1e38 / x[1].abs().max()
    with pytest.warns(GramwatchWarning, match="1 input"):
        score = profile(x).score
    assert score.isinf().tolist() == [False, True, False]
