"""What networks return: logits that are found, chosen by an adapter, or named in an error."""

import pytest
import torch
import torch.nn.functional as F

import gramwatch
from gramwatch import GramDetector, GramwatchWarning, Guard, InputError, find_taps
from gramwatch.methods import KNN, Energy
from tests.fed import CLASSES, Plain, guarded, images, quietly


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Scores of five images by a guard that was fed plain tensors."""
    return guarded(Plain(), images(200, 0).split(50), [images(100, 1)])(images(5, 2)).score


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
        quietly(Guard(net, members=("gram", "energy")).fit, images(200, 0), progress=False)
    assert sum("may be logits" in str(each.message) for each in said) == 1


def test_a_logits_adapter_that_does_not_fit():
    with pytest.raises(InputError, match=r"logits='scores' is not in the network's output"):
        Guard(Both(), logits="scores").fit([images(20, 0)], progress=False)
    with pytest.raises(InputError, match=r"logits=7 is not in the network's output, a tuple of 2"):
        Guard(Both(), logits=7).fit([images(20, 0)], progress=False)


@pytest.mark.filterwarnings("ignore:the scores of the same inputs differ")  # logarithms of rounded zeros
@pytest.mark.parametrize("last", ["softmax", "sigmoid"])
def test_probabilities_in_place_of_logits_are_said_once(last):
    class Sure(Plain):
        def forward(self, x):
            logits = super().forward(x)
            return logits.softmax(1) if last == "softmax" else torch.sigmoid(logits)

    with pytest.warns(GramwatchWarning, match=f"looks like probabilities.*without its {last}") as said:
        guarded(Sure(), images(200, 0), images(100, 1), members=("gram", "energy"))
    assert sum("probabilities" in str(each.message) for each in said) == 1
    undone = {"softmax": torch.log, "sigmoid": torch.logit}[last]
    guarded(Sure(), images(200, 0), images(100, 1), logits=undone, members=("gram", "energy"))
