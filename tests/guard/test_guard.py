"""Guard: the formula, its p-values, what a user sees, bad luck, more data, files."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gramwatch
from gramwatch import (
    ArtifactError,
    CalibrationError,
    GramDetector,
    GramwatchWarning,
    Guard,
    InputError,
    NotFittedError,
    TapError,
)
from gramwatch.detect.joint import JointRule, Standard
from gramwatch.detect.measurement import Calibration
from gramwatch.detect.passes import leaves_of
from gramwatch.detect.threshold import p_value
from gramwatch.evaluation import compare
from gramwatch.evaluation.evaluate import Together, fit_together
from gramwatch.files import artifact
from gramwatch.guard.guard import MEMBERS
from gramwatch.inputs import networks
from gramwatch.methods import FDBD, METHODS, MSP, Energy, Mahalanobis, ViM
from gramwatch.numerics import kernels
from gramwatch.numerics.metrics import auroc
from gramwatch_lab.paper import false_alarms, guard_study
from tests import oracle, real_data
from tests.guarded import (
    CLASSES,
    Net,
    class_ratio,
    fitted_classes,
    images,
    knn,
    largest_share,
    made,
    mahalanobis_pp,
    profile_distance,
    profiles,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 20:gramwatch.GramwatchWarning")


SEEN = ("gram", "profile", "class_ratio", "energy", "mahalanobis_pp", "knn")
"""The default members that are no strangers to images of 7 x 7 pixels: `image` needs larger ones."""


class Cosine(Net):
    """Its logits are not made by a linear layer."""

    def forward(self, x):
        return 20 * F.normalize(self.features(x) - 0.2) @ F.normalize(self.head.weight).T


@pytest.fixture
def net() -> Net:
    return made()


@pytest.fixture
def fitted(net) -> Guard:
    return Guard(net).fit(images(300, 0).split(64), progress=False)


@pytest.fixture
def ready(fitted) -> Guard:
    return fitted.calibrate(images(200, 1).split(64), progress=False)


def assert_same(a: Guard, b: Guard, x: torch.Tensor) -> None:
    mine, theirs = a(x), b(x)
    for field in dataclasses.fields(mine):
        one, other = getattr(mine, field.name), getattr(theirs, field.name)
        if field.name == "parts":
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
        elif field.name == "taps":
            assert one == other
        else:
            assert torch.equal(one, other), field.name


# --- the formula -------------------------------------------------------------------------------------


def transcription(net: Net, deltas: np.ndarray, x: torch.Tensor) -> dict[str, np.ndarray]:
    """delta_l / confidence and energy, one example at a time."""
    with torch.no_grad():
        all_z = net(x).double().numpy()
    confident, energy = [], []
    for delta, z in zip(deltas, all_z, strict=True):
        confident.append(delta / (np.exp(z.max()) / np.exp(z).sum()))
        energy.append(-np.log(np.exp(z).sum()))
    return {"delta": np.array(confident), "energy": np.array(energy)}


def test_scores_and_p_values_equal_the_transcription(net):
    train, validation, test = images(300, 0), images(161, 1), images(40, 2, scale=1.3)
    guard = Guard(net, level=0.9).fit(train.split(64), progress=False)
    guard.calibrate(validation.split(50), seed=7, progress=False)
    detection = guard(test)

    gram = GramDetector(net, orders=(1, 2, 4, 8)).fit(train.split(64), progress=False)
    known = transcription(net, gram.measure(validation).deviations.double().numpy(), validation)
    new = transcription(net, gram.measure(test).deviations.double().numpy(), test)
    order = oracle.drawn(161, 7)
    normalising, ranking = order[:80], order[80:]
    own = known["delta"][normalising].mean(0)
    assert (own > 0).all()
    expectation = (80 * own + 50 * own.mean()) / 130
    classes = fitted_classes(net, train)
    fitting = profiles(net, train, validation)[normalising]
    for measures, x in ((known, validation), (new, test)):
        measures["gram"] = np.sqrt(measures["delta"] / (expectation + 1e-7)).mean(1)
        profile = profiles(net, train, x)
        measures["profile"] = np.array([profile_distance(fitting, row) for row in profile])
        measures["class_ratio"] = class_ratio(net, classes, x)
        measures["mahalanobis_pp"] = mahalanobis_pp(net, classes, x)
        measures["knn"] = knn(net, train, x)
    names = SEEN
    standard = {name: known[name][normalising] for name in names}
    for i, row in enumerate(fitting):  # examples that fitted the rule are standardised as if left out
        others = profile_distance(fitting, row) ** 2
        standard["profile"][i] = np.sqrt(others / (1 - others * len(row) / len(fitting)))
    middle = {name: np.median(standard[name]) for name in names}
    spread = {
        name: max(np.percentile(standard[name], 99) - middle[name], standard[name].std()) for name in names
    }
    lowest = {name: np.percentile(standard[name], 25) for name in names}
    for measures in (known, new):
        measures["score"] = sum(
            (np.maximum(measures[name], lowest[name]) - middle[name]) / spread[name] for name in names
        )

    np.testing.assert_allclose(detection.score.numpy(), new["score"], rtol=1e-4, atol=1e-5)
    ranks = np.sort(known["score"][ranking])
    np.testing.assert_allclose(guard.calibration_scores_.numpy(), ranks, rtol=1e-4, atol=1e-5)
    exact = guard.calibration_scores_.numpy()
    for i, score in enumerate(detection.score.numpy()):
        p = (1 + sum(exact >= score)) / (len(exact) + 1)
        assert detection.p_value[i].item() == pytest.approx(p, abs=1e-12)
        assert bool(detection.is_ood[i]) == (p <= 0.1 + 1e-12)
        assert bool(detection.is_ood[i]) == (score > guard.threshold_)
    for name in names:
        among = [(1 + sum(known[name][ranking] >= value)) / 82 for value in new[name]]
        # One rank more or less, where float32 and float64 sort two examples differently.
        np.testing.assert_allclose(detection.parts[name].numpy(), among, atol=1.01 / 82)
        assert np.mean(np.abs(detection.parts[name].numpy() - among) < 1e-12) > 0.9
    assert detection.deviations.dtype == torch.float32
    assert torch.equal(detection.deviations, gram.measure(test).deviations)
    assert torch.equal(detection.class_support, gram.class_counts_[detection.predicted])
    assert torch.equal(detection.logits.argmax(1), detection.predicted)


# --- p-values ----------------------------------------------------------------------------------------


def test_p_values_of_a_network_hold(fitted):
    """Fresh images, 40 calibrations."""
    measured = fitted.measure_all(images(16_000, 20).split(1000), progress=False)
    flagged = {0.01: [], 0.05: [], 0.1: []}
    for part in torch.arange(16_000).split(400):
        calibration = Calibration.of(measured[part[:300]], fitted.rule(), 0.95)
        p = calibration.judged(measured[part[300:]])[1][:, 0]
        for alpha, shares in flagged.items():
            shares.append((p <= alpha).double().mean().item())
    for alpha, shares in flagged.items():
        assert np.mean(shares) <= largest_share(alpha, 150, 100, 40)


def test_per_class_ranks_within_the_group(net, tmp_path):
    guard = Guard(net, per_class=True).fit(images(300, 0).split(64), progress=False)
    guard.calibrate(images(1200, 1).split(200), progress=False)
    pooled = Guard.of(guard.members).calibrate(images(1200, 1).split(200), progress=False)
    x = images(50, 2)
    detection, expected = guard(x), pooled(x)
    assert torch.equal(detection.score, expected.score)
    calibration, groups = guard.calibration(), guard.groups_
    assert len(groups) > 1
    assert sorted(c for group in groups for c in group) == list(range(CLASSES))
    assert pooled.groups_ == [list(range(CLASSES))]
    for i in range(50):
        (group,) = (torch.tensor(group) for group in groups if int(detection.predicted[i]) in group)
        own = calibration.scores[torch.isin(calibration.predicted, group), 0]
        assert detection.p_value[i] == p_value(detection.score[i : i + 1], own)
    assert not torch.equal(detection.p_value, expected.p_value)
    assert "per class" in repr(guard)
    with pytest.raises(ValueError, match="thresholds of their own"):
        guard.threshold_  # noqa: B018
    guard.save(tmp_path / "guard.safetensors")
    again = gramwatch.load(tmp_path / "guard.safetensors", net)
    assert again.groups_ == groups
    assert torch.equal(again(x).p_value, detection.p_value)


# --- what a user sees --------------------------------------------------------------------------------


def test_parts_tell_which_member_raised_the_alarm(ready):
    detection = ready(images(20, 3))
    assert tuple(detection.parts) == SEEN
    for p in (*detection.parts.values(), detection.p_value):
        assert p.shape == (20,)
        assert ((p > 0) & (p <= 1)).all()
    far = ready(images(20, 3, scale=8))
    assert far.parts["gram"].max() < 0.05
    assert far.parts["energy"].min() > 0.5
    assert "gram 0.0" in repr(far)
    alone = ready.members["gram"].calibrate([images(80, 1)], progress=False)
    assert alone(images(2, 2)).parts is None


def test_with_a_floor_no_member_can_silence_the_others(fitted):
    """Huge activations look normal to energy, and more so than any calibration example."""
    inside, outside = fitted.measure(images(400, 1)), fitted.measure(images(20, 3, scale=8))
    caught = []
    for standard in (guard_study.Adjusted(floored=False), Standard()):
        rule = JointRule({"gram": fitted.rule().rules["gram"]}, standard)
        calibration = Calibration.of(inside, rule, 0.95)
        caught.append(int(calibration.judged(outside)[2].sum()))
    assert caught[0] <= 2
    assert caught[1] == 20


def test_results_are_ordinary_tensors(ready):
    detection = ready(images(3, 2))
    tensors = [value for value in vars(detection).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 7
    assert not any(t.is_inference() for t in (*tensors, *detection.parts.values()))


def test_one_batch_takes_one_forward_pass(ready):
    passes = []
    ready.model.register_forward_hook(lambda *_: passes.append(1))
    ready(images(9, 2))
    ready(images(1, 2))
    assert len(passes) == 2


def test_fitting_takes_one_pass_over_the_data(net):
    passes = []
    net.register_forward_hook(lambda *_: passes.append(1))
    Guard(net).fit(images(300, 0).split(50), progress=False)
    looking = 2 + 2 + 2 + 2  # for the layer that makes the logits, by the guard and by the observer; for taps
    assert len(passes) <= 6 + looking


def test_a_marked_tensor_is_not_computed_twice(monkeypatch):
    class Marked(Net):
        def features(self, x):
            x = gramwatch.mark(F.relu(self.conv1(x)), "again")
            return F.relu(self.conv2(x)).mean((2, 3))

    net, computed = made(Marked), []
    plain = kernels.compute
    monkeypatch.setattr(kernels, "compute", lambda *args: computed.append(1) or plain(*args))
    guard = Guard(net, taps=["*", "again"]).fit(images(300, 0).split(100), progress=False)
    assert len(computed) == 3 * (len(guard.tap_names) - 1)
    gram = GramDetector(net, taps=["*", "again"], orders=guard.members["gram"].orders)
    gram.fit(images(300, 0).split(100), progress=False)
    x = images(9, 2, scale=2)
    deviations = gram.measure(x).deviations
    assert torch.equal(guard.measure(x).parts["gram"].deviations, deviations.double())
    again, first = (gram.tap_names.index(name) for name in ("again", "relu"))
    assert torch.equal(deviations[:, again], deviations[:, first])


def test_large_statistics_are_measured_all_the_same(ready, monkeypatch):
    """Each example by itself, then: rounding in the network differs with the size of its batch."""
    x, passes = images(9, 2, scale=2), []
    x[4] = torch.nan
    with pytest.warns(GramwatchWarning, match=r"1 input\(s\) with NaN"):
        expected = [ready(x[i : i + 1]) for i in range(9)]
    monkeypatch.setattr("gramwatch.observe.plan.MOST_STATISTICS", 0)
    ready.model.register_forward_hook(lambda *_: passes.append(1))
    for record in (False, True):
        ready.record_pass = record
        with pytest.warns(GramwatchWarning, match=r"1 input\(s\) with NaN") as said:
            detection = ready(x)
        assert len(said) == 1
        assert len(passes) == 9
        passes.clear()
        for i, verdict in enumerate(expected):
            for name in ("score", "p_value", "is_ood", "class_support", "deviations"):
                torch.testing.assert_close(
                    getattr(detection[i], name), getattr(verdict, name), rtol=0, atol=0, equal_nan=True
                )
    measured = Together({"Guard": ready, "MSP": MSP(ready.model)}).measure([x], "judging", False)
    assert torch.equal(ready.calibration().rule(measured["Guard"])[:, 0], detection.score)
    assert len(measured["MSP"]) == 9


def test_a_fit_in_pieces_is_the_same(net, fitted, monkeypatch):
    batches = images(300, 0).split(64)
    monkeypatch.setattr("gramwatch.observe.plan.MOST_STATISTICS", 20_000)
    guard = Guard(net).fit(batches, progress=False)
    assert 1 < guard.planned(batches[0]).at_once < 64
    gram, expected = guard.members["gram"], fitted.members["gram"]
    for mine, theirs in zip(gram.tables(), expected.tables(), strict=True):
        torch.testing.assert_close(mine, theirs)
    x = images(20, 2, scale=1.3)
    torch.testing.assert_close(guard.measure(x).values.float(), fitted.measure(x).values.float())
    bad = torch.full((60, 1, 7, 7), torch.nan)
    with pytest.warns(GramwatchWarning, match=r"60 training example\(s\) with NaN") as said:
        Guard(net).fit([*batches, bad], progress=False)
    assert sum("left out" in str(message.message) for message in said) == 1


def test_the_network_is_not_changed(net):
    before = {key: value.clone() for key, value in net.state_dict().items()}
    net.train()
    guard = Guard(net).fit(images(300, 0).split(64), progress=False)
    guard.calibrate([images(100, 1)], progress=False)(images(5, 2))
    assert net.training
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_what_comes_first_is_said(net):
    guard = Guard(net)
    with pytest.raises(NotFittedError, match="not fitted"):
        guard(images(2, 0))
    with pytest.raises(NotFittedError, match="not fitted"):
        guard.calibrate([images(100, 0)], progress=False)
    with pytest.raises(NotFittedError):
        guard.save("nowhere.safetensors")
    with pytest.raises(InputError, match="nothing to fit"):
        guard.fit([], progress=False)
    assert repr(guard) == f"Guard(Net: {' + '.join(MEMBERS)}, not calibrated)"


def test_settings_are_checked(net):
    with pytest.raises(ValueError, match="level must lie between"):
        Guard(net, level=1.5)
    with pytest.raises(ValueError, match="no member 'magic': choose from gram, msp"):
        Guard(net, members=["magic"])
    with pytest.raises(ValueError, match="at least one"):
        Guard(net, members=[])
    with pytest.raises(ValueError, match="'odin' takes passes of its own"):
        Guard(net, members=["gram", "odin"])
    msp = MSP(net)
    with pytest.raises(ValueError, match="'a' is a member by two names"):
        Guard.of({"a": msp, "b": msp})
    with pytest.raises(ValueError, match="'b' judges another network"):
        Guard.of({"a": MSP(net), "b": MSP(made())})
    with pytest.raises(ValueError, match="confidence='subtract'"):
        Guard.of({"gram": GramDetector(net, confidence="subtract")})
    with pytest.raises(ValueError, match="storage must be one of"):
        Guard(net, storage="int4")


def test_members_without_gram(net):
    guard = Guard(net, members=["energy", "msp"]).fit([images(9, 0)], progress=False)
    detection = guard.calibrate([images(100, 1)], progress=False)(images(5, 2))
    assert detection.deviations is None
    assert detection.class_support is None
    assert list(detection.parts) == ["energy", "msp"]


# --- bad luck ----------------------------------------------------------------------------------------


def test_inputs_that_are_not_finite(net, ready):
    x = images(6, 2)
    expected = ready(x)
    x[1], x[4, 0, 3, 3] = torch.nan, torch.inf
    with pytest.warns(GramwatchWarning, match=r"2 input\(s\) with NaN or infinity"):
        detection = ready(x)
    assert detection.score.isinf().tolist() == [False, True, False, False, True, False]
    assert detection.is_ood[[1, 4]].all()
    for p in (detection.p_value, *detection.parts.values()):
        assert p[1] == p[4] == 1 / 101
    good = [0, 2, 3, 5]
    torch.testing.assert_close(detection.score[good], expected.score[good])


def test_training_and_calibration_data_that_are_not_finite(net, ready):
    train, validation = images(300, 0), images(200, 1)
    bad = torch.full((3, 1, 7, 7), torch.nan)
    guard = Guard(net)
    with pytest.warns(GramwatchWarning, match=r"3 training example\(s\) with NaN"):
        guard.fit([*train.split(64), bad], progress=False)
    with pytest.warns(GramwatchWarning, match=r"3 calibration example\(s\) with NaN"):
        guard.calibrate([*validation.split(64), bad], progress=False)
    assert_same(guard, ready, images(20, 2))


def test_a_network_without_a_linear_head(tmp_path):
    net = made(Cosine)
    with pytest.warns(GramwatchWarning, match="mahalanobis_pp, knn are left out of the guard") as said:
        plain = Guard(net).fit(images(300, 0).split(64), progress=False)
    assert sum("left out of the guard" in str(message.message) for message in said) == 1
    plain.calibrate([images(100, 1)], progress=False)
    assert len(plain(images(5, 2)).parts) == 4
    guard = Guard(net, members=("gram", "fdbd", "energy"))
    with pytest.warns(GramwatchWarning, match=r"fdbd is left out of the guard: the logits of Cosine") as said:
        guard.fit(images(300, 0).split(64), progress=False)
    assert sum("left out of the guard" in str(message.message) for message in said) == 1
    detection = guard.calibrate([images(100, 1)], progress=False)(images(5, 2))
    assert list(detection.parts) == ["gram", "energy"]
    guard.save(tmp_path / "g.safetensors")
    assert_same(gramwatch.load(tmp_path / "g.safetensors", net), guard, images(9, 3))
    with pytest.raises(TapError, match="no member can be used, fdbd"):
        Guard(net, members=["fdbd"]).fit([images(9, 0)], progress=False)
    again = Guard(net, members=("gram", "fdbd", "energy"))
    with pytest.warns(GramwatchWarning, match="fdbd is left out"):
        fit_together({"Guard": again, "MSP": MSP(net)}, images(300, 0).split(64), progress=False)
    assert_same(again.calibrate([images(100, 1)], progress=False), guard, images(9, 3))


def test_too_few_calibration_examples(fitted):
    with pytest.raises(CalibrationError, match=r"37 calibration examples .* at least 38 are needed"):
        fitted.calibrate([images(37, 1)], progress=False)
    fitted.calibrate([images(38, 1)], progress=False)
    fitted.calibrate([images(19, 1)], split=False, progress=False)
    assert len(fitted.calibration_scores_) == 19
    with pytest.raises(InputError, match="no example"):
        fitted.calibrate([], progress=False)


def test_training_data_cannot_calibrate(fitted):
    with pytest.raises(CalibrationError, match="look like training examples"):
        fitted.calibrate(images(300, 0).split(64), progress=False)


def test_a_member_that_never_differs_is_left_out(net):
    class Same(MSP):
        def score(self, observation):
            return torch.full((len(observation),), 0.3)

    both = Guard.of({"gram": GramDetector(net), "same": Same(net)}).fit([images(300, 0)], progress=False)
    with pytest.warns(GramwatchWarning, match="same says the same of all calibration examples"):
        both.calibrate([images(200, 1)], progress=False)
    alone = Guard.of({"gram": both.members["gram"]}).calibrate([images(200, 1)], progress=False)
    torch.testing.assert_close(both(images(9, 2)).score, alone(images(9, 2)).score)
    nothing = Guard.of({"same": Same(net)}).fit([images(9, 0)], progress=False)
    with pytest.raises(CalibrationError, match="every member says the same"):
        nothing.calibrate([images(200, 1)], progress=False)


@pytest.mark.parametrize("per_class", [False, True])
def test_a_class_that_is_never_predicted(net, per_class, tmp_path):
    with torch.no_grad():
        net.head.bias[2] -= 1e4
    guard = Guard(net, per_class=per_class)
    with pytest.warns(GramwatchWarning, match="1 of them for none: class 2"):
        guard.fit(images(300, 0).split(64), progress=False)
    guard.calibrate([images(600, 1)], progress=False)
    with torch.no_grad():
        net.head.bias[2] += 2e4
    detection = guard(images(5, 2))
    assert (detection.predicted == 2).all()
    assert (detection.class_support == 0).all()
    assert ((detection.p_value > 0) & (detection.p_value <= 1)).all()
    assert detection.score.isfinite().all()


# --- more data ---------------------------------------------------------------------------------------


def test_shards_merged_equal_a_fit_on_all(net, ready):
    parts = [Guard(net).fit(part.split(64), progress=False) for part in images(300, 0).split([170, 30, 100])]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    with pytest.raises(NotFittedError, match="not calibrated"):
        merged(images(2, 0))
    for name in ("profile", "class_ratio"):
        mine, all_at_once = merged.members[name], ready.members[name]
        assert int(mine.counts_.sum()) == 300
        means = [
            member.sums_
            + member.counts_.repeat_interleave(member.widths_.sum())
            * member.origins_.repeat(len(member.counts_))
            for member in (mine, all_at_once)
        ]
        torch.testing.assert_close(*means, rtol=1e-9, atol=1e-9)
    merged.calibrate(images(200, 1).split(64), progress=False)
    x = images(40, 2, scale=1.5)
    detection, expected = merged(x), ready(x)
    assert torch.equal(detection.deviations, expected.deviations)
    torch.testing.assert_close(detection.score, expected.score, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(detection.p_value, expected.p_value)


def test_fitting_again_adds(net, ready):
    first, second = images(300, 0).split([128, 172])
    guard = Guard(net).fit(first.split(64), progress=False).fit(second.split(64), progress=False)
    guard.calibrate(images(200, 1).split(64), progress=False)
    x = images(20, 2)
    torch.testing.assert_close(guard(x).score, ready(x).score, rtol=1e-9, atol=1e-9)


def test_what_cannot_be_merged_is_named_and_nothing_is_changed(net, fitted):
    for settings, match in (
        ({"level": 0.9}, "level: 0.95 and 0.9"),
        ({"per_class": True}, "per_class"),
        ({"members": ["gram", "energy"]}, "members"),
        ({"orders": [1, 2]}, "orders"),
    ):
        other = Guard(net, **settings).fit([images(300, 5)], progress=False)
        with pytest.raises(ValueError, match=match):
            fitted.merge(other)
    other = made()
    with torch.no_grad():
        other.head.bias += 1
    with pytest.raises(ValueError, match="different weights"):
        fitted.merge(Guard(other).fit([images(300, 5)], progress=False))

    def with_vim(seed: int) -> Guard:
        guard = Guard.of({"gram": GramDetector(net), "vim": ViM(net)})
        return guard.fit([images(300, seed)], progress=False)

    one, two = with_vim(0), with_vim(1)
    counts = one.members["gram"].class_counts_
    with pytest.raises(ValueError, match="vim cannot be merged"):
        one.merge(two)
    assert torch.equal(one.members["gram"].class_counts_, counts)
    with pytest.raises(ValueError, match="'vim' is fitted already"):
        one.fit([images(300, 2)], progress=False)
    with pytest.raises(ValueError, match="'vim' keeps examples"):
        Guard.of({"vim": ViM(net)}).fit([images(300, 2)], checkpoint="c", progress=False)


def test_a_member_may_look_at_some_taps_only(net):
    names = [tap.name for tap in GramDetector(net).fit([images(64, 0)], progress=False).taps]
    members = {"gram": GramDetector(net), "fdbd": FDBD(net), "mahalanobis": Mahalanobis(net, taps=names[-1:])}
    guard = Guard.of(members).fit(images(300, 0).split(64), progress=False)
    guard.calibrate([images(200, 1)], progress=False)
    alone = Mahalanobis(net, taps=names[-1:]).fit(images(300, 0).split(64), progress=False)
    torch.testing.assert_close(members["mahalanobis"].products_, alone.products_)
    assert list(guard(images(3, 2)).parts) == ["gram", "fdbd", "mahalanobis"]


def test_members_may_look_at_different_taps(net):
    names = [tap.name for tap in GramDetector(net).fit([images(64, 0)], progress=False).taps]
    kinds = [{"taps": names[-1:]}, {"taps": "all"}, {"taps": names[:1]}, {"taps": "all"}]
    together = {str(i): Mahalanobis(net, **options) for i, options in enumerate(kinds)}
    guard = Guard.of(together).fit(images(300, 0).split(64), progress=False)
    measurement = guard.measure(images(9, 2))
    for name, settings in zip(together, kinds, strict=True):
        alone = Mahalanobis(net, **settings).fit(images(300, 0).split(64), progress=False)
        assert torch.equal(measurement.parts[name].values[:, 0], alone.score_inputs(images(9, 2))[1])
    broken = images(9, 2)
    broken[4, 0, 3, 3] = torch.nan
    assert guard.measure(broken).finite.tolist() == [i != 4 for i in range(9)]
    assert leaves_of([guard, together["2"]]) == list(together.values())


def test_labels_are_ignored(net):
    batches = images(300, 0).split(64)
    plain = Guard(net).fit(batches, progress=False).calibrate([images(200, 1)], progress=False)
    for nonsense in (torch.full((64,), 99), torch.rand(64, 3)):
        pairs = [(x, nonsense[: len(x)]) for x in batches]
        labelled = Guard(net).fit(pairs, progress=False).calibrate([images(200, 1)], progress=False)
        assert_same(plain, labelled, images(9, 2))


class StoppedError(Exception):
    pass


def broken_after(batches: int):
    for number, batch in enumerate(images(300, 0).split(64)):
        if number == batches:
            raise StoppedError
        yield batch


def test_an_interrupted_fit_goes_on(net, ready, tmp_path):
    file = tmp_path / "fit.safetensors"
    with pytest.raises(StoppedError):
        Guard(net).fit(broken_after(3), checkpoint=file, progress=False)
    with pytest.raises(ArtifactError, match=r"begun with orders = .* for gram"):
        Guard(net, orders=[1, 2]).fit(images(300, 0).split(64), checkpoint=file, progress=False)
    with pytest.raises(ArtifactError, match="begun with level"):
        Guard(net, level=0.9).fit(images(300, 0).split(64), checkpoint=file, progress=False)
    others = {**Guard(net).members, "energy": MSP(net)}
    with pytest.raises(ArtifactError, match="begun with energy as energy: delete it to start anew"):
        Guard.of(others).fit(images(300, 0).split(64), checkpoint=file, progress=False)
    guard = Guard(net).fit(images(300, 0).split(64), checkpoint=file, progress=False)
    assert file.exists()  # nothing is lost if the process ends before `save`
    guard.save(tmp_path / "guard.safetensors")
    assert not file.exists()
    assert_same(guard.calibrate(images(200, 1).split(64), progress=False), ready, images(20, 2))
    ready.save(file)
    with pytest.raises(ArtifactError, match="finished detector, not the checkpoint"):
        Guard(net).fit([images(9, 0)], checkpoint=file, progress=False)


def test_a_guard_fitted_after_an_interruption_says_so_and_can_be_reset(net, ready):
    guard = Guard(net)
    with pytest.raises(StoppedError):
        guard.fit(broken_after(3), progress=False)
    with pytest.warns(GramwatchWarning, match="interrupted after 3 batch"):
        guard.fit(images(300, 0).split(64), progress=False)
    guard.reset().fit(images(300, 0).split(64), progress=False)
    assert_same(guard.calibrate(images(200, 1).split(64), progress=False), ready, images(20, 2))


def test_an_interruption_between_two_members_leaves_a_checkpoint_that_is_whole(net, tmp_path, monkeypatch):
    file, batches = tmp_path / "fit.safetensors", images(300, 0).split(64)
    monkeypatch.setattr("gramwatch.detect.progress.CHECKPOINT_SECONDS", 0.0)
    guard, taken = Guard(net), []
    ratio = guard.members["class_ratio"]

    def breaking(observation):
        taken.append(1)
        if len(taken) == 3:  # Gram has taken the third batch in already
            raise StoppedError
        return type(ratio).take(ratio, observation)

    ratio.take = breaking
    with pytest.raises(StoppedError):
        guard.fit(batches, checkpoint=file, progress=False)
    resumed = Guard(net).fit(batches, checkpoint=file, progress=False)
    whole = Guard(net).fit(batches, progress=False)
    assert torch.equal(resumed.members["gram"].class_counts_, whole.members["gram"].class_counts_)
    for detector in (resumed, whole):
        detector.calibrate([images(200, 1)], progress=False)
    assert_same(resumed, whole, images(20, 2))


def test_a_guard_is_not_merged_with_itself(net):
    guard = Guard(net, members=SEEN).fit(images(300, 0).split(64), progress=False)
    with pytest.raises(ValueError, match="cannot be merged with itself"):
        guard.merge(guard)
    with pytest.raises(ValueError, match="cannot be merged with itself"):
        guard.merge(Guard.of(guard.members))  # the same members


def test_an_interrupted_fit_goes_on_with_running_sums(net, tmp_path):
    file, members = tmp_path / "fit.safetensors", ("gram", "energy", "mahalanobis")
    with pytest.raises(StoppedError):
        Guard(net, members=members).fit(broken_after(3), checkpoint=file, progress=False)
    whole, resumed = (Guard(net, members=members) for _ in range(2))
    whole.fit(images(300, 0).split(64), progress=False)
    resumed.fit(images(300, 0).split(64), checkpoint=file, progress=False)
    for guard in (whole, resumed):
        guard.calibrate([images(200, 1)], progress=False)
    assert_same(resumed, whole, images(20, 2))


# --- save and load -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [{}, {"per_class": True, "level": 0.9}, {"storage": "float16"}], ids=str)
def test_a_loaded_guard_equals_the_saved_one(choices, tmp_path):
    guard = Guard(made(), **choices).fit(images(300, 0).split(64), progress=False)
    guard.calibrate([images(901, 1)], seed=3, progress=False)
    guard.metadata["classes"] = ["a", "b"]
    guard.save(tmp_path / "guard.safetensors")
    loaded = gramwatch.load(tmp_path / "guard.safetensors", made())
    assert isinstance(loaded, Guard)
    assert loaded.metadata == {"classes": ["a", "b"]}
    assert repr(loaded) == repr(guard)
    assert_same(loaded, guard, images(40, 2, scale=1.3))
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "guard.safetensors").read_bytes()
    other = made()
    with torch.no_grad():
        other.head.bias += 1
    with pytest.raises(ArtifactError, match="other weights"):
        gramwatch.load(tmp_path / "guard.safetensors", other)


def test_a_guard_that_is_only_fitted_is_saved(fitted, ready, tmp_path):
    guard = Guard(fitted.model).fit(images(300, 0).split(64), progress=False)
    guard.save(tmp_path / "guard.safetensors")
    loaded = gramwatch.load(tmp_path / "guard.safetensors", fitted.model)
    with pytest.raises(NotFittedError, match="not calibrated"):
        loaded(images(2, 0))
    assert_same(loaded.calibrate(images(200, 1).split(64), progress=False), ready, images(9, 2))


def test_a_loaded_guard_can_be_merged(net, ready, tmp_path):
    first, second = images(300, 0).split([100, 200])
    Guard(net).fit([first], progress=False).save(tmp_path / "first.safetensors")
    merged = gramwatch.load(tmp_path / "first.safetensors", net).merge(
        Guard(net).fit([second], progress=False)
    )
    merged.calibrate(images(200, 1).split(64), progress=False)
    x = images(9, 2)
    torch.testing.assert_close(merged(x).score, ready(x).score, rtol=1e-9, atol=1e-9)


def test_members_are_nested_and_checked(ready, tmp_path):
    path = tmp_path / "guard.safetensors"
    ready.save(path)
    saved = artifact.read(path)
    assert saved.header["detector"] == "Guard"
    assert tuple(saved.header["members"]) == SEEN
    _, shapes = Guard.described(saved.header, ready.model)
    tensors = saved.tensors(shapes)
    assert {"members.gram.bounds.minimum", "members.class_ratio.state.sums_", "calibration.scores"} <= set(
        tensors
    )
    header = {key: saved.header[key] for key in saved.header if key not in ("format", "library", "tensors")}
    for name in ("members.class_ratio.state.sums_", "calibration.median", "calibration.expectation.gram"):
        artifact.write(path, header, {key: t for key, t in tensors.items() if key != name})
        with pytest.raises(ArtifactError, match=f"'{name}' is missing"):
            gramwatch.load(path, ready.model)
    artifact.write(path, header, {**tensors, "members.gram.more": torch.zeros(1)})
    with pytest.raises(ArtifactError, match=r"'members.gram.more' does not belong there"):
        gramwatch.load(path, ready.model)
    header["members"] = {**header["members"], "energy": {**header["members"]["energy"], "detector": "oracle"}}
    artifact.write(path, header, tensors)
    with pytest.raises(ArtifactError, match="oracle"):
        gramwatch.load(path, ready.model)


# --- beside others -----------------------------------------------------------------------------------


def test_evaluating_a_guard_is_the_protocol_written_out(fitted):
    inside, outside = images(360, 1), images(50, 2, scale=1.3)
    result = gramwatch.evaluate(fitted, [inside], {"wide": [outside]}, draws=3, seed=4, progress=False)
    assert result.methods == [
        "Guard",
        "Gram",
        "profile",
        "class ratio",
        "energy",
        "Mahalanobis++",
        "KNN",
        "MSP",
    ]
    measured, other = fitted.measure(inside), fitted.measure(outside)
    generator, figures = torch.Generator().manual_seed(4), []
    for _ in range(3):
        order = torch.randperm(360, generator=generator)
        rule = fitted.rule().fit(measured[order[:36]])
        figures.append(auroc(rule(measured)[order[36:], 0], rule(other)[:, 0]))
    assert result.figures()[0, 0] == pytest.approx(np.mean(figures), abs=1e-9)
    with pytest.raises(NotFittedError):
        fitted(inside)
    alone = gramwatch.evaluate(
        {"Gram": fitted.members["gram"]}, [inside], {"wide": [outside]}, draws=3, seed=4, progress=False
    )
    assert result.figures()[1, 0] == pytest.approx(alone.figures()[0, 0], abs=1e-12)


def test_examples_that_are_not_finite_are_the_highest(fitted):
    outside = images(50, 2)
    outside[:] = torch.nan
    inside = images(120, 1)
    result = gramwatch.evaluate({"Guard": fitted}, [inside], {"broken": [outside]}, progress=False)
    assert result.figures().tolist() == [[1.0]]


def test_members_that_stand_beside_their_guard_work_once(net, monkeypatch):
    gram, fdbd, energy = GramDetector(net), FDBD(net), Energy(net)
    guard = Guard.of({"gram": gram, "fdbd": fdbd, "energy": energy})
    detectors = {"Guard": guard, "Gram": gram, "fDBD": fdbd, "energy": energy, "MSP": MSP(net)}
    calls = []
    for kind, name in ((FDBD, "take"), (FDBD, "measured"), (GramDetector, "measured")):
        plain = getattr(kind, name)

        def counted(*args, _plain=plain, _name=name):
            calls.append(_name)
            return _plain(*args)

        monkeypatch.setattr(kind, name, counted)
    fit_together(detectors, images(300, 0).split(100), progress=False)
    assert calls == ["take"] * 3
    calls.clear()
    passes = []
    net.register_forward_hook(lambda *_: passes.append(1))
    together = Together(detectors)
    measured = together.measure(images(90, 1).split(30), "judging", False)
    assert len(passes) <= 3 + 4  # to find the taps and the layer that makes the logits
    assert calls == ["measured"] * 6
    of_guard = measured["Guard"].parts
    assert torch.equal(of_guard["fdbd"].values, measured["fDBD"].values)
    assert torch.equal(of_guard["gram"].values, measured["Gram"].values.double())
    assert len({measurement.logits.data_ptr() for measurement in measured.values()}) == 1
    passes.clear()
    together.measure(images(90, 2).split(30), "judging", False)
    assert len(passes) == 3  # what was found serves further sets


def test_grams_that_measure_the_same_do_it_once(net, monkeypatch):
    detectors = {
        "min and max": GramDetector(net),
        "mean and variance": GramDetector(net, bounds="mean_variance"),
        "other orders": GramDetector(net, orders=[1, 2]),
    }
    apart = {
        name: GramDetector(net, orders=detector.orders, bounds=detector.bounds)
        for name, detector in detectors.items()
    }
    fit_together(detectors, images(300, 0).split(100), progress=False)
    calls = []
    plain = kernels.compute
    monkeypatch.setattr(kernels, "compute", lambda *args: calls.append(args[2]) or plain(*args))
    measured = Together(detectors).measure([images(90, 1)], "judging", False)
    taps = len(detectors["min and max"].taps)
    assert len(calls) == 2 * taps
    for name, detector in apart.items():
        deviations = detector.fit(images(300, 0).split(100), progress=False).measure(images(90, 1)).deviations
        torch.testing.assert_close(measured[name].deviations, deviations)
        assert deviations.any()


def test_compare_has_guard_share_its_members(net):
    detectors = compare.fitted(
        net, list(images(300, 0).split(100)), ["guard", "gram", "energy", "msp"], print
    )
    assert list(detectors) == ["Guard", "Gram", "energy", "MSP"]
    assert detectors["Guard"].members["gram"] is detectors["Gram"]
    assert detectors["Guard"].members["energy"] is detectors["energy"]
    assert tuple(detectors["Guard"].members) == SEEN
    assert list(compare.fitted(net, list(images(300, 0).split(100)), ["guard"], print)) == ["Guard"]
    said = []
    detectors = compare.fitted(made(Cosine), list(images(300, 0).split(100)), ["guard", "fdbd"], said.append)
    assert list(detectors) == ["Guard"]
    assert len(detectors["Guard"].members) == 4
    assert sum("fDBD is left out" in line for line in said) == 1


def test_every_member_by_name_works(net):
    names = [name for name, method in METHODS.items() if not method(net).alone]
    guard = Guard(net, members=["gram", *names])
    guard.fit(images(600, 0).split(200), progress=False)
    detection = guard.calibrate([images(200, 1)], progress=False)(images(5, 2))
    assert list(detection.parts) == [
        "gram",
        *(name for name in names if name != "image"),
    ]  # they are too small
    assert detection.score.isfinite().all()


# --- the real thing ----------------------------------------------------------------------------------


@pytest.mark.real
def test_p_values_hold_on_cifar10(shared_weights, shared_data):
    """Forty splits of 4,000 test images into 2,600 to calibrate, half of which rank, and 1,400 fresh ones."""
    loaded = networks.load("resnet20", shared_weights / "resnet20_cifar10.pth")

    def prepared(part: str, count: int):
        images = real_data.mosaic(shared_data / "cifar10" / f"{part}.webp", count)
        return [loaded.prepare(x) for x in torch.from_numpy(images).permute(0, 3, 1, 2).split(200)]

    guard = Guard(loaded.network).fit(prepared("train_0", 6000), progress=False)
    measured = guard.measure_all(prepared("test_0", 4000), progress=False)
    alphas = torch.tensor(false_alarms.ALPHAS, dtype=torch.float64)
    shares = {False: [], True: []}
    for seed in range(40):
        order = torch.randperm(4000, generator=torch.Generator().manual_seed(1000 + seed))
        inside, fresh = measured[order[:2600]], measured[order[2600:]]
        for per_class, rates in shares.items():
            calibration = Calibration.of(inside, guard.rule(), 0.95, per_class=per_class, seed=seed)
            low = (calibration.judged(fresh)[1][:, :1] <= alphas).double()
            of_class = [low[fresh.predicted == c].mean(0) for c in range(10)]
            rates.append(torch.stack([low.mean(0), *of_class]))
    for per_class, rates in shares.items():
        mean = torch.stack(rates).mean(0)
        print(f"per_class={per_class}: all {mean[0].tolist()}, highest class {mean[1:].amax(0).tolist()}")
        for i, alpha in enumerate(false_alarms.ALPHAS):
            # The splits share their images: as many deviations as for a single one.
            assert mean[0, i] <= largest_share(alpha, 1300, 1400, 1)
            if per_class:
                assert mean[1:, i].max() <= largest_share(alpha, 100, 100, 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda guard: pickle.loads(pickle.dumps(guard))])
def test_a_copy_of_a_guard_judges_the_same_and_is_its_own(copied, ready):
    fresh = copied(Guard(ready.model))
    fresh.fit(images(300, 0).split(64), progress=False).calibrate(images(200, 1).split(64), progress=False)
    ready(images(3, 2))
    ready.record_pass = True
    other, x = copied(ready), images(9, 3)
    assert other.record_pass
    for twin in (fresh, other):
        assert_same(twin, ready, x)
    assert all(member.model is other.model for member in other.members.values())
    before = ready(x)
    other.reset().fit([images(200, 5)], progress=False)
    with torch.no_grad():
        other.model.head.bias += 1
    assert torch.equal(ready(x).score, before.score)


def test_a_verdict_in_inference_mode_is_the_same(ready):
    x = images(9, 2)
    with torch.inference_mode():
        detection = ready(x)
    assert not detection.score.is_inference()
    assert torch.equal(detection.score, ready(x).score)


def test_a_guard_goes_to_a_device(ready):
    assert ready.to("cpu") is ready
    assert ready.members["gram"].to(torch.device("cpu")) is ready.members["gram"]


# --- shared members ----------------------------------------------------------------------------------


def test_guards_that_share_a_member(net, ready):
    """One fit serves both; each has a calibration of its own."""
    gram, msp = ready.members["gram"], MSP(net)
    other, x = Guard.of({"gram": gram, "msp": msp}), images(9, 2)
    with pytest.raises(NotFittedError, match="not calibrated"):
        other(x)
    other.calibrate([images(200, 1)], progress=False)
    gram.calibrate([images(200, 1)], progress=False)
    before, alone = other(x), gram(x)
    ready.calibrate([images(100, 3)], progress=False)
    assert torch.equal(other(x).score, before.score)
    assert torch.equal(gram(x).score, alone.score)
    counts = gram.class_counts_
    fit_together({"one": ready, "two": other}, [images(64, 4)], progress=False)
    assert int(gram.class_counts_.sum()) == int(counts.sum()) + 64  # not twice
    for detector in (ready, other, gram):
        with pytest.raises(NotFittedError, match="not calibrated"):
            detector(x)
    other.reset()
    for detector in (ready, other, gram):
        with pytest.raises(NotFittedError, match="not fitted"):
            detector(x)
    assert ready.members["profile"].is_fitted
    ready.reset().fit(images(300, 0).split(64), progress=False)
    ready.calibrate(images(200, 1).split(64), progress=False)
    again = Guard(net).fit(images(300, 0).split(64), progress=False)
    assert_same(ready, again.calibrate(images(200, 1).split(64), progress=False), x)
