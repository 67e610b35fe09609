"""One contract, which every detector keeps: Gram, every method, guards, and methods of a user's own.

A new method of `gramwatch.methods` takes part by its line in the registry.
"""

import copy
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import gramwatch
from examples.own_method import LogitGap
from gramwatch import Detector, GramDetector, GramwatchWarning, Guard, InputError, NotFittedError
from gramwatch.files.artifact import FINITE, Field
from gramwatch.methods import METHODS, MSP, TRAINED, Method, Record, register
from gramwatch.methods.gram import BOUNDS
from gramwatch.numerics import kernels
from gramwatch.numerics.statistics import STATISTICS
from gramwatch.observe.observation import Observation
from gramwatch_lab.training import Semantic

CLASSES = 3
del METHODS[LogitGap.name]  # other tests see the library's own methods only


class OwnNorm(Method):
    """A user's own method that keeps examples: how far the length of the logits is from its mean."""

    name = "own_norm"
    record = Record("own norm", "none", "|  ||z|| - mean ||z||  |", fitted=True)
    settings = ("power",)
    kept: ClassVar = {"usual_": Field((), torch.float64, FINITE)}

    def __init__(self, model: nn.Module, *, power: float = 2.0, **options) -> None:
        super().__init__(model, **options)
        self.power = power
        self.usual_: Tensor | None = None

    def _fit(self, training: Observation) -> None:
        self.usual_ = training.logits.double().norm(self.power, dim=1).mean()

    def score(self, observation: Observation) -> Tensor:
        assert self.usual_ is not None
        norms = observation.logits.double().norm(self.power, dim=1)
        return (norms - self.usual_.to(norms.device)).abs()


def plain_network() -> nn.Module:
    """A small network with all that detectors look at; its predictions are spread over the classes."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, stride=2),
        nn.Softplus(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(20, CLASSES),
    )
    return centred(network.eval(), network[-1])


def semantic_network() -> nn.Module:
    """The same with a head that predicts vectors."""
    network = plain_network()
    network[-1].register_parameter("bias", nn.Parameter(torch.zeros(CLASSES)))
    Semantic(count=2, size=4).prepare(network)
    return centred(network.eval(), network[-1].predict)


@torch.no_grad()
def centred(network: nn.Module, head: nn.Linear) -> nn.Module:
    """Scale the last linear layer, so that what it makes varies from input to input about zero."""
    batches: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, given, output: batches.append(output))
    network(images(200, 9))
    head.weight /= batches[0].std(0).unsqueeze(1)
    head.bias.zero_()
    network(images(200, 9))
    head.bias -= batches[1].mean(0)
    hook.remove()
    return network


def images(count: int, seed: int) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A detector to be tested."""

    make: Callable[[nn.Module], Detector]
    network: Callable[[], nn.Module] = plain_network
    validation: int = 120


def method(kind: type[Method], **settings) -> Case:
    network = semantic_network if kind.name == "semantic" else plain_network
    return Case(lambda net: kind(net, **settings), network)


def gram(**settings) -> Case:
    return Case(lambda net: GramDetector(net, **{"orders": (1, 2, 3), **settings}))


def guard(validation: int = 120, **settings) -> Case:
    return Case(lambda net: Guard(net, orders=(1, 2, 3), **settings), validation=validation)


FEW = {name: {"k": 5} for name in ("knn", "nnguide")}
"""Neighbours, of few training examples."""
CASES: dict[str, Case] = {
    **{f"gram {statistic}": gram(statistic=statistic) for statistic in ("auto", *STATISTICS)},
    **{f"gram {bounds}": gram(bounds=bounds) for bounds in BOUNDS if bounds != "min_max"},
    "gram float16": gram(storage="float16"),
    **{name: method(kind, **FEW.get(name, {})) for name, kind in (METHODS | TRAINED).items()},
    "own, keeps examples": method(OwnNorm, power=1.0),
    "own, running": method(LogitGap),
    "guard": guard(),
    "guard per class": guard(700, per_class=True),
    "guard of two": guard(members=("gram", "msp")),
    "guard with examples": guard(members=("gram", "knn", "own_norm")),
    "guard, own": guard(members=("early_mahalanobis", "logit_gap")),
}
USE_LABELS = {"mahalanobis", "mahalanobis_pp", "relative_mahalanobis", "relative_mahalanobis_pp"}
"""Classes are the labels, where the loader has them; all others ignore labels."""

