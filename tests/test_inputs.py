"""What users feed a detector with and what networks return: understood, adapted, or named in an error."""

import copy
import json
import pickle
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gramwatch
from gramwatch import GramDetector, GramwatchWarning, Guard, InputError, find_taps
from gramwatch.methods import KNN, Energy

CLASSES = 3


class Plain(nn.Module):
    """A small classifier; what it takes and returns is up to its subclasses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(1, 6, 3)
        self.hidden = nn.Linear(6, 5)
        self.head = nn.Linear(5, CLASSES)
        with torch.no_grad():
            self.head.weight *= 20
            self.head.bias -= self.head(self.features(images(500, 9))).mean(0)  # all classes are predicted
        self.eval()

    def features(self, x):
        return torch.tanh(self.hidden(F.relu(self.conv(x)).mean((2, 3))))

    def forward(self, x):
        return self.head(self.features(x))


def images(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def quietly(function, *args, **kwargs):
    """Few training examples of some classes are not what these tests are about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*were predicted for fewer than", GramwatchWarning)
        return function(*args, **kwargs)


def guarded(net: nn.Module, fit, calibrate, **options) -> Guard:
    guard = Guard(net, orders=(1, 2), **options)
    quietly(guard.fit, fit, progress=False)
    return guard.calibrate(calibrate, progress=False)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Scores of five images by a guard that was fed plain tensors."""
    return guarded(Plain(), images(200, 0).split(50), [images(100, 1)])(images(5, 2)).score


# --- inputs ------------------------------------------------------------------------------------------

LABELS = torch.zeros(50).long()
FEEDS = {
    "tensors": lambda x: x,
    "tuples": lambda x: (x, LABELS[: len(x)]),
    "lists": lambda x: [x, LABELS[: len(x)], ["path"] * len(x)],
    "argument names": lambda x: {"x": x, "labels": LABELS[: len(x)]},
    "image and label": lambda x: {"image": x, "label": LABELS[: len(x)]},
    "pixel_values": lambda x: UserDict(pixel_values=x, labels=LABELS[: len(x)]),
    "one tensor of another name": lambda x: {"scan": x, "target": LABELS[: len(x)], "path": ["p"] * len(x)},
    "arrays": lambda x: x.numpy(),
    "arrays in float64": lambda x: x.double().numpy(),
    "arrays in mappings": lambda x: {"image": x.numpy(), "label": LABELS[: len(x)].numpy()},
}


@pytest.mark.parametrize("feed", FEEDS.values(), ids=FEEDS)
def test_batches_that_are_understood(feed, expected):
    guard = guarded(Plain(), map(feed, images(200, 0).split(50)), [feed(images(100, 1))])
    batch = feed(images(5, 2))
    found = guard(batch[0] if isinstance(batch, tuple | list) else batch)
    assert torch.equal(found.score, expected)


def test_a_tensor_an_array_or_a_data_set_in_place_of_a_loader(expected):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(images(200, 0), torch.zeros(200).long(), strict=True))

    labelled = TensorDataset(images(200, 0), torch.zeros(200).long())
    for data in (images(200, 0), images(200, 0).numpy(), labelled, Stream(), DataLoader(labelled, 64)):
        found = guarded(Plain(), data, images(100, 1))(images(5, 2))
        torch.testing.assert_close(found.score, expected, rtol=1e-6, atol=1e-6)


def test_an_inputs_adapter_gets_what_a_loader_yields_and_what_a_call_is_given(expected):
    def adapt(batch):
        pixels = np.stack(batch["pixels"])
        return torch.from_numpy(pixels)

    def batch(x):
        return {"pixels": list(x.numpy()), "label": [0] * len(x)}

    guard = guarded(
        Plain(), [batch(x) for x in images(200, 0).split(50)], [batch(images(100, 1))], inputs=adapt
    )
    assert torch.equal(guard(batch(images(5, 2))).score, expected)
    keyed = guarded(
        Plain(), [{"a": x, "b": x} for x in images(200, 0).split(50)], [{"a": images(100, 1)}], inputs="a"
    )
    assert torch.equal(keyed({"a": images(5, 2), "b": None}).score, expected)
    with pytest.raises(InputError, match="inputs='a' names a key of a batch, which is a float32 tensor"):
        keyed(images(5, 2))


def test_two_inputs():
    class Two(Plain):
        def forward(self, x, y):
            return self.head((self.features(x) + self.features(y)) / 2)

    def pairs(x):
        return x, x.flip(0)

    fit, calibrate = [pairs(x) for x in images(200, 0).split(50)], [pairs(images(100, 1))]
    tuples = guarded(Two(), [(pair, LABELS) for pair in fit], [(calibrate[0], LABELS)])
    found = tuples(pairs(images(5, 2)))
    names = guarded(
        Two(),
        [dict(zip("xy", pair, strict=True)) for pair in fit],
        [dict(zip("xy", calibrate[0], strict=True))],
    )
    assert torch.equal(names({"x": images(5, 2), "y": images(5, 2).flip(0)}).score, found.score)
    adapted = guarded(Two(), fit, calibrate, inputs=lambda batch: tuple(batch))
    assert torch.equal(adapted(pairs(images(5, 2))).score, found.score)
    with pytest.raises(
        InputError, match=r"Two could not be run .*TypeError.*\(\(a, b\), labels\) for two inputs"
    ):
        Guard(Two()).fit(fit, progress=False)


class Picture:
    """As PIL's images are: no tensor, no array."""


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([Picture(), Picture()], r"got a test_inputs.Picture.*inputs=FUNCTION"),
        ([[Picture()], LABELS[:1]], r"got a tuple of 1, the first a test_inputs.Picture"),
        (Picture(), r"got a test_inputs.Picture"),
        ("image.png", r"got a str"),
        (np.array([object()]), "got an? object array"),
        ({"a": images(2, 0), "b": images(2, 0)}, r"accepts none of the keys.*'a': a float32 tensor of shape"),
        (
            images(2, 0).mul(99).byte(),
            r"Plain could not be run on inputs of uint8 \(1, 6, 6\).*normalised as in",
        ),
        (images(2, 0)[:, 0], r"could not be run|the logits have shape"),
        (
            torch.zeros(2, 7, 6, 6),
            r"Plain could not be run on inputs of float32 \(7, 6, 6\) for each example",
        ),
    ],
)
def test_batches_that_are_not_understood_are_named(batch, message):
    with pytest.raises(InputError, match=message):
        Guard(Plain()).fit([batch], progress=False)


