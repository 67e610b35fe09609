"""Members that a network gives nothing to look at: a guard does without them and says so."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import gramwatch
from gramwatch import CalibrationError, GramwatchWarning, Guard, InputError, TapError
from gramwatch.detect.measurement import Measurement
from gramwatch.evaluation.evaluate import fit_together
from gramwatch.guard.guard import MEMBERS
from gramwatch.inputs import image_numbers
from gramwatch.methods import METHODS, EarlyMahalanobis, Image, Profile

CLASSES = 3


def table(n: int, seed: int) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))


def images(n: int, seed: int, pixels: int = 8) -> Tensor:
    return torch.randn(n, 2, pixels, pixels, generator=torch.Generator().manual_seed(seed))


def ready(guard: Guard, make=table) -> Guard:
    guard.fit(make(300, 0).split(64), progress=False)
    return guard.calibrate([make(100, 1)], progress=False)


def assert_same(guard: Guard, other: Guard, x: Tensor) -> None:
    found, expected = guard(x), other(x)
    assert list(found.parts) == list(expected.parts)
    torch.testing.assert_close(found.score, expected.score, rtol=1e-9, atol=1e-9)
    assert torch.equal(found.p_value, expected.p_value)


class Branching(nn.Module):
    """A network that takes another path for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(x) if len(x) % 2 else x)


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (CLASSES, -1)).sum(2)


class Stages(nn.Module):
    """Two stages and a head that favours no class; the first stage is what is given."""

    def __init__(self, first: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.second = first, nn.Conv2d(width, 5, 3, stride=2)
        self.head = nn.Linear(5, CLASSES)
        with torch.no_grad():
            self.head.bias -= self(images(200, 9)).mean(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).relu().mean((2, 3)) * 20)


TAPLESS = ("energy", "mahalanobis_pp", "knn")
"""The default members that watch no tap."""
LEFT_OUT = r"gram, profile, class_ratio are left out of the guard: {} has no tap"


@pytest.mark.filterwarnings("ignore:the scores of the same inputs differ")  # Branching decides by the batch
@pytest.mark.parametrize("model", [Summed(), nn.Linear(6, CLASSES), Branching()])
def test_energy_needs_no_tap(model, tmp_path):
    guard = ready(Guard(model, members=("energy",)))
    found = guard(table(9, 2))
    assert list(found.parts) == ["energy"]
    assert found.deviations is None
    torch.testing.assert_close(found.logits, model(table(9, 2)), rtol=0, atol=0)
    guard.save(tmp_path / "guard.safetensors")
    assert_same(gramwatch.load(tmp_path / "guard.safetensors", model), guard, table(9, 3))


def test_methods_on_features_need_no_tap_but_the_head():
    model = nn.Linear(6, CLASSES)
    knn = METHODS["knn"](model).fit([table(80, 0)], progress=False)
    knn.calibrate([table(50, 1)], progress=False)
    assert knn(table(20, 2)).is_ood.double().mean() < 0.5
    torch.testing.assert_close(knn.observe(table(4, 2)).features, table(4, 2), rtol=0, atol=0)


def test_logistic_regression_is_guarded_by_its_logits_and_its_input(tmp_path):
    model = nn.Linear(6, CLASSES)
    with pytest.warns(GramwatchWarning, match=LEFT_OUT.format("Linear")) as said:
        guard = ready(Guard(model))
    assert len(said) == 1
    assert tuple(guard.members) == TAPLESS
    assert_same(guard, ready(Guard(model, members=TAPLESS)), table(20, 2))
    guard.save(tmp_path / "guard.safetensors")
    assert_same(gramwatch.load(tmp_path / "guard.safetensors", model), guard, table(20, 2))
    with pytest.raises(TapError, match="no member can be used, gram, class_ratio: Linear has no tap"):
        Guard(model, members=("gram", "class_ratio")).fit([table(9, 0)], progress=False)
    with pytest.raises(TapError, match="Linear has no tap"):
        gramwatch.GramDetector(model).fit([table(9, 0)], progress=False)