TRAINING, TEST = images(320, 0), torch.cat([images(12, 2), 3 * images(12, 3)])
BATCHES = TRAINING.split(80)
NAN, INFINITE = images(1, 4), images(1, 5)
NAN[0, 0, 2, 2], INFINITE[0, 0, 3, 3] = torch.nan, torch.inf


@pytest.fixture(params=list(CASES))
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """The user's own methods are known while a test of this file runs."""
    register(OwnNorm)
    register(LogitGap)
    yield
    for kind in (OwnNorm, LogitGap):
        METHODS.pop(kind.name, None)


@cache
def network_of(case: Case) -> nn.Module:
    return case.network()


def new(case: Case) -> Detector:
    return case.make(network_of(case))


def fit(case: Case, loader=BATCHES) -> Detector:
    return new(case).fit(loader, progress=False)


def calibrate(detector: Detector, case: Case, kind: torch.dtype = torch.float32) -> Detector:
    return detector.calibrate(images(case.validation, 1).to(kind).split(128), progress=False)


@cache
def ready(case: Case) -> Detector:
    """A detector that was fitted and calibrated, for tests that do not change it."""
    return calibrate(fit(case), case)


def runs(detector: Detector) -> bool:
    """Whether everything that is learnt is a running state."""
    return all(getattr(leaf, "running", True) or not leaf.learns for leaf in detector.leaves)


def keeping(detector: Detector) -> str:
    """The name of one that keeps examples."""
    return next(leaf.name for leaf in detector.leaves if leaf.learns and not getattr(leaf, "running", True))


def tensors_of(detection: gramwatch.Detection) -> dict[str, Tensor]:
    parts = {f"parts {name}": part for name, part in (detection.parts or {}).items()}
    return {name: value for name, value in (vars(detection) | parts).items() if isinstance(value, Tensor)}


def assert_same(one: Detector, other: Detector, inputs: Tensor = TEST) -> None:
    """The same verdicts, bit for bit."""
    actual, expected = tensors_of(one(inputs)), tensors_of(other(inputs))
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


def assert_learnt_the_same(one: Detector, other: Detector) -> None:
    """The same measurements but for rounding: what running sums make of another order of additions."""
    actual, expected = one.measure(TEST), other.measure(TEST)
    torch.testing.assert_close(actual.values.double(), expected.values.double(), rtol=1e-5, atol=1e-7)
    assert torch.equal(actual.finite, expected.finite)


def interrupted(batches) -> Iterator[Tensor]:
    yield from batches
    raise KeyboardInterrupt


# --- what it is ----------------------------------------------------------------------------------------


def test_it_is_a_detector_and_says_what_it_is(case):
    detector = new(case)
    assert isinstance(detector, Detector)
    assert detector.name
    assert detector.title
    assert detector.level == 0.95
    assert ("not fitted" in repr(detector)) == (not detector.is_fitted) or isinstance(detector, Guard)
    assert "Sequential" in repr(detector)
    assert "not calibrated" in repr(fit(case))
    state = "per class" if detector.per_class else f"threshold {ready(case).threshold_:.4g}"
    assert state in repr(ready(case))


def test_what_was_left_out_is_named_with_the_remedy(case, tmp_path):
    detector = new(case)
    assert detector.is_fitted == (not detector.learns)
    if detector.learns:
        fitted = fit(case)
        for ask in (
            lambda: detector(TEST),
            lambda: detector.measure(TEST),
            lambda: detector.calibrate([TEST], progress=False),
            lambda: detector.save(tmp_path / "saved"),
            lambda: detector.merge(fitted),
            lambda: detector.threshold_,
        ):
            with pytest.raises((NotFittedError, ValueError), match=r"fit\(train_loader\)|cannot be merged"):
                ask()
        assert not (tmp_path / "saved").exists()
    detector.fit(BATCHES, progress=False)
    assert detector.is_fitted
    for ask in (lambda: detector(TEST), lambda: detector.threshold_, lambda: detector.calibration_scores_):
        with pytest.raises(NotFittedError, match=r"calibrate\(validation_loader\)"):
            ask()


