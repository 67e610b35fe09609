"""Inputs whose size varies: images of several sizes, texts padded to their batch."""

import pytest
import torch
from torch import Tensor, nn

import gramwatch
from gramwatch import GramDetector, GramwatchWarning, Guard, InputError

CLASSES = 3


def images(n: int, seed: int, pixels: int = 8) -> Tensor:
    return torch.randn(n, 2, pixels, pixels, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Module:
    """A network that favours no class."""
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 7),
        nn.ReLU(),
        nn.Linear(7, CLASSES),
    ).eval()
    return centred(net)


@torch.no_grad()
def centred(net: nn.Sequential) -> nn.Module:
    net[-1].bias -= net(images(200, 9)).mean(0)
    return net


def signature_of(guard: Guard) -> list:
    return guard.members["gram"].contents()[0]["inputs"]


@pytest.mark.parametrize("make", [Guard, GramDetector])
def test_a_size_that_the_fit_never_saw_is_judged_and_said_once(make, tmp_path):
    model = network()
    detector = make(model).fit(images(300, 0).split(64), progress=False)
    detector.calibrate([images(100, 1)], progress=False)
    usual = detector(images(30, 2)).deviations
    with pytest.warns(GramwatchWarning, match=r"float32 \(2, 24, 24\) .* float32 \(2, 8, 8\)"):
        found = detector(images(30, 2, 24))
    torch.testing.assert_close(found.logits, model(images(30, 2, 24)), rtol=1e-5, atol=1e-6)
    # Sums over more pixels are larger at the four feature maps. docs/taps.md says so.
    assert (found.deviations[:, :4].mean(0) > 10 * usual[:, :4].mean(0)).all()
    detector(images(30, 2, 10))  # said once: another warning would be an error
    detector.save(tmp_path / "detector.safetensors")
    loaded = gramwatch.load(tmp_path / "detector.safetensors", model)
    with pytest.warns(GramwatchWarning, match="another size than the detector was fitted on"):
        again = loaded(images(30, 2, 24))
    assert torch.equal(again.score, found.score)


def test_sizes_that_vary_in_training_are_covered(tmp_path):
    model, sizes = network(), (8, 9, 12)
    guard = Guard(model).fit([images(150, pixels, pixels) for pixels in sizes], progress=False)
    guard.calibrate([images(60, 20 + pixels, pixels) for pixels in sizes], progress=False)
    for pixels in (*sizes, 10):
        assert guard(images(100, 40 + pixels, pixels)).is_ood.double().mean() < 0.25
    assert signature_of(guard) == [[[2, None, None], "float32"]]
    guard.save(tmp_path / "guard.safetensors")
    loaded = gramwatch.load(tmp_path / "guard.safetensors", model)
    assert signature_of(loaded) == signature_of(guard)
    for pixels in sizes:
        x = images(20, 50, pixels)
        assert torch.equal(loaded(x).score, guard(x).score)


def test_parts_of_several_sizes_are_merged_and_resumed_as_if_fitted_at_once(tmp_path):
    model, parts = network(), [images(150, 0, 8), images(150, 1, 11)]
    calibration = [images(60, 2, 8), images(60, 3, 11)]
    whole = Guard(model).fit(parts, progress=False).calibrate(calibration, progress=False)
    small, large = (Guard(model).fit([part], progress=False) for part in parts)
    small.merge(large).calibrate(calibration, progress=False)
    assert signature_of(small) == signature_of(whole) == [[[2, None, None], "float32"]]

    def broken():
        yield parts[0]
        raise KeyError("interrupted")

    checkpoint = tmp_path / "checkpoint.safetensors"
    with pytest.raises(KeyError):
        Guard(model).fit(broken(), checkpoint=checkpoint, progress=False)
    resumed = Guard(model).fit(parts, checkpoint=checkpoint, progress=False)
    resumed.calibrate(calibration, progress=False)
    for x in (images(20, 4, 8), images(20, 4, 11)):
        assert torch.equal(resumed(x).score, whole(x).score)
        assert torch.equal(small(x).deviations, whole(x).deviations)
        torch.testing.assert_close(small(x).score, whole(x).score)  # sums in another order