def test_what_is_left_out_is_the_same_in_parts_merged_resumed_and_together(tmp_path):
    model, told = nn.Linear(6, CLASSES), pytest.warns(GramwatchWarning, match=LEFT_OUT.format("Linear"))
    first, second = table(300, 0).split(150)
    with told:
        whole = ready(Guard(model))

    with pytest.warns(GramwatchWarning, match="left out of the guard"):
        parts = Guard(model).fit([first], progress=False)
    parts.fit([second], progress=False).calibrate([table(100, 1)], progress=False)
    assert_same(parts, whole, table(20, 2))

    with pytest.warns(GramwatchWarning, match="left out of the guard"):
        merged, other = (Guard(model).fit([each], progress=False) for each in (first, second))
    merged.merge(other).calibrate([table(100, 1)], progress=False)
    assert_same(merged, whole, table(20, 2))

    def broken():
        yield first
        raise KeyError("interrupted")

    checkpoint = tmp_path / "checkpoint.safetensors"
    with pytest.warns(GramwatchWarning, match="left out of the guard"), pytest.raises(KeyError):
        Guard(model).fit(broken(), checkpoint=checkpoint, progress=False)
    resumed = Guard(model).fit([first, second], checkpoint=checkpoint, progress=False)
    assert_same(resumed.calibrate([table(100, 1)], progress=False), whole, table(20, 2))

    beside = Guard(model)
    with pytest.warns(GramwatchWarning, match="left out of the guard"):
        fit_together({"Guard": beside, "MSP": METHODS["msp"](model)}, [first, second], progress=False)
    assert_same(beside.calibrate([table(100, 1)], progress=False), whole, table(20, 2))


def test_after_a_reset_all_members_are_tried_again_and_what_is_left_out_is_said_again(tmp_path):
    model = nn.Linear(6, CLASSES)
    guard = Guard(model)
    for _ in range(2):
        assert list(guard.members) == list(MEMBERS)
        with pytest.warns(GramwatchWarning, match=LEFT_OUT.format("Linear")) as said:
            ready(guard)
        assert len(said) == 1
        # Said once: a further warning would be an error.
        guard.fit([table(9, 3)], progress=False).calibrate([table(100, 1)], progress=False)
        guard(table(5, 2))
        assert tuple(guard.members) == TAPLESS
        assert repr(guard).startswith(f"Guard(Linear: {' + '.join(TAPLESS)}, threshold")
        guard.reset()
    assert "not calibrated" in repr(guard)

    with pytest.warns(GramwatchWarning, match="left out"):
        ready(guard).save(tmp_path / "guard.safetensors")
    loaded = gramwatch.load(tmp_path / "guard.safetensors", model)
    assert tuple(loaded.members) == TAPLESS
    loaded.fit([table(9, 3)], progress=False)  # nothing is left out anew: a warning would be an error
    for copied in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        assert_same(copied, guard, table(20, 2))
        copied.reset()
        assert len(copied.members) == len(MEMBERS)
    assert tuple(guard.members) == TAPLESS


def test_a_guard_whose_first_look_fails_leaves_nobody_out():
    guard = Guard(nn.Linear(6, CLASSES))
    with pytest.raises(InputError, match="could not be run"):
        guard.fit([torch.randn(4, 5)], progress=False)
    assert len(guard.members) == len(MEMBERS)
    with pytest.warns(GramwatchWarning, match="left out of the guard"):
        ready(guard)


def test_a_first_stage_of_one_channel(tmp_path):
    first = nn.Sequential(nn.Conv2d(2, 1, 3), nn.Sigmoid())
    model = Stages(first, 1)
    members = ("gram", "early_mahalanobis", "class_ratio", "energy")
    with pytest.warns(GramwatchWarning, match=r"leaves out 1 stage\(s\) of Stages.*first\.1") as said:
        guard = ready(Guard(model, members=members), images)
    assert len(said) == 1
    assert tuple(guard(images(5, 2)).parts) == members
    assert guard.members["early_mahalanobis"].widths_.tolist() == [5]  # the one stage that is left
    guard.save(tmp_path / "guard.safetensors")
    assert_same(gramwatch.load(tmp_path / "guard.safetensors", model), guard, images(20, 3))


