"""Rehearsal: the outliers that a guard makes itself, the weights that it learns, and what it promises."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramwatch
from gramwatch import GramwatchWarning, Guard
from gramwatch.detect.split import halves
from gramwatch.errors import ArtifactError
from gramwatch.files import artifact
from gramwatch.guard import rehearsal
from gramwatch.guard.guard import MEMBERS
from gramwatch.guard.rehearsal import (
    FEWEST,
    IMAGES,
    LARGEST,
    NORMALISED,
    TEXTS,
    Maker,
    families_of,
    learned_weights,
    text_of,
)
from tests import texts

DATA = Path(__file__).parents[1] / "data"
pytestmark = pytest.mark.usefixtures("whole_rehearsals")


class Net(nn.Module):
    """Two convolutions and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3)))


def images(count: int, seed: int, channels: int = 3, height: int = 16, width: int = 16) -> Tensor:
    """Smooth shapes with a little noise, from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(count, channels, 4, 4, generator=generator)
    noise = 0.05 * torch.randn(count, channels, height, width, generator=generator)
    return (F.interpolate(small, (height, width), mode="bilinear") + noise).clamp(0, 1)


def new_network(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(5)
    net = kind().eval()
    with torch.no_grad():
        net.head.weight *= 30  # so that all classes are predicted
        net.head.bias -= net(images(300, 9)).mean(0)
    return net


@cache
def network() -> nn.Module:
    return new_network()


def fitted(net: nn.Module | None = None, **options) -> Guard:
    return Guard(net or network(), orders=(1, 2), **{"rehearse": True, **options}).fit(
        images(400, 0).split(100), progress=False
    )


@cache
def ready() -> Guard:
    return fitted().calibrate(images(200, 1).split(50), progress=False)


# --- outliers ----------------------------------------------------------------------------------------


def maker(x: Tensor, seed: int = 0) -> Maker:
    return Maker(x.amin((0, 2, 3)), x.amax((0, 2, 3)), seed)


KINDS = {
    "from 0 to 1": images(6, 0),
    "normalised": (images(6, 0) - 0.45) / 0.25,
    "wide, of 5 channels": images(6, 0, 5, 11, 23),
    "as small as they may be": images(6, 0, 3, 8, 8),
    "bytes as numbers": 255 * images(6, 0),
    "half precision": images(6, 0).half(),
}


@pytest.mark.parametrize("family", [*IMAGES, NORMALISED])
@pytest.mark.parametrize("kind", KINDS)
def test_outliers_of_images(family, kind):
    x = KINDS[kind]
    if family not in families_of(x, maker(x)):
        assert family == NORMALISED  # images from 0 to 1 were not normalised
        return
    before = x.clone()
    outliers = maker(x).images(x, family)
    assert x.equal(before)
    assert outliers.shape == x.shape
    assert outliers.dtype == x.dtype
    assert outliers.isfinite().all()
    assert all(not one.equal(other) for one, other in zip(outliers, x, strict=True))
    if family != NORMALISED:
        slack = 1e-3 * float(x.amax() - x.amin())
        low, high = (getattr(x, way)((0, 2, 3), keepdim=True) for way in ("amin", "amax"))
        assert (outliers >= low - slack).all()
        assert (outliers <= high + slack).all()
    assert maker(x).images(x, family).equal(outliers)
    if family not in ("grey", "inverted", "upside down"):  # nothing random
        assert not maker(x, 1).images(x, family).equal(outliers)


def test_the_families_that_suit_the_inputs():
    x = KINDS["from 0 to 1"]
    assert families_of(x, maker(x)) == tuple(IMAGES)
    grey = x[:, :1]
    assert set(IMAGES) - set(families_of(grey, maker(grey))) == {"channels permuted", "grey"}
    for kind in ("normalised", "bytes as numbers"):
        assert families_of(KINDS[kind], maker(KINDS[kind])) == (*IMAGES, NORMALISED)
    assert families_of(torch.rand(5, 7), maker(x)) == ()
    assert families_of(torch.zeros(5, 7, dtype=torch.int64), maker(x)) == tuple(TEXTS)


def test_what_is_beside_the_image_stays():
    x, extra = KINDS["from 0 to 1"], torch.arange(6)
    outliers = maker(x).outliers({"pixels": x, "extra": extra}, "inverted")
    assert outliers["extra"] is extra
    torch.testing.assert_close(maker(x).outliers(outliers, "inverted")["pixels"], x)


@pytest.mark.parametrize("family", TEXTS)
@pytest.mark.parametrize("left", [False, True])
def test_outliers_of_texts_respect_padding(family, left):
    given = texts.texts(40, 0, least=8, most=20)
    batch = texts.padded(given, left=left)
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    outliers = maker(images(2, 0)).outliers(batch, family, mask)
    assert outliers["attention_mask"] is mask
    changed = outliers["input_ids"]
    assert changed.shape == tokens.shape
    assert (changed[mask == 0] == 0).all()
    assert (changed[mask == 1] > 0).all()
    assert (changed != tokens).any(1).float().mean() > 0.8
    for before, after, real in zip(tokens, changed, mask.bool(), strict=True):
        assert before[real][0] == after[real][0]
    if family == "order shuffled":
        assert changed.sort(1).values.equal(tokens.sort(1).values)
        assert all(
            before[real][-1] == after[real][-1]
            for before, after, real in zip(tokens, changed, mask.bool(), strict=True)
        )
    assert maker(images(2, 0)).outliers(batch, family, mask)["input_ids"].equal(changed)
    assert tokens.equal(texts.padded(given, left=left)["input_ids"])


def test_texts_without_a_mask():
    tokens = torch.randint(1, 40, (30, 9))
    for family in TEXTS:
        changed = maker(images(2, 0)).outliers(tokens, family)
        assert (changed != tokens).any(1).float().mean() > 0.8
    assert text_of(tokens.float()) is None
    assert text_of(tokens[:, :3]) is None
    assert text_of({"x": tokens}) is None


# --- weights -----------------------------------------------------------------------------------------


def scores(count: int, seed: int, *means: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, len(means), generator=generator, dtype=torch.float64)
    return 0.5 * noise + torch.tensor(means, dtype=torch.float64)


def test_weights_are_not_negative_and_one_on_average():
    for seed, means in enumerate([(0, 1, 2), (-3, 0, 1), (-1, -1, -1), (30, 0, -30), (500, 500, 500)]):
        weights = learned_weights(scores(200, seed, 0, 0, 0), {"a": scores(100, seed + 50, *means)})
        assert (weights >= 0).all()
        assert float(weights.mean()) == pytest.approx(1)


def test_scores_that_tell_nothing_leave_the_weights_equal():
    usual = scores(400, 0, 0, 0, 0, 0)
    weights = learned_weights(usual, {"a": usual.clone(), "b": usual.clone()})
    torch.testing.assert_close(weights, torch.ones_like(weights), atol=0.02, rtol=0)
    same = torch.zeros(50, 3, dtype=torch.float64)
    assert learned_weights(same, {"a": same}).tolist() == [1.0, 1.0, 1.0]


def test_a_member_that_separates_counts_more():
    usual, outliers = scores(400, 0, 0, 0, 0), {"a": scores(200, 1, 1.0, 0.3, 0.0)}
    one, two, three = learned_weights(usual, outliers).tolist()
    assert one > 1.3 > two > three
    assert one > 2 * three


def test_few_inputs_shrink_the_weights_to_equal():
    outliers = {"a": scores(200, 1, 1.0, 0.3, 0.0)}
    spreads = [
        float(learned_weights(scores(count, 0, 0, 0, 0), outliers).std()) for count in (16, 30, 50, 100)
    ]
    assert spreads == sorted(spreads)
    assert spreads[0] < 0.1 < 0.3 < spreads[-1]


def test_families_weigh_the_same_whatever_their_size():
    usual = scores(300, 0, 0, 0)
    one, other = scores(100, 1, 1.0, 0.0), scores(100, 2, 0.0, 1.0)
    few = learned_weights(usual, {"one": one, "other": other})
    many = learned_weights(usual, {"one": one.repeat(20, 1), "other": other})
    torch.testing.assert_close(few, many, atol=1e-3, rtol=0)


@pytest.mark.filterwarnings("error")
def test_huge_scores_do_not_decide():
    usual, outliers = scores(300, 0, 0, 0), scores(100, 1, 0.5, 0.5)
    huge = outliers.clone()
    huge[:2, 0] = 1e300
    capped = outliers.clone()
    capped[:2, 0] = LARGEST
    assert learned_weights(usual, {"a": huge}).equal(learned_weights(usual, {"a": capped}))
    learned_weights(usual, {"a": scores(100, 1, 1e6, 1e6)})


# --- a guard that rehearses --------------------------------------------------------------------------


def test_a_guard_shows_what_it_learned():
    guard = ready()
    assert list(guard.weights_) == list(guard.members)
    assert "image" in guard.members
    weights = np.array(list(guard.weights_.values()))
    assert weights.mean() == pytest.approx(1)
    assert weights.std() > 0.01
    assert all(f"{weight:.2f} {name}" in repr(guard) for name, weight in guard.weights_.items())
    facts = guard.calibration().how["rehearsal"]
    assert facts["inputs"] == 100
    assert facts["families"] == list(IMAGES)
    assert facts["outliers"] == 100 * len(IMAGES)


def test_the_score_is_the_weighted_sum():
    guard = ready()
    measured, rule = guard.measure(images(20, 3)), guard.calibration().rule
    parts = rule.standard(rule.member_scores(measured))
    expected = parts @ torch.tensor(list(guard.weights_.values()), dtype=torch.float64)
    torch.testing.assert_close(guard(images(20, 3)).score, expected)


def test_without_rehearsal_the_score_is_the_plain_sum():
    plain = fitted(rehearse=False).calibrate(images(200, 1).split(50), progress=False)
    assert set(plain.weights_.values()) == {1.0}
    assert plain.calibration().rule.weights is None
    assert "rehearsal" not in plain.calibration().how
    assert "1.00" not in repr(plain)
    x, rule = images(20, 3), plain.calibration().rule
    torch.testing.assert_close(plain(x).score, rule.standard(rule.member_scores(plain.measure(x))).sum(1))


def test_the_half_that_ranks_is_untouched():
    """Members have the scores and p-values that they have without rehearsal, and no outlier ranks."""
    plain = fitted(rehearse=False, members=MEMBERS).calibrate(images(200, 1).split(50), progress=False)
    mine, theirs = ready().calibration(), plain.calibration()
    assert mine.scores.shape == theirs.scores.shape == (100, 1 + len(plain.members))
    assert mine.scores[:, 1:].equal(theirs.scores[:, 1:])
    assert mine.predicted.equal(theirs.predicted)
    x = images(20, 3)
    for name, p_values in ready()(x).parts.items():
        assert p_values.equal(plain(x).parts[name]), name
    joint = mine.rule.joined(mine.scores[:, 1:])
    assert mine.scores[:, 0].equal(joint)


def test_outliers_are_of_the_half_that_standardises():
    """With other images in the half that ranks, the weights are the same."""
    calibration = images(200, 1)
    changed = calibration.clone()
    ranking = halves(200, 0)[1]
    changed[ranking] = images(200, 77)[ranking]
    other = fitted().calibrate(changed.split(50), progress=False)
    assert other.weights_ == ready().weights_
    assert not other.calibration().scores.equal(ready().calibration().scores)


def test_the_same_seed_learns_the_same_whatever_the_batches():
    again = fitted().calibrate(images(200, 1).split(64), progress=False)
    for name, weight in ready().weights_.items():
        assert again.weights_[name] == pytest.approx(weight, rel=1e-3)


def test_a_loader_that_can_be_read_once_is_enough():
    guard = fitted().calibrate(iter(images(200, 1).split(50)), progress=False)
    assert guard.weights_ == ready().weights_


def test_rehearsal_changes_neither_the_random_numbers_of_the_user_nor_the_network():
    guard, weights = fitted(), [p.clone() for p in network().parameters()]
    torch.manual_seed(3)
    guard.calibrate(images(200, 1).split(50), progress=False)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert after.equal(torch.rand(3))
    assert all(a.equal(b) for a, b in zip(weights, network().parameters(), strict=True))


def test_few_inputs_leave_the_sum_plain():
    few = fitted(level=0.8).calibrate([images(2 * FEWEST - 2, 1)], progress=False)
    assert few.calibration().rule.weights is None
    enough = fitted(level=0.8).calibrate([images(2 * FEWEST, 1)], progress=False)
    assert enough.calibration().rule.weights is not None
    spread = np.std(list(enough.weights_.values()))
    assert spread < 0.5 * np.std(list(ready().weights_.values()))


def test_without_inputs_all_members_count_the_same():
    guard = fitted()
    guard.calibrate_on(guard.measure_all([images(200, 1)], "", False))
    assert set(guard.weights_.values()) == {1.0}


def test_a_network_that_refuses_outliers_is_calibrated_all_the_same_and_says_so():
    class Wary(Net):
        def forward(self, x: Tensor) -> Tensor:
            if (x[:, :1] == x).all((1, 2, 3)).any():
                raise ValueError("this image is grey")
            return super().forward(x)

    guard = fitted(new_network(Wary))
    with pytest.warns(GramwatchWarning) as caught:
        guard.calibrate(images(200, 1).split(50), progress=False)
    said = [str(warning.message) for warning in caught]
    assert any("all members count the same (ValueError: this image is grey)" in message for message in said)
    assert set(guard.weights_.values()) == {1.0}
    assert guard(images(50, 2)).score.isfinite().all()


def test_contributions_add_up_to_the_score():
    guard, x = ready(), images(5, 3)
    explained = guard.explain(x, places=False)
    assert explained.member_names == tuple(guard.members)
    torch.testing.assert_close(explained.members.sum(1), guard(x).score, rtol=1e-6, atol=1e-6)


def test_a_guard_of_texts_rehearses():
    net = texts.transformer("Bert").float()
    given = texts.texts(200, 0, least=6)
    guard = Guard(net, members=("profile", "energy"), rehearse=True)
    guard.fit(texts.batches(given[:100], 50), progress=False)
    guard.calibrate(texts.batches(given[100:], 50), progress=False)
    assert guard.calibration().how["rehearsal"]["families"] == list(TEXTS)
    assert sum(guard.weights_.values()) == pytest.approx(2)


# --- files -------------------------------------------------------------------------------------------


def test_weights_are_saved_and_loaded(tmp_path):
    path = tmp_path / "guard.safetensors"
    ready().save(path)
    loaded = gramwatch.load(path, network())
    assert loaded.weights_ == ready().weights_
    assert loaded.rehearse
    assert loaded.calibration().how["rehearsal"] == ready().calibration().how["rehearsal"]
    assert repr(loaded) == repr(ready())
    detection, again = ready()(images(30, 4)), loaded(images(30, 4))
    assert again.score.equal(detection.score)
    assert again.p_value.equal(detection.p_value)
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_an_exported_guard_gives_the_same_scores(tmp_path):
    guard, x = fitted(members=("energy", "image")), images(7, 4)
    guard.calibrate([images(200, 1)], progress=False)
    assert max(guard.weights_.values()) > 1.05
    guard.export(tmp_path / "guard.pt2", x[:3])
    outputs, want = torch.export.load(tmp_path / "guard.pt2").module()(x), guard(x)
    torch.testing.assert_close(outputs["score"], want.score, rtol=1e-4, atol=1e-4)
    assert outputs["is_ood"].equal(want.is_ood)
    assert {f"parts.{name}" for name in guard.members} <= set(outputs)


def rewritten(path: Path, change) -> None:
    ready().save(path)
    saved = artifact.read(path)
    _, shapes = Guard.described(saved.header, network())
    tensors = saved.tensors(shapes)
    header = {key: saved.header[key] for key in saved.header if key not in ("format", "library", "tensors")}
    header = json.loads(json.dumps(header))
    change(header, tensors)
    artifact.write(path, header, tensors)
    gramwatch.load(path, network())


def set_weights(*values: float):
    def change(header, tensors):
        tensors["calibration.weights"] = torch.tensor(values, dtype=torch.float64)

    return change


def set_facts(facts):
    def change(header, tensors):
        header["calibration"]["rehearsal"] = facts

    return change


def set_rehearse(header, tensors):
    header["settings"]["rehearse"] = "yes"


def drop_weights(header, tensors):
    del tensors["calibration.weights"]


def drop_facts(header, tensors):
    del header["calibration"]["rehearsal"]


FACTS = {"inputs": 3, "outliers": 5, "families": ["a"]}
FORGED = {
    "negative": set_weights(-1, 2, 2, 1, 1, 1),
    "not a number": set_weights(float("nan"), 1, 1, 1, 1, 1),
    "infinite": set_weights(float("inf"), 1, 1, 1, 1, 1),
    "all zero": set_weights(0, 0, 0, 0, 0, 0),
    "not one on average": set_weights(9, 9, 9, 9, 9, 9),
    "too few": set_weights(1, 1),
    "facts no mapping": set_facts(["families"]),
    "facts of a wrong type": set_facts({**FACTS, "inputs": "many"}),
    "facts below zero": set_facts({**FACTS, "outliers": -5}),
    "families no names": set_facts({**FACTS, "families": [1, 2]}),
    "facts missing": set_facts({"inputs": 3}),
    "rehearse no bool": set_rehearse,
    "weights left out": drop_weights,
    "facts left out": drop_facts,
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_weights_and_facts_are_refused(case, tmp_path):
    rewritten(tmp_path / "guard.safetensors", lambda header, tensors: None)
    with pytest.raises(ArtifactError):
        rewritten(tmp_path / "guard.safetensors", FORGED[case])


# --- the promise -------------------------------------------------------------------------------------


def test_rehearsal_keeps_the_promised_rate_of_false_alarms(monkeypatch):
    """100 images calibrate, 50 of which rank: the mean rate is floor(0.05 (n + 1)) / (n + 1), with n = 50."""
    monkeypatch.setattr(rehearsal, "BUDGET", 320)  # for speed: weights vary the more
    calibrations, count, fresh = 50, 100, 200
    guard, rates, ranking = Guard(network(), members=("energy", "image"), rehearse=True), [], 50
    guard.fit([images(400, 0, 3, 8, 8)], progress=False)
    for seed in range(calibrations):
        x = images(count + fresh, 1000 + seed, 3, 8, 8)
        guard.calibrate([x[:count]], progress=False, seed=seed)
        assert guard.calibration().rule.weights is not None
        rates.append(float(guard(x[count:]).is_ood.float().mean()))
    k, n = int(0.05 * (ranking + 1)), ranking + 1
    # The rate of one calibration follows a beta distribution, the share of fresh images a beta-binomial one.
    variance = k * (n - k) * (n + fresh) / (fresh * n**2 * (n + 1))
    assert abs(np.mean(rates) - k / n) < 3 * (variance / calibrations) ** 0.5
