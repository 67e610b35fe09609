"""Explanations: contributions add up for every detector, a planted cause comes first, bad input is named."""

import copy
import functools
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gramwatch
from gramwatch import GramDetector, GramwatchWarning, Guard
from gramwatch.detect.measurement import halves
from gramwatch.errors import InputError, NotFittedError
from gramwatch.explain.reasons import compared
from gramwatch.methods import METHODS, TRAINED
from gramwatch.methods.gaussians import ClassDistances
from tests.guarded import images as guarded_images
from tests.guarded import made
from tests.test_contract import CASES, guard, images, ready

GUARDS = {
    "guard of few pixels": guard(pixels=9),
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
    explanation = detector.explain(given_images, places=False)
    detection = detector(given_images)
    close(explanation.detection.score, detection.score)
    close(explanation.detection.p_value, detection.p_value)
    close(explanation.members.sum(1), detection.score)
    for member, terms in explanation.taps.items():
        close(terms.sum(1), explanation.members[:, explanation.member_names.index(member)])
        assert len(explanation.tap_names[member]) == terms.shape[1]


def test_every_method_is_among_those_that_add_up():
    assert EVERY.keys() >= METHODS.keys() | TRAINED.keys()


@pytest.mark.parametrize(
    "name", ["gram auto", "gram mean_variance", "mahalanobis", "profile", "unit_mahalanobis"]
)
def test_a_detector_by_itself_has_taps_that_add_up_without_rest(name):
    explanation = detector_of(name).explain(3 * images(4, 1), places=False)
    (terms,) = explanation.taps.values()
    assert float(terms[:, :-1].abs().max()) > 0.1
    close(terms[:, -1], torch.zeros(4))


@pytest.mark.parametrize(
    "name", ["guard of few pixels", "guard", "mahalanobis", "profile", "gram triangle", "gram mean_variance"]
)
def test_channels_add_up_to_the_term_of_their_tap(name):
    detector = detector_of(name)
    explanation = detector.explain(3 * images(3, 4), places=False)
    medians = _medians(detector)
    for member, terms in explanation.taps.items():
        for column, tap in enumerate(explanation.tap_names[member][:-1]):
            channels = explanation.channels(1, member=member, tap=tap, most=None)
            added = sum(channel.contribution for channel in channels)
            term = float(terms[1, column]) + medians(member, column, terms.shape[1] - 1)
            assert added == pytest.approx(term, abs=1e-5), (member, tap)


def _medians(detector):
    """The median of a term over the tail of its member, by member and tap; zero without members."""
    if not isinstance(detector, Guard):
        return lambda member, column, taps: 0.0
    rule = detector.calibration().rule
    names, weights = list(detector.members), detector.weights_

    def median(member: str, column: int, taps: int) -> float:
        tail = float(rule.standard.tail_[names.index(member)]) / weights[member]
        if member in rule.medians:
            return float(rule.medians[member][column]) / tail
        return float(rule.standard.median_[names.index(member)]) / taps / tail

    return median


def test_terms_of_in_distribution_inputs_are_zero_in_the_median():
    fitting, _ = halves(120, 0)  # the half of the calibration data that fits the rule
    explanation = ready(GUARDS["guard of few pixels"]).explain(images(120, 1)[fitting], places=False)
    for member in ("gram", "profile"):
        close(explanation.taps[member][:, :-1].median(0).values, torch.zeros(4))


def test_members_without_parts_say_why():
    explanation = ready(GUARDS["guard of few pixels"]).explain(images(2, 0), places=False)
    assert set(explanation.taps) == {"gram", "profile"}
    assert "class ratio: it is the ratio of two distances, and a ratio has no parts" in explanation.notes
    with pytest.raises(InputError, match="nothing below 'energy': it is computed from all logits"):
        explanation.channels(0, member="energy")
    with pytest.raises(InputError, match="no tap is called 'layer9'"):
        explanation.channels(0, tap="layer9")


def test_sums_by_module_and_by_kind_hold_all_taps():
    explanation = ready(GUARDS["guard of few pixels"]).explain(images(3, 0), places=False)
    total = sum(terms[:, :-1].sum(1) for terms in explanation.taps.values())
    for sums in (explanation.by_module(), explanation.by_kind()):
        close(sum(sums.values()), total)
    assert set(explanation.by_kind()) == {"convolution", "activation"}


def test_medians_travel_with_the_file(tmp_path):
    detector = ready(GUARDS["guard of few pixels"])
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
def planted(pixels: int | str = "all") -> Guard:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        result = Guard(Planted().eval(), pixels=pixels)
        result.fit(images(600, 0).split(100), progress=False)
        return result.calibrate(images(400, 1).split(100), progress=False)


@pytest.mark.parametrize("channel", range(6))
def test_a_scaled_channel_is_found_first(channel):
    detector = copy.deepcopy(planted())
    detector.model.factor[channel] = 20.0
    explanation = detector.explain(images(20, 7), places=False)
    for i in range(20):
        strongest = explanation.channels(i, member="gram", most=1)[0]
        assert (strongest.tap, strongest.channel, strongest.direction) == ("relu#2", channel, "too high")
        assert strongest.value > strongest.high > strongest.low
        assert explanation.tap_names["profile"][int(explanation.taps["profile"][i].argmax())] == "relu#2"


@pytest.mark.parametrize("member", ["gram", "profile"])
def test_a_shifted_tap_is_found_first(member):
    detector = copy.deepcopy(planted())
    detector.model.shift = 3.0
    explanation = detector.explain(images(20, 7), places=False)
    names = explanation.tap_names[member]
    assert [names[int(row.argmax())] for row in explanation.taps[member]] == ["relu#2"] * 20


# --- the map -----------------------------------------------------------------------------------------


def small(network: nn.Module, inputs: Tensor, **settings) -> Guard:
    """A guard of a small network, fitted and calibrated on random inputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        result = Guard(network.eval(), **settings)
        result.fit(inputs[:300].split(50), progress=False)
        return result.calibrate(inputs[300:].split(50), progress=False)


@pytest.mark.parametrize("pixels", ["all", 16])
def test_the_map_points_at_a_planted_square(pixels):
    detector = planted(pixels)
    given_images = images(12, 3)
    for i in range(12):
        given_images[i, 0, i % 4 : i % 4 + 3, 3:6] += 6.0
    explanation = detector.explain(given_images)
    assert bool(explanation.detection.is_ood.all())
    for i in range(12):
        y, x = divmod(int(explanation.map[i].argmax()), 8)
        assert i % 4 - 1 <= y <= i % 4 + 3
        assert 2 <= x <= 6
    assert float(explanation.map.min()) >= 0


@pytest.mark.parametrize("pixels", ["all", 16])
def test_the_map_adds_up_to_the_positive_contributions_that_have_a_place(pixels):
    explanation = planted(pixels).explain(3 * images(5, 3))
    wanted = sum(terms[:, :-1].clamp_min(0).sum(1) for terms in explanation.taps.values())
    torch.testing.assert_close(explanation.map.sum((1, 2)).double(), wanted, rtol=1e-3, atol=1e-3)


def test_the_map_points_at_what_is_missing():
    """A strip without contrast, where features are much weaker than elsewhere."""
    network = Planted()
    nn.init.zeros_(network.first.bias)
    detector = small(network, images(400, 0), members=("gram", "energy"))
    given_images = images(20, 3)
    given_images[:, :, :, :3] = 0.0
    result = detector.explain(given_images).map
    result = result[result.sum((1, 2)) > 0]
    assert len(result) > 10
    assert float((result[:, :, :3].mean((1, 2)) > result[:, :, 3:].mean((1, 2))).float().mean()) > 0.7


@pytest.mark.parametrize("name", ["mahalanobis", "unit_mahalanobis", "profile"])
def test_pixels_are_unusual_by_their_own_distance(name):
    """Against the distance of a pixel's activations, scaled as the channel means of its image are."""
    detector = detector_of(name)
    seen = detector._observed(2 * images(4, 8))[detector]
    for tap, means in enumerate(seen.channel_means):
        spread = torch.randn(4, means.shape[1], 9, generator=torch.Generator().manual_seed(tap))
        maps = (means.unsqueeze(2) + 0.1 * spread).double()
        shares = [ClassDistances.shares_at(detector, seen, None, example, tap) for example in range(4)]
        nearest = torch.stack([of_example.low for of_example in shares])
        length = means.double().norm(dim=1) if detector.unit else torch.ones(4).double()
        gaussian = detector._fitted_on(means.device).gaussians[tap]
        away = (maps / length[:, None, None] - nearest.unsqueeze(2)).transpose(1, 2) @ gaussian.whitening
        distance = away.square().sum(2)
        expected = (distance - distance.median(1, keepdim=True).values).clamp_min(0)
        torch.testing.assert_close(detector.unusual_at(seen, tap, maps), expected, rtol=1e-4, atol=1e-4)


class Tokens(nn.Module):
    """Patches and a class token, as in a ViT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.patch = nn.Conv2d(1, 6, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.mix(tokens).relu().mean(1))


def test_tokens_become_a_grid():
    detector = small(Tokens(), images(400, 0))
    given_images = images(6, 3)
    given_images[:, 0, 4:6, 2:4] += 8.0  # one token
    explanation = detector.explain(given_images)
    assert explanation.map.shape == (6, 8, 8)
    peaks = [divmod(int(result.argmax()), 8) for result in explanation.map]
    assert all(y in (4, 5) and x in (2, 3) for y, x in peaks)


class Words(nn.Module):
    """A network on sequences of words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.mix, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(x)).relu().mean(1))