class Constant(nn.Module):
    """A stage that shows the same of every input, beside what it passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.hardtanh(1e9 * (self.conv(x).square() + 1)) * x[:, :1, 1:-1, 1:-1]


def test_a_stage_that_never_changes_says_nothing(tmp_path):
    model = Stages(Constant(), 4)
    taps = ["first.hardtanh", "second"]
    members = {
        "early": EarlyMahalanobis(model, taps=taps),
        "energy": METHODS["energy"](model),
    }
    guard = Guard.of(members)
    with pytest.warns(GramwatchWarning, match="early_mahalanobis: the training examples do not differ"):
        guard.fit(images(300, 0).split(64), progress=False)
    with pytest.warns(GramwatchWarning, match="early says the same of all calibration examples"):
        guard.calibrate([images(100, 1)], progress=False)
    x = images(20, 2)
    assert torch.equal(guard(x).parts["early"], torch.ones(20, dtype=torch.float64))
    energy = ready(Guard(model, members=("energy",)), images)
    assert torch.equal(guard(x).is_ood, energy(x).is_ood)
    guard.save(tmp_path / "guard.safetensors")
    assert_same(gramwatch.load(tmp_path / "guard.safetensors", model), guard, x)
    with pytest.raises(InputError, match="do not differ from their class means"):
        EarlyMahalanobis(model, taps=taps).fit([images(20, 0)], progress=False)


def test_data_that_first_differs_in_a_later_part():
    model = Stages(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()), 4)
    same = images(1, 0).expand(40, -1, -1, -1)
    guard, whole = Guard(model, members=("early_mahalanobis", "energy")), None
    with pytest.warns(GramwatchWarning, match="do not differ"):
        guard.fit([same], progress=False)
    guard.fit([images(300, 0)], progress=False).calibrate([images(100, 1)], progress=False)
    whole = Guard(model, members=("early_mahalanobis", "energy"))
    whole.fit([same, images(300, 0)], progress=False).calibrate([images(100, 1)], progress=False)
    assert_same(guard, whole, images(20, 2))


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_a_gram_whose_taps_never_change(storage, tmp_path):
    model = Stages(Constant(), 4)
    guard = Guard(model, taps=["first.hardtanh"], members=("gram", "energy"), storage=storage)
    guard.fit(images(300, 0).split(64), progress=False)
    silent = pytest.warns(GramwatchWarning, match="1 of 1 taps never deviate")
    with silent, pytest.warns(GramwatchWarning, match="gram says the same of all calibration examples"):
        guard.calibrate([images(100, 1)], progress=False)
    energy = ready(Guard(model, members=("energy",)), images)
    assert torch.equal(guard(images(20, 2)).is_ood, energy(images(20, 2)).is_ood)
    guard.save(tmp_path / "guard.safetensors")
    assert_same(gramwatch.load(tmp_path / "guard.safetensors", model), guard, images(20, 3))


@pytest.mark.filterwarnings("ignore:.*classes were predicted for fewer than")
def test_training_examples_still_cannot_calibrate_a_gram_that_varies():
    model = Stages(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()), 4)
    guard = Guard(model).fit([images(300, 0)], progress=False)
    with pytest.raises(CalibrationError, match="look like training examples"):
        guard.calibrate([images(300, 0)], progress=False)


def the_same_of_all(member, seen):
    values = seen.logits.new_full((len(seen), 6), 0.1)
    return Measurement(values, seen.logits, torch.ones(len(seen), dtype=torch.bool))


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if not kind.record.gradients])
def test_any_member_that_says_the_same_of_all_is_left_out(name, monkeypatch):
    model = Stages(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()), 4)
    if METHODS[name](model).alone:
        pytest.skip(f"{name} takes passes of its own, and cannot be a member")
    other = "energy" if name != "energy" else "msp"
    monkeypatch.setattr(METHODS[name], "score", lambda self, seen: seen.logits.new_full((len(seen),), 0.1))
    if METHODS[name] is Image:
        of_two_channels = len(image_numbers.numbers(2))
        monkeypatch.setattr(
            image_numbers, "look", lambda images: images.new_full((len(images), of_two_channels), 0.1)
        )
    if METHODS[name] is Profile:
        monkeypatch.setattr(Profile, "measured", the_same_of_all)
    guard = Guard(model, members=(name, other), rehearse=False).fit(images(300, 0).split(64), progress=False)
    with pytest.warns(GramwatchWarning, match=f"{name} says the same of all calibration examples"):
        guard.calibrate([images(100, 1)], progress=False)
    alone = ready(Guard(model, members=(other,)), images)
    assert torch.equal(guard(images(20, 2)).is_ood, alone(images(20, 2)).is_ood)