@pytest.mark.parametrize("loader", [{"image": images(4, 0)}, "folder", 3, None])
def test_what_is_no_loader_is_named(loader):
    with pytest.raises(InputError, match="a loader yields batches"):
        Guard(Plain()).fit(loader, progress=False)


def test_an_image_without_its_batch_axis(expected):
    guard = guarded(Plain(), images(200, 0), images(100, 1))
    with pytest.raises(InputError, match=r"float32 \(6, 6\) were given, the detector was fitted on"):
        guard(images(1, 0)[0])


def test_hugging_face_batches_with_labels():
    class Output:
        def __init__(self, logits, loss):
            self.logits, self.loss = logits, loss

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, CLASSES)
            self.mix = nn.Linear(8, 8)
            with torch.no_grad():
                self.head.weight *= 20

        def forward(self, input_ids, attention_mask, labels=None):
            kept = self.embed(input_ids) * attention_mask[..., None]
            logits = self.head(torch.tanh(self.mix(kept)).mean(1))
            return Output(logits, None if labels is None else F.cross_entropy(logits, labels))

    def batch(count, seed):
        ids = torch.randint(0, 20, (count, 7), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(count).long()}

    guard = guarded(Classifier().eval(), [batch(100, seed) for seed in range(3)], [batch(100, 9)])
    found = guard(batch(5, 11))
    without = {key: value for key, value in batch(5, 11).items() if key != "labels"}
    assert torch.equal(found.score, guard(without).score)


# --- outputs -----------------------------------------------------------------------------------------


class Both(Plain):
    """Returns features as wide as its logits: nothing tells which is which."""

    def forward(self, x):
        x = F.relu(self.conv(x)).mean((2, 3))
        hidden = torch.tanh(self.hidden(x))
        return hidden[:, :CLASSES], self.head(hidden)


def test_features_before_logits_are_not_taken_for_them(expected):
    class Returning(Plain):
        def forward(self, x):
            features = self.features(x)
            return features, self.head(features)

    found = guarded(Returning(), images(200, 0), images(100, 1))(images(5, 2))
    torch.testing.assert_close(found.score, expected)


@pytest.mark.parametrize("logits", [1, lambda output: output[1]], ids=["position", "function"])
def test_a_logits_adapter(logits, expected, tmp_path):
    guard = guarded(Both(), images(200, 0), images(100, 1), logits=logits)
    found = guard(images(5, 2))
    assert torch.equal(found.logits, Plain()(images(5, 2)))
    torch.testing.assert_close(found.score, expected)
    guard.save(tmp_path / "guard.safetensors")
    if callable(logits):
        with pytest.raises(
            InputError, match=r"fitted with logits=.*function.*load\(path, model, logits=\.\.\.\)"
        ):
            gramwatch.load(tmp_path / "guard.safetensors", Both())
        loaded = gramwatch.load(tmp_path / "guard.safetensors", Both(), logits=logits)
    else:
        loaded = gramwatch.load(tmp_path / "guard.safetensors", Both())
    assert torch.equal(loaded(images(5, 2)).score, found.score)