def test_what_it_finds_can_be_shown_and_written(case):
    detection = ready(case)(TEST)
    assert len(detection) == len(TEST)
    plain = json.loads(json.dumps(detection.to_dict()))
    assert plain["is_ood"] == detection.is_ood.tolist()
    assert plain.keys() >= {"predicted", "score", "p_value"}
    assert repr(detection).startswith("Detection: ")
    one = detection[3]
    assert torch.equal(one.score, detection.score[3:4])
    assert torch.equal(detection.is_ood, detection.p_value <= 0.05 + 1e-12)
    assert detection.score.dtype == detection.p_value.dtype == torch.float64
    assert set(detection.parts or {}) == set(getattr(ready(case), "members", {}))


def test_what_it_finds_are_ordinary_tensors(case):
    weight = torch.ones((), requires_grad=True)
    for name, value in tensors_of(ready(case)(TEST)).items():
        assert not value.is_inference(), name
        assert not value.requires_grad, name
        value.copy_(value.clone())  # in place, and as part of a graph
        (value.double() * weight).nan_to_num(0, 0, 0).sum().backward()
    assert weight.grad is not None


# --- inputs --------------------------------------------------------------------------------------------


def test_inputs_that_are_not_finite_are_flagged_with_one_warning(case):
    detector = ready(case)
    with pytest.warns(GramwatchWarning) as said:
        detection = detector(torch.cat([TEST, NAN, INFINITE]))
    assert [str(warning.message) for warning in said] == [
        "2 input(s) with NaN or infinity: their score is infinite"
    ]
    assert detection.score[-2:].tolist() == [torch.inf, torch.inf]
    assert detection.is_ood[-2:].all()
    assert detection.score[:-2].isfinite().all()
    assert torch.equal(detection.is_ood[:-2], detector(TEST).is_ood)
    for part in (detection.parts or {}).values():
        assert (part[-2:] <= 0.05).all()


def test_training_examples_that_are_not_finite_are_left_out(case):
    detector = new(case)
    broken = [torch.cat([BATCHES[0], NAN]), *BATCHES[1:-1], torch.cat([INFINITE, BATCHES[-1]])]
    if detector.learns:
        with pytest.warns(GramwatchWarning) as said:
            detector.fit(broken, progress=False)
        (message,) = (str(warning.message) for warning in said)
        assert message.startswith("2 training example(s) with NaN or infinity were left out")
    else:
        detector.fit(broken, progress=False)
    assert_learnt_the_same(detector, ready(case))


def test_a_fit_to_nothing_finite_is_refused(case):
    detector = new(case)
    if not detector.learns:
        return
    with (
        pytest.warns(GramwatchWarning, match=r"2 training example\(s\) with NaN or infinity were left out"),
        pytest.raises(gramwatch.InputError, match="there is nothing to fit"),
    ):
        detector.fit([NAN, INFINITE], progress=False)
    assert not detector.is_fitted


def test_calibration_examples_that_are_not_finite_are_left_out(case):
    detector = fit(case)
    validation = images(case.validation, 1)
    with pytest.warns(GramwatchWarning) as said:
        detector.calibrate([validation[:100], torch.cat([validation[100:], NAN, INFINITE])], progress=False)
    (message,) = (str(warning.message) for warning in said)
    assert message.startswith("2 calibration example(s) with NaN or infinity were left out. ")
    actual, expected = detector.calibration_scores_, ready(case).calibration_scores_
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_network_is_left_as_it_was(case):
    network = copy.deepcopy(network_of(case)).train()
    network[0].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    grads = [parameter.requires_grad for parameter in network.parameters()]
    modes = [part.training for part in network.modules()]
    detector = case.make(network).fit(BATCHES, progress=False)
    result = calibrate(detector, case)(TEST)
    assert {name: value.tolist() for name, value in network.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }
    assert [part.training for part in network.modules()] == modes
    assert [parameter.requires_grad for parameter in network.parameters()] == grads
    assert all(parameter.grad is None for parameter in network.parameters())
    for part in network.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert not part._backward_hooks
    assert torch.equal(result.score, ready(case)(TEST).score)  # it was judged in evaluation mode