def test_other_channels_are_an_error_and_other_sizes_that_the_network_refuses():
    guard = Guard(network()).fit([images(100, 0)], progress=False)
    guard.calibrate([images(100, 1)], progress=False)
    for wrong in (torch.randn(4, 1, 8, 8), torch.randn(4, 3, 12, 12), torch.randn(4, 2, 64)):
        with pytest.raises(InputError, match="the detector was fitted on"):
            guard(wrong)
    with pytest.raises(InputError, match=r"int64 \(2, 8, 8\) were given"):
        guard(torch.ones(4, 2, 8, 8, dtype=torch.int64))
    fixed = centred(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, CLASSES)).eval()
    )
    for make in (Guard, GramDetector):
        detector = make(fixed).fit([images(100, 0)], progress=False)
        detector.calibrate([images(100, 1)], progress=False)
        with pytest.raises(InputError, match=r"fails on inputs of float32 \(2, 9, 9\), .* \(2, 8, 8\)"):
            detector(images(4, 2, 9))
        with pytest.raises(InputError, match=r"fails on inputs of float32 \(2, 9, 9\), .* \(2, 8, 8\)"):
            detector.fit([images(4, 2, 9)], progress=False)


def test_a_loaded_detector_refuses_the_same_at_its_first_batch(tmp_path):
    fixed = centred(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, CLASSES)).eval()
    )
    for make in (Guard, GramDetector):
        detector = make(fixed).fit([images(100, 0)], progress=False)
        detector.calibrate([images(100, 1)], progress=False).save(tmp_path / "detector.safetensors")
        loaded = gramwatch.load(tmp_path / "detector.safetensors", fixed)
        for use in (loaded, lambda x, loaded=loaded: loaded.fit([x], progress=False)):
            with pytest.raises(InputError, match=r"float32 \(3, 8, 8\) were given, .* \(2, 8, 8\)"):
                use(torch.randn(4, 3, 8, 8))
            with pytest.raises(InputError, match=r"fails on inputs of float32 \(2, 9, 9\), .* \(2, 8, 8\)"):
                use(images(4, 2, 9))


# --- text padded to its batch ------------------------------------------------------------------------


def texts(n: int, seed: int, length: int) -> dict[str, Tensor]:
    """Texts of up to so many words, padded with 0 to the longest."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, 40, (n, length), generator=generator)
    lengths = torch.randint(length - 2, length + 1, (n, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": words * mask, "attention_mask": mask, "labels": words[:, 0] % CLASSES}


def transformer(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if name == "BERT":
        made = transformers.BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=32,
            num_labels=CLASSES,
        )
        return transformers.BertForSequenceClassification(made).eval()
    made = transformers.DistilBertConfig(
        vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=24, num_labels=CLASSES
    )
    return transformers.DistilBertForSequenceClassification(made).eval()


@pytest.mark.filterwarnings("ignore:.*classes were predicted for fewer than")
@pytest.mark.parametrize("name", ["BERT", "DistilBERT"])
def test_text_padded_to_its_batch(name, tmp_path):
    model = transformer(name)
    with torch.no_grad():
        model.classifier.weight *= 100
    training = [texts(40, length, length) for length in (6, 9, 12, 7)]
    guard = Guard(model, orders=(1, 2, 3)).fit(training, progress=False)
    guard.calibrate([texts(40, 20 + length, length) for length in (6, 9, 12)], progress=False)
    fresh = texts(40, 30, 8)
    del fresh["labels"]
    found = guard(fresh)
    assert found.deviations.isfinite().all()
    assert found.is_ood.double().mean() < 0.4
    assert signature_of(guard) == [[[None], "int64"], [[None], "int64"]]
    guard.save(tmp_path / "guard.safetensors")
    assert torch.equal(gramwatch.load(tmp_path / "guard.safetensors", model)(fresh).score, found.score)
