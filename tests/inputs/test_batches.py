"""Batches of any nesting, what loaders yield, and the form of inputs: understood, or named in an error."""

from collections import UserDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gramwatch import Guard, InputError, load
from gramwatch.inputs.batches import (
    all_finite,
    count_examples,
    described,
    on_device,
    same_form,
    same_size,
    signature,
    widened,
)
from tests.fed import CLASSES, Plain, guarded, images


def test_helpers_of_inputs():
    image, mask = torch.randn(3, 2, 4), torch.ones(3, 4, dtype=torch.int64)
    image[1, 0, 2] = torch.nan
    image[2, 1, 0] = torch.inf
    assert all_finite({"image": image, "mask": mask}).tolist() == [True, False, False]
    assert all_finite(mask).tolist() == [True, True, True]
    assert signature((image, mask)) == [[[2, 4], "float32"], [[4], "int64"]]
    for nothing in ((), {}, None, "text", torch.tensor(3.0)):
        with pytest.raises(InputError, match="each with a batch axis; got "):
            count_examples(nothing)
    moved = on_device({"x": torch.ones(2), "n": 3}, nn.Linear(2, 2, device="meta"))
    assert moved["x"].device.type == "meta"
    assert moved["n"] == 3
    assert on_device(image, nn.ReLU()) is image


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Scores of five images by a guard that was fed plain tensors."""
    return guarded(Plain(), images(200, 0).split(50), [images(100, 1)])(images(5, 2)).score


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
    detection = guard(batch[0] if isinstance(batch, tuple | list) else batch)
    assert torch.equal(detection.score, expected)


def test_a_tensor_an_array_or_a_data_set_in_place_of_a_loader(expected):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(images(200, 0), torch.zeros(200).long(), strict=True))

    labelled = TensorDataset(images(200, 0), torch.zeros(200).long())
    for data in (images(200, 0), images(200, 0).numpy(), labelled, Stream(), DataLoader(labelled, 64)):
        result = guarded(Plain(), data, images(100, 1))(images(5, 2))
        torch.testing.assert_close(result.score, expected, rtol=1e-6, atol=1e-6)


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
    result = tuples(pairs(images(5, 2)))
    names = guarded(
        Two(),
        [dict(zip("xy", pair, strict=True)) for pair in fit],
        [dict(zip("xy", calibrate[0], strict=True))],
    )
    assert torch.equal(names({"x": images(5, 2), "y": images(5, 2).flip(0)}).score, result.score)
    adapted = guarded(Two(), fit, calibrate, inputs=lambda batch: tuple(batch))
    assert torch.equal(adapted(pairs(images(5, 2))).score, result.score)
    with pytest.raises(
        InputError, match=r"Two could not be run .*TypeError.*\(\(a, b\), labels\) for two inputs"
    ):
        Guard(Two()).fit(fit, progress=False)


@pytest.fixture(scope="module")
def guard():
    return guarded(Plain(), images(200, 0), images(100, 1))


class Picture:
    """As PIL's images are: no tensor, no array."""


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([Picture(), Picture()], r"got a tests.inputs.test_batches.Picture.*inputs=FUNCTION"),
        ([[Picture()], LABELS[:1]], r"got a tuple of 1, the first a tests.inputs.test_batches.Picture"),
        (Picture(), r"got a tests.inputs.test_batches.Picture"),
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


@pytest.mark.parametrize("given", [Picture(), [Picture(), Picture()], "image.png", None])
def test_what_a_guard_cannot_judge_is_named(guard, given, tmp_path):
    guard.save(tmp_path / "guard.safetensors")
    for asked in (guard, load(tmp_path / "guard.safetensors", guard.model)):  # one that saw a batch, one not
        with pytest.raises(InputError, match=r"got (a |None).*Turn batches into tensors as in training"):
            asked(given)


@pytest.mark.parametrize("loader", [{"image": images(4, 0)}, "folder", 3, None])
def test_what_is_no_loader_is_named(loader):
    with pytest.raises(InputError, match="a loader yields batches"):
        Guard(Plain()).fit(loader, progress=False)


def test_an_image_without_its_batch_axis(guard):
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
    detection = guard(batch(5, 11))
    without = {key: value for key, value in batch(5, 11).items() if key != "labels"}
    assert torch.equal(detection.score, guard(without).score)


@pytest.mark.parametrize(
    ("fitted", "given", "form", "size"),
    [
        ([[3, 32, 32], "float32"], [[3, 32, 32], "float16"], True, True),
        ([[3, 32, 32], "float32"], [[3, 48, 32], "float32"], True, False),
        ([[3, None, None], "float32"], [[3, 48, 40], "float32"], True, True),
        ([[3, None, 32], "float32"], [[3, 48, 40], "float32"], True, False),
        ([[3, 32, 32], "float32"], [[1, 32, 32], "float32"], False, None),
        ([[32, 32, 3], "float32"], [[48, 32, 3], "float32"], True, False),
        ([[32, 32, 3], "float32"], [[32, 32, 1], "float32"], False, None),
        ([[32, 32, 3], "uint8"], [[32, 32, 1], "uint8"], False, None),
        ([[3, 32, 32], "uint8"], [[3, 32, 32], "float32"], False, None),
        ([[], "float32"], [[], "float32"], True, True),
        ([[9], "float32"], [[9], "float32"], True, True),
        ([[9], "float32"], [[8], "float32"], False, None),
        ([[9], "int64"], [[8], "int64"], True, False),
        ([[9], "int64"], [[9], "float32"], False, None),
        ([[1, 16], "float32"], [[1, 20], "float32"], True, False),
        ([[None, 16], "float32"], [[7, 16], "float32"], True, True),
        ([[None, 16], "float32"], [[7, 15], "float32"], False, None),
        ([[3, 32, 32], "float32"], [[3, 32], "float32"], False, None),
    ],
)
def test_which_inputs_are_of_the_same_form(fitted, given, form, size):
    assert same_form([given], [fitted]) == form
    assert not same_form([given, given], [fitted])
    if size is not None:
        assert same_size([given], [fitted]) == size
        assert same_size([given], widened([fitted], [given]))
        assert same_size([fitted], widened([fitted], [given])) or None in fitted[0]


def test_a_signature_in_words():
    assert described([[[3, None, 4], "float32"], [[9], "int64"]]) == "float32 (3, any, 4) and int64 (9,)"