def test_labels_are_ignored_or_used_as_documented(case, request):
    name = request.node.callspec.params["case"]
    labels = torch.arange(len(TRAINING)) % CLASSES
    labelled = fit(case, list(zip(BATCHES, labels.split(80), strict=True)))
    same = torch.equal(labelled.measure(TEST).values, ready(case).measure(TEST).values)
    assert same == (name not in USE_LABELS)
    if not same:
        assert "labels" in " ".join(type(labelled).__doc__.split())
        predicted = network_of(case)(TRAINING).argmax(1)
        own = fit(case, list(zip(BATCHES, predicted.split(80), strict=True)))
        assert_learnt_the_same(own, ready(case))


def test_batches_of_any_size_get_the_same_scores(case):
    detector = ready(case)
    whole = detector(TEST)
    for sizes in ([1, 7, 16], [1] * len(TEST)):
        apart = [detector(part) for part in TEST.split(sizes)]
        result = torch.cat([difference.score for difference in apart])
        # ASH takes the exponential of sums of float32 features.
        torch.testing.assert_close(result, whole.score, rtol=1e-4, atol=1e-5)


# --- fit -----------------------------------------------------------------------------------------------


def test_a_fit_in_parts_is_a_fit_at_once(case):
    detector = new(case).fit(BATCHES[:2], progress=False)
    if not runs(detector):
        with pytest.raises(ValueError, match=f"'{keeping(detector)}' is fitted already and cannot add to it"):
            detector.fit(BATCHES[2:], progress=False)
        return
    calibrate(detector, case)
    detector.fit(BATCHES[2:], progress=False)
    assert_learnt_the_same(detector, ready(case))
    if detector.learns:
        with pytest.raises(NotFittedError, match="calibrate"):
            detector(TEST)


def test_merged_shards_are_a_fit_at_once(case):
    one, other = (new(case).fit(part, progress=False) for part in (BATCHES[:2], BATCHES[2:]))
    with pytest.raises(ValueError, match="itself"):
        one.merge(one)
    if not runs(one):
        before = one.measure(TEST).values
        with pytest.raises(ValueError, match=f"{keeping(one)} cannot be merged"):
            one.merge(other)
        assert torch.equal(one.measure(TEST).values, before)
        return
    calibrate(one, case)
    before = other.measure(TEST).values
    assert one.merge(other) is one
    assert_learnt_the_same(one, ready(case))
    assert torch.equal(other.measure(TEST).values, before)
    with pytest.raises(NotFittedError, match="calibrate"):
        one(TEST)


def test_others_cannot_be_merged(case):
    detector = fit(case)
    stranger = MSP(network_of(case), level=0.9) if detector.name != "msp" else GramDetector(network_of(case))
    with pytest.raises(ValueError, match="different methods"):
        detector.merge(stranger)
    other_level = copy.deepcopy(detector)
    other_level.level = 0.9
    with pytest.raises(ValueError, match=r"level: 0\.95 and 0\.9"):
        detector.merge(other_level)
    elsewhere = copy.deepcopy(detector)
    with torch.no_grad():
        elsewhere.model[-1 if not hasattr(elsewhere.model[-1], "predict") else 0].weight.add_(1)
    with pytest.raises(ValueError, match="different weights"):
        detector.merge(elsewhere)


def test_an_interrupted_fit_is_resumed_from_its_checkpoint(case, tmp_path):
    checkpoint = tmp_path / "fit.safetensors"
    detector = new(case)
    if not runs(detector):
        with pytest.raises(ValueError, match=f"'{keeping(detector)}' keeps examples, which a checkpoint"):
            detector.fit(BATCHES, checkpoint=checkpoint, progress=False)
        return
    if detector.learns:
        with pytest.raises(KeyboardInterrupt):
            detector.fit(interrupted(BATCHES[:2]), checkpoint=checkpoint, progress=False)
        assert checkpoint.is_file()
    resumed = new(case).fit(BATCHES, checkpoint=checkpoint, progress=False)
    assert_learnt_the_same(resumed, ready(case))
    resumed.save(tmp_path / "saved.safetensors")
    assert not checkpoint.exists()


def test_an_interrupted_fit_is_carried_on(case):
    detector = new(case)
    if not detector.learns:
        return
    with pytest.raises(KeyboardInterrupt):
        detector.fit(interrupted(BATCHES[:2]), progress=False)
    with pytest.warns(GramwatchWarning, match=r"interrupted after 2 batch\(es\), which are kept"):
        detector.fit(BATCHES[2:], progress=False)
    assert_learnt_the_same(detector, ready(case))