def test_every_kind_of_detector_takes_adapters(tmp_path):
    def adapt(batch):
        return batch["scan"]

    for make in (GramDetector, Energy, KNN):
        detector = make(Both(), inputs=adapt, logits=1)
        quietly(detector.fit, [{"scan": images(200, 0), "more": images(2, 0)}], progress=False)
        detector.calibrate([{"scan": images(100, 1)}], progress=False)
        found = detector({"scan": images(5, 2)})
        assert torch.equal(found.logits, Plain()(images(5, 2)))
        detector.save(tmp_path / "detector.safetensors")
        with pytest.raises(InputError, match="fitted with inputs="):
            gramwatch.load(tmp_path / "detector.safetensors", Both())
        loaded = gramwatch.load(tmp_path / "detector.safetensors", Both(), inputs=adapt)
        assert torch.equal(loaded({"scan": images(5, 2)}).score, found.score)
    assert find_taps(Both(), images(2, 0), logits=1).names == ["conv", "relu", "hidden", "tanh"]


def test_tensors_that_may_all_be_logits_are_said_once():
    net = Both()
    with pytest.warns(GramwatchWarning, match=r"2 tensors that may be logits.*the first is taken") as said:
        quietly(Guard(net).fit, images(200, 0), progress=False)
    assert sum("may be logits" in str(each.message) for each in said) == 1


def test_a_logits_adapter_that_does_not_fit():
    with pytest.raises(InputError, match=r"logits='scores' is not in the network's output"):
        Guard(Both(), logits="scores").fit([images(20, 0)], progress=False)
    with pytest.raises(InputError, match=r"logits=7 is not in the network's output, a tuple of 2"):
        Guard(Both(), logits=7).fit([images(20, 0)], progress=False)


@pytest.mark.parametrize("last", ["softmax", "sigmoid"])
def test_probabilities_in_place_of_logits_are_said_once(last):
    class Sure(Plain):
        def forward(self, x):
            logits = super().forward(x)
            return logits.softmax(1) if last == "softmax" else torch.sigmoid(logits)

    with pytest.warns(GramwatchWarning, match=f"looks like probabilities.*without its {last}") as said:
        guarded(Sure(), images(200, 0), images(100, 1))
    assert sum("probabilities" in str(each.message) for each in said) == 1
    undone = {"softmax": torch.log, "sigmoid": torch.logit}[last]
    guarded(Sure(), images(200, 0), images(100, 1), logits=undone)


# --- a detection -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guard() -> Guard:
    return guarded(Plain(), images(200, 0), images(100, 1))


def test_a_detection_is_a_sequence_of_examples(guard):
    found = guard(images(5, 2))
    assert len(found) == 5
    assert [float(one.score) for one in found] == found.score.tolist()
    assert found[1].score.tolist() == [found.score[1].item()] == found[-4].score.tolist()
    assert found[-1].parts["gram"].tolist() == [found.parts["gram"][4].item()]
    some = found[torch.tensor([True, False, True, False, False])]
    assert some.deviations.tolist() == found.deviations[[0, 2]].tolist()
    assert len(found[1:3]) == 2
    assert some.taps == found.taps
    for number in (5, -6):
        with pytest.raises(IndexError, match=f"there is no example {number}: the batch has 5"):
            found[number]


def test_a_detection_as_plain_values(guard):
    found = guard(images(5, 2))
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["score"] == found.score.tolist()
    assert plain["is_ood"] == found.is_ood.tolist()
    assert list(plain["parts"]) == list(guard.members)
    assert list(plain["deviations"]) == guard.members["gram"].taps.names == list(found.taps)
    assert plain["deviations"]["conv"] == found.deviations[:, 0].tolist()
    energy = Energy(guard.model).calibrate([images(100, 1)], progress=False)
    assert set(energy(images(2, 0)).to_dict()) == {"predicted", "score", "p_value", "is_ood"}


def test_copies_and_pickles_judge_the_same(guard):
    expected = guard(images(5, 2)).score
    assert torch.equal(copy.deepcopy(guard)(images(5, 2)).score, expected)
    assert torch.equal(pickle.loads(pickle.dumps(guard))(images(5, 2)).score, expected)


def test_a_guard_goes_to_a_device(guard):
    assert guard.to("cpu") is guard
    assert guard.members["gram"].to(torch.device("cpu")) is guard.members["gram"]


def test_the_tap_that_is_not_finite_is_named():
    net = Plain()
    with torch.no_grad():
        net.hidden.weight[2] = torch.inf
    with (
        pytest.warns(GramwatchWarning, match=r"left out; the first tap to show it is 'hidden'"),
        pytest.raises(
            InputError, match=r"every training example held NaN or infinity; the first tap .*'hidden'"
        ),
    ):
        GramDetector(net).fit([images(20, 0)], progress=False)