def test_a_sequence_has_a_map_along_it():
    words = torch.randint(0, 15, (400, 12), generator=torch.Generator().manual_seed(0))
    network = Words()
    with torch.no_grad():
        network.embed.weight[19] *= 20
    detector = small(network, words)
    unusual = words[:5].clone()
    unusual[:, 7] = 19
    explanation = detector.explain(unusual)
    assert explanation.map.shape == (5, 12)
    assert explanation.map.argmax(1).tolist() == [7] * 5


def test_a_network_without_places_says_so():
    vectors = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    explanation = small(network, vectors).explain(vectors[:3])
    assert explanation.map is None
    assert "no map: the input has no places" in explanation.notes
    close(explanation.members.sum(1), explanation.detection.score)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 9, 12)])
def test_sizes_may_change(shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        explanation = planted().explain(torch.randn(2, *shape))
    assert explanation.map.shape == (2, *shape[1:])


def test_members_without_taps_have_no_map():
    explanation = small(Planted(), images(400, 0), members=("energy",)).explain(images(2, 3))
    assert explanation.map is None
    assert "no map: no member has taps" in explanation.notes


def test_one_pixel_has_contributions_and_no_map():
    network = nn.Sequential(nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))
    pixels = torch.randn(400, 2, 1, 1, generator=torch.Generator().manual_seed(0))
    explanation = small(network, pixels).explain(pixels[:3])
    close(explanation.members.sum(1), explanation.detection.score)
    assert explanation.map is None
    assert "no map: no tap has places" in explanation.notes