def test_after_a_reset_it_is_as_new(case):
    detector = calibrate(new(case).fit([images(240, 7)], progress=False), case)
    assert detector.reset() is detector
    assert detector.is_fitted == (not detector.learns)
    with pytest.raises(NotFittedError):
        detector(TEST)
    assert_same(calibrate(detector.fit(BATCHES, progress=False), case), ready(case))


# --- save, load, copy ----------------------------------------------------------------------------------


def test_a_file_gives_the_same_verdicts_and_the_same_file(case, tmp_path):
    detector = copy.deepcopy(ready(case))
    detector.metadata = {"classes": ["a", "b", "c"], "mean": [0.5]}
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    detector.save(first)
    loaded = gramwatch.load(first, network_of(case))
    assert type(loaded) is type(detector)
    assert loaded.metadata == detector.metadata
    assert loaded.settings_as_json() == detector.settings_as_json()
    assert_same(loaded, ready(case))
    loaded.save(second)
    assert first.read_bytes() == second.read_bytes()
    assert repr(loaded) == repr(detector)


def test_a_file_that_was_not_calibrated_is_taken_up(case, tmp_path):
    fit(case).save(tmp_path / "fitted.safetensors")
    loaded = gramwatch.load(tmp_path / "fitted.safetensors", network_of(case))
    with pytest.raises(NotFittedError, match=r"calibrate\(validation_loader\)"):
        loaded(TEST)
    assert_same(calibrate(loaded, case), ready(case))


def test_what_was_loaded_can_be_fitted_further(case, tmp_path):
    detector = new(case).fit(BATCHES[:2], progress=False)
    if not runs(detector):
        return
    detector.save(tmp_path / "part.safetensors")
    loaded = gramwatch.load(tmp_path / "part.safetensors", network_of(case))
    assert_learnt_the_same(loaded.fit(BATCHES[2:], progress=False), ready(case))


def test_a_copy_is_a_detector_of_its_own(case):
    twin = copy.deepcopy(ready(case))
    assert twin.model is not network_of(case)
    assert_same(twin, ready(case))
    twin.reset()
    assert ready(case).is_fitted
    assert len(ready(case)(TEST)) == len(TEST)


# --- where it runs -------------------------------------------------------------------------------------


def test_two_threads_may_ask_at_once(case, tmp_path):
    ready(case).save(tmp_path / "saved.safetensors")
    detector = gramwatch.load(tmp_path / "saved.safetensors", network_of(case))  # has not judged yet
    parts, result, start = TEST.split(12), {}, threading.Barrier(2)

    def judge(number: int) -> None:
        start.wait()
        result[number] = [detector(parts[number]) for _ in range(3)]

    threads = [threading.Thread(target=judge, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, part in enumerate(parts):
        expected = tensors_of(ready(case)(part))
        for detection in result[number]:
            for name, value in tensors_of(detection).items():
                assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16], ids=str)
def test_networks_of_other_precision_are_judged(case, kind, monkeypatch):
    monkeypatch.setattr(kernels, "_say_float64", lambda: None)  # that it is slow is tested elsewhere
    network = copy.deepcopy(network_of(case)).to(kind)
    detector = case.make(network).fit([batch.to(kind) for batch in BATCHES], progress=False)
    detector.calibrate([images(case.validation, 1).to(kind)], progress=False)
    detection = detector(TEST.to(kind))
    assert detection.score.isfinite().all()
    if kind == torch.float64:
        torch.testing.assert_close(detection.score, ready(case)(TEST).score, rtol=1e-3, atol=1e-4)
    assert next(network.parameters()).dtype == kind


def test_an_input_of_another_precision_than_the_network_is_refused_in_words(case):
    words = r"inputs of float16 were given, the parameters of \w+ are float32 .*images.to\(torch.float32\)"
    before = tensors_of(ready(case)(TEST))
    with pytest.raises(InputError, match=words):
        ready(case)(TEST.half())
    after = tensors_of(ready(case)(TEST))
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    with pytest.raises(InputError, match=words):  # some have nothing to fit, and look when they calibrate
        calibrate(new(case).fit([batch.half() for batch in BATCHES], progress=False), case, torch.float16)


