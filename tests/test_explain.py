"""Explanations: contributions add up for every detector, a planted cause comes first, bad input is named."""

import copy
import functools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gramwatch
from gramwatch import GramwatchWarning, Guard
from gramwatch.errors import InputError
from gramwatch.measurement import halves
from gramwatch.methods import METHODS, TRAINED
from tests.test_contract import CASES, guard, images, ready

MEMBERS = ("gram", "profile", "class_ratio", "energy")
GUARDS = {
    "guard profile": guard(members=MEMBERS),
    "guard mahalanobis": guard(members=("mahalanobis", "unit_mahalanobis", "relative_mahalanobis")),
}
EVERY = {
    name: case for name, case in (CASES | GUARDS).items() if "own" not in name and "examples" not in name
}


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


@functools.cache
def detector_of(name: str) -> gramwatch.Detector:
    return ready(EVERY[name])


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.05, 30), count=st.integers(1, 5))
def test_contributions_add_up(name, seed, scale, count):
    detector, given_images = detector_of(name), scale * images(count, seed)
    explained = detector.explain(given_images, places=False)
    found = detector(given_images)
    close(explained.found.score, found.score)
    close(explained.found.p_value, found.p_value)
    close(explained.members.sum(1), found.score)
    for member, terms in explained.taps.items():
        close(terms.sum(1), explained.members[:, explained.member_names.index(member)])
        assert len(explained.tap_names[member]) == terms.shape[1]


def test_every_method_is_among_those_that_add_up():
    assert EVERY.keys() >= METHODS.keys() | TRAINED.keys()


@pytest.mark.parametrize(
    "name", ["gram auto", "gram mean_variance", "mahalanobis", "profile", "unit_mahalanobis"]
)
def test_a_detector_by_itself_has_taps_that_add_up_without_rest(name):
    explained = detector_of(name).explain(3 * images(4, 1), places=False)
    (terms,) = explained.taps.values()
    assert float(terms[:, :-1].abs().max()) > 0.1
    close(terms[:, -1], torch.zeros(4))


@pytest.mark.parametrize(
    "name", ["guard profile", "guard", "mahalanobis", "profile", "gram triangle", "gram mean_variance"]
)
def test_channels_add_up_to_the_term_of_their_tap(name):
    detector = detector_of(name)
    explained = detector.explain(3 * images(3, 4), places=False)
    medians = _medians(detector)
    for member, terms in explained.taps.items():
        for column, tap in enumerate(explained.tap_names[member][:-1]):
            channels = explained.channels(1, member=member, tap=tap, most=None)
            added = sum(channel.contribution for channel in channels)
            term = float(terms[1, column]) + medians(member, column, terms.shape[1] - 1)
            assert added == pytest.approx(term, abs=1e-5), (member, tap)


def _medians(detector):
    """The median of a term over the tail of its member, by member and tap; zero without members."""
    if not isinstance(detector, Guard):
        return lambda member, column, taps: 0.0
    rule = detector.calibration().rule
    names = list(detector.members)

    def median(member: str, column: int, taps: int) -> float:
        tail = float(rule.standard.tail_[names.index(member)])
        if member in rule.medians:
            return float(rule.medians[member][column]) / tail
        return float(rule.standard.median_[names.index(member)]) / taps / tail

    return median


def test_terms_of_in_distribution_inputs_are_zero_in_the_median():
    fitting, _ = halves(120, 0)  # the half of the calibration data that fits the rule
    explained = ready(GUARDS["guard profile"]).explain(images(120, 1)[fitting], places=False)
    for member in ("gram", "profile"):
        close(explained.taps[member][:, :-1].median(0).values, torch.zeros(4))


def test_members_without_parts_say_why():
    explained = ready(GUARDS["guard profile"]).explain(images(2, 0), places=False)
    assert set(explained.taps) == {"gram", "profile"}
    assert "class ratio: it is the ratio of two distances, and a ratio has no parts" in explained.notes
    with pytest.raises(InputError, match="nothing below 'energy': it is computed from all logits"):
        explained.channels(0, member="energy")
    with pytest.raises(InputError, match="no tap is called 'layer9'"):
        explained.channels(0, tap="layer9")


def test_sums_by_module_and_by_kind_hold_all_taps():
    explained = ready(GUARDS["guard profile"]).explain(images(3, 0), places=False)
    total = sum(terms[:, :-1].sum(1) for terms in explained.taps.values())
    for sums in (explained.by_module(), explained.by_kind()):
        close(sum(sums.values()), total)
    assert set(explained.by_kind()) == {"convolution", "activation"}


def test_medians_travel_with_the_file(tmp_path):
    detector = ready(GUARDS["guard profile"])
    detector.save(tmp_path / "guard.safetensors")
    loaded = gramwatch.load(tmp_path / "guard.safetensors", detector.model)
    for name, terms in detector.explain(images(3, 0)).taps.items():
        assert torch.equal(loaded.explain(images(3, 0)).taps[name], terms)


# --- a planted cause ---------------------------------------------------------------------------------


class Planted(nn.Module):
    """A network in which one channel can be scaled, and one tap shifted, without a trace at other taps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)
        self.factor, self.shift = torch.ones(6, 1, 1), 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = (x * self.factor + self.shift).relu()  # the tap "relu#2"
        x = (x - self.shift) / self.factor
        return self.head(self.second(x).relu().mean((2, 3)))


@functools.cache
def planted() -> Guard:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        found = Guard(Planted().eval(), members=MEMBERS, orders=(1, 2, 3))
        found.fit(images(600, 0).split(100), progress=False)
        return found.calibrate(images(400, 1).split(100), progress=False)


@pytest.mark.parametrize("channel", range(6))
def test_a_scaled_channel_is_found_first(channel):
    detector = copy.deepcopy(planted())
    detector.model.factor[channel] = 20.0
    explained = detector.explain(images(20, 7), places=False)
    for i in range(20):
        strongest = explained.channels(i, member="gram", most=1)[0]
        assert (strongest.tap, strongest.channel, strongest.direction) == ("relu#2", channel, "too high")
        assert strongest.value > strongest.high > strongest.low
        assert explained.tap_names["profile"][int(explained.taps["profile"][i].argmax())] == "relu#2"


@pytest.mark.parametrize("member", ["gram", "profile"])
def test_a_shifted_tap_is_found_first(member):
    detector = copy.deepcopy(planted())
    detector.model.shift = 3.0
    explained = detector.explain(images(20, 7), places=False)
    names = explained.tap_names[member]
    assert [names[int(row.argmax())] for row in explained.taps[member]] == ["relu#2"] * 20