class TwoInputs(nn.Module):
    """An image and a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.head = nn.Conv2d(1, 5, 3, padding=1), nn.Linear(9, 3)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        return self.head(torch.cat([self.conv(image).relu().mean((2, 3)), vector], 1))


def test_several_inputs_have_the_map_of_the_image():
    vectors = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    batches = [((images(400, 0)[i : i + 50], vectors[i : i + 50]),) for i in range(0, 400, 50)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        result = Guard(TwoInputs().eval(), members=("gram", "energy"), orders=(1, 2))
        result.fit(batches[:6], progress=False).calibrate(batches[6:], progress=False)
    explanation = result.explain((4 * images(3, 1), vectors[:3]))
    assert explanation.map.shape == (3, 8, 8)
    assert float(explanation.map.sum()) > 0


def test_an_input_without_positive_contributions_has_a_map_of_zeros():
    explanation = planted().explain(images(200, 11), places=False)
    positive = sum(terms[:, :-1].clamp_min(0).sum(1) for terms in explanation.taps.values())
    least = int(positive.argmin())
    result = planted().explain(images(200, 11)[least : least + 1])
    assert result.map.shape == (1, 8, 8)
    torch.testing.assert_close(result.map.sum().double(), positive[least], rtol=1e-3, atol=1e-3)


# --- bad input ---------------------------------------------------------------------------------------


def test_inputs_that_are_not_finite_have_no_contributions():
    given_images = images(3, 0)
    given_images[1, 0, 2, 2] = torch.nan
    with pytest.warns(GramwatchWarning, match="1 input"):
        explanation = planted().explain(given_images)
    assert explanation.finite.tolist() == [True, False, True]
    assert bool(explanation.members[1].isnan().all())
    assert explanation.channels(1) == []
    assert explanation.percentages(1) == {}
    assert float(explanation.map[1].sum()) == 0
    assert "not finite" in str(explanation[1])
    close(explanation.members[[0, 2]].sum(1), explanation.detection.score[[0, 2]])


def test_explaining_needs_a_calibration():
    with pytest.raises(NotFittedError, match="not fitted"):
        GramDetector(Planted()).explain(images(1, 0))


def test_too_many_inputs_at_once_are_refused(monkeypatch):
    monkeypatch.setattr("gramwatch.observe.plan.MOST_STATISTICS", 4096)
    with pytest.raises(InputError, match="too many to be explained at once: give at most"):
        planted().explain(images(60, 0))


def test_examples_are_chosen_by_number():
    explanation = planted().explain(3 * images(4, 3))
    one = explanation[-1]
    assert len(one) == 1
    assert one.channels(0, most=3) == explanation.channels(3, most=3)
    assert torch.equal(one.map[0], explanation.map[3])
    with pytest.raises(IndexError, match="there is no example 4: the batch has 4"):
        explanation[4]
    assert len(list(explanation)) == 4


# --- shown -------------------------------------------------------------------------------------------


def test_three_sentences_name_what_was_measured():
    detector = copy.deepcopy(planted())
    detector.metadata["classes"] = ["cat", "dog", "bird"]
    detector.model.factor[2] = 20.0
    explanation = detector.explain(images(2, 7))
    verdict, first, rest = explanation.sentences(0)
    assert verdict.startswith("Flagged (p = ")
    assert "% of the score comes from" in first
    assert "relu#2" in first
    assert rest.endswith(".")
    assert " ".join(explanation.sentences(0)) == str(explanation[0])
    assert "2 of 2 out-of-distribution" in str(explanation)
    assert sum(explanation.percentages(0).values()) == pytest.approx(100)
    assert "<table>" in explanation._repr_html_()


@pytest.mark.parametrize("per_class", [False, True])
def test_the_smallest_p_value_is_said_as_a_count_and_not_as_a_share(per_class):
    """No calibration image scores as high. How often others would is not known: it may be never."""
    detector = Guard(made(), per_class=per_class, level=0.9).fit([guarded_images(400, 1)], progress=False)
    detector.calibrate([guarded_images(1_200, 2)], progress=False)
    calibration = detector.calibration()
    assert (len(calibration.ranks.sizes) > 1) is per_class
    ordinary, strange = guarded_images(30, 3), guarded_images(10, 4, 9.0)
    explanation = detector.explain(torch.cat([ordinary, strange]), places=False)
    group_of = calibration.ranks.group_of
    for one in explanation:
        group = group_of[calibration.predicted] == group_of[one.detection.predicted]
        scores = calibration.scores[group, 0]
        higher = int((scores >= one.detection.score).sum())
        assert int(one.ranking) == len(scores)
        verdict = one.sentences()[0]
        if higher:
            start = "Flagged" if one.detection.is_ood else "Not flagged"
            assert verdict == f"{start} (p = {float(one.detection.p_value):.2g})."
            assert compared(one).startswith(f"{higher:,} of the {len(scores):,} calibration images ")
        else:
            words = f"none of the {len(scores):,} calibration images that it is ranked among scores this high"
            assert compared(one) == words
            assert verdict == f"Flagged (p = {float(one.detection.p_value):.2g}: {words})."
    assert "scores this high" in str(explanation[-1])


def test_an_ordinary_input_has_no_percentages():
    explanation = planted().explain(images(40, 11), places=False)
    ordinary = int((~explanation.detection.is_ood).nonzero()[0])
    assert explanation.percentages(ordinary) == {}
    assert "%" not in str(explanation[ordinary])
    assert str(explanation[ordinary]).startswith("Not flagged")


def test_the_largest_part_of_an_ordinary_input_and_what_cancels_it_add_up_to_its_score():
    """The part may be larger than the score, because other parts may be negative."""
    explanation = planted().explain(images(200, 11), places=False)
    ordinary = [
        one for one in explanation if not bool(one.detection.is_ood[0]) and float(one.members.max()) > 0
    ]
    assert ordinary
    for one in ordinary:
        largest, score = float(one.members.max()), float(one.detection.score[0])
        numbers = [float(n) for n in re.findall(r"(?:by|is) (\d+\.\d\d|-\d+\.\d\d)\b", one.sentences(0)[1])]
        raised, others, told = numbers
        sign = -1 if "lower it by" in one.sentences(0)[1] else 1
        assert (raised, told) == (round(largest, 2), round(score, 2))
        assert raised + sign * others == pytest.approx(told, abs=0.0151)


def test_a_tap_with_a_number_for_a_name_is_called_a_layer():
    network = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.LazyLinear(3))
    network(images(1, 1))
    detector = GramDetector(network)
    detector.fit([images(300, 1)], progress=False).calibrate([images(100, 2)], progress=False)
    explanation = detector.explain(20 * images(1, 3))
    (names,) = explanation.tap_names.values()
    assert names[0].isdigit()
    assert re.search(r", most at layer \d and layer \d; at layer \d, channel", str(explanation))


def test_dots_of_channels_keep_away_from_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    figure = planted().explain(3 * images(2, 3)).plot(0)
    panel = next(axes for axes in figure.axes if axes.get_title(loc="left").startswith("channels"))
    renderer = figure.canvas.get_renderer()
    point = figure.dpi / 72
    dots = [line for line in panel.get_lines() if line.get_marker() == "o"]
    assert any(float(dot.get_xdata()[0]) == 1 for dot in dots)
    for dot in dots:
        around = dot.get_window_extent(renderer).padded(3 * point)
        for text in (*panel.texts, *panel.get_yticklabels()):
            assert not around.overlaps(text.get_window_extent(renderer))


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    explanation = planted().explain(3 * images(2, 3))
    share = sum(explanation.percentages(0)[name] for name in ("gram", "profile"))
    titles = [axes.get_title(loc="left") for axes in explanation.plot(0).axes]
    assert f"map of Gram and profile: {share:.0f} % of it" in titles
    explanation.plot(0, tmp_path / "why.png")
    assert Image.open(tmp_path / "why.png").width == 1600
    vectors = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    figure = small(network, vectors).explain(5 * vectors[:1]).plot(0)
    assert len(figure.axes) == 5