@pytest.mark.cuda
def test_it_moves_to_a_gpu_and_back(case):
    detector = copy.deepcopy(ready(case)).to("cuda")
    detection = detector(TEST.cuda())
    assert detection.score.is_cuda
    torch.testing.assert_close(detection.score.cpu(), ready(case)(TEST).score, rtol=1e-3, atol=1e-4)
    there = case.make(copy.deepcopy(network_of(case)).cuda())
    calibrate(there.fit(BATCHES, progress=False), case)
    torch.testing.assert_close(there(TEST).score.cpu(), ready(case)(TEST).score, rtol=1e-3, atol=1e-4)
    assert_same(detector.to("cpu"), ready(case))


def test_it_is_evaluated_alone_and_beside_others(case):
    detector = ready(case)
    before = detector(TEST)
    inside, outside = [images(60, 5)], {"wide": [3 * images(40, 6)]}
    options = {"draws": 2, "validation_share": 0.5, "progress": False}
    alone = gramwatch.evaluate(detector, inside, outside, **options)
    assert alone.methods[0] == detector.title
    others = {"it": detector, "MSP": MSP(detector.network), "Gram": ready(CASES["gram auto"])}
    if detector.model is not others["Gram"].model:
        del others["Gram"]
    beside = gramwatch.evaluate(others, inside, outside, **options)
    assert beside.methods == list(others)
    assert beside.rows[0].mean == alone.rows[0].mean
    assert torch.equal(detector(TEST).score, before.score)


# --- a user's own methods ------------------------------------------------------------------------------


def test_a_file_of_an_unknown_method_says_what_to_do(tmp_path):
    path = tmp_path / "own.safetensors"
    for name in ("own, running", "guard, own"):
        ready(CASES[name]).save(path)
        METHODS.pop("logit_gap")
        with pytest.raises(gramwatch.ArtifactError, match=r"'logit_gap'.*methods\.register") as raised:
            gramwatch.load(path, plain_network())
        assert str(path) in str(raised.value)
        register(LogitGap)
    with pytest.raises(ValueError, match="there is no member 'own_gap'"):
        Guard(plain_network(), members=["own_gap"])


def test_a_file_of_a_method_of_the_lab_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "trained.safetensors"
    ready(CASES["semantic"]).save(path)
    monkeypatch.setattr("gramwatch.guard.guard.TRAINED", {})
    with pytest.raises(gramwatch.ArtifactError, match=r"'semantic', .*pip install gramwatch-lab"):
        gramwatch.load(path, semantic_network())


def test_what_cannot_be_registered_is_refused_in_words():
    with pytest.raises(TypeError, match="no subclass"):
        register(nn.Linear)
    with pytest.raises(TypeError, match="Nameless needs a class attribute 'name'"):
        register(type("Nameless", (OwnNorm,), {"name": None}))
    with pytest.raises(TypeError, match="Bare needs a class attribute 'record'"):
        register(type("Bare", (OwnNorm,), {"record": None}))
    for name in ("gram", "guard", "two words", "a.b", ""):
        with pytest.raises(ValueError, match="cannot be called"):
            register(type("Own", (OwnNorm,), {"name": name}))
    with pytest.raises(ValueError, match="'msp' is the name of MSP"):
        register(type("Own", (OwnNorm,), {"name": "msp"}))
    assert METHODS["msp"] is MSP
    again = type("OwnNorm", (OwnNorm,), {})
    assert register(again) is METHODS["own_norm"] is again


def test_a_score_that_needs_a_trained_network_is_registered_apart():
    trained = type("Own", (OwnNorm,), {"name": "own_trained", "record": TRAINED["semantic"].record})
    try:
        register(trained)
        assert TRAINED["own_trained"] is trained
        assert "own_trained" not in METHODS
    finally:
        TRAINED.pop("own_trained", None)


def test_every_registered_method_takes_part():
    assert set(METHODS | TRAINED) - {"own_norm", "logit_gap"} <= set(CASES)
    pages = Path(__file__).parents[1] / "docs" / "methods"
    for name in set(METHODS | TRAINED) - {"own_norm", "logit_gap"}:
        assert (pages / f"{name}.md").is_file()
