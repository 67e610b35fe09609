"""GramDetector with bounds in float16: judged, saved, merged, resumed."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import gramwatch
from gramwatch import GramDetector, GramwatchWarning, find_taps
from gramwatch.numerics.bounds import make_bounds

CLASSES = 3


class WideNet(nn.Module):
    """Enough channels that bounds make up most of a file."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 48, 3), nn.Conv2d(48, 64, 3)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv2(self.conv1(x).relu()).relu().mean((2, 3)))


def images(count: int, seed: int) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def net() -> nn.Module:
    net = WideNet()
    with torch.no_grad():
        net.head.weight *= 20  # so that all classes are predicted
        net.head.bias -= net(images(300, 9)).mean(0)
    return net.eval()


def fitted(net: nn.Module, storage: str) -> GramDetector:
    return GramDetector(net, storage=storage).fit(images(300, 0).split(50), progress=False)


def test_no_training_example_of_a_detector_deviates(net: nn.Module) -> None:
    detector = fitted(net, "float16")
    assert detector.measure_all(images(300, 0).split(50)).deviations.eq(0).all()


def test_deviations_and_scores_are_close_to_those_of_float32(net: nn.Module) -> None:
    half, single = fitted(net, "float16"), fitted(net, "float32")
    test = images(100, 2)
    found, expected = half.measure(test).deviations, single.measure(test).deviations
    # A bound moved by 2^-10 of its value changes a deviation d by 2^-10 (1 + d): summed over a tap, by 2^-10
    # times how many statistics lie outside, plus the tap's deviation.
    plan = single.planned(test)
    (seen,) = plan(test)
    (table,) = plan.tables.values()
    minimum, maximum = single._bounds.rows(seen.predicted)
    outside = ((seen.statistics < minimum) | (seen.statistics > maximum)).float()
    count = torch.stack([part.sum(1) for part in outside.split([at.size for at in table.at], 1)], 1)
    assert (found - expected).abs().le(1.01 * 2**-10 * (count + expected)).all()
    assert not found.equal(expected)
    half.calibrate([images(100, 1)], progress=False)
    single.calibrate([images(100, 1)], progress=False)
    # A score is compared with the threshold, so small ones need only be close in its terms.
    atol = 1e-3 * single.threshold_
    torch.testing.assert_close(half(test).score, single(test).score, rtol=0.01, atol=atol)


def test_a_file_comes_back_bit_for_bit_and_has_about_half_the_size(net: nn.Module, tmp_path: Path) -> None:
    saved = {storage: fitted(net, storage) for storage in ("float16", "float32")}
    for storage, detector in saved.items():
        detector.save(tmp_path / storage)
    tensors = load_file(tmp_path / "float16")
    features = 10 * (48 + 48 + 64 + 64)  # orders times channels, of two convolutions and what follows them
    assert tensors["bounds.minimum"].dtype == tensors["bounds.maximum"].dtype == torch.float16
    assert tensors["bounds.maximum"].shape == (CLASSES, features)
    assert tensors["bounds.exponent"].dtype == torch.int8
    size = [
        sum(t.nbytes for name, t in load_file(tmp_path / storage).items() if name.startswith("bounds."))
        for storage in saved
    ]
    assert size[0] / size[1] == pytest.approx(0.5, rel=0.01)
    loaded = gramwatch.load(tmp_path / "float16", net)
    assert loaded.storage == "float16"
    for name, tensor in saved["float16"]._bounds.state().items():
        assert loaded._bounds.state()[name].dtype == tensor.dtype
        assert loaded._bounds.state()[name].equal(tensor)
    test = images(20, 3)
    assert loaded.measure(test).deviations.equal(saved["float16"].measure(test).deviations)
    loaded.fit([images(50, 4)], progress=False)
    saved["float16"].fit([images(50, 4)], progress=False)
    for name, tensor in saved["float16"]._bounds.state().items():
        assert loaded._bounds.state()[name].equal(tensor)


def test_detectors_merge_only_with_their_own_storage(net: nn.Module) -> None:
    once = fitted(net, "float16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        shards = [
            GramDetector(net, storage="float16").fit(part.split(50), progress=False)
            for part in images(300, 0).split([50, 250])
        ]
    merged = shards[0].merge(shards[1])
    for name, tensor in once._bounds.state().items():
        assert merged._bounds.state()[name].equal(tensor)
    with pytest.raises(ValueError, match="storage: 'float16' and 'float32'"):
        merged.merge(fitted(net, "float32"))


def test_a_checkpoint_of_another_storage_is_refused(net: nn.Module, tmp_path: Path) -> None:
    def interrupted():
        yield images(50, 0)
        raise KeyboardInterrupt

    path = tmp_path / "fit.safetensors"
    with pytest.raises(KeyboardInterrupt):
        GramDetector(net, storage="float16").fit(interrupted(), checkpoint=path)
    with pytest.raises(gramwatch.ArtifactError, match="begun with storage = 'float16', not 'float32'"):
        GramDetector(net).fit([images(50, 0)], checkpoint=path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        resumed = GramDetector(net, storage="float16").fit(images(100, 0).split(50), checkpoint=path)
    assert int(resumed.class_counts_.sum()) == 100


def test_a_storage_that_cannot_be_is_refused(net: nn.Module) -> None:
    with pytest.raises(ValueError, match="storage must be one of float32, float16; got 'int8'"):
        GramDetector(net, storage="int8")
    with pytest.raises(ValueError, match="bounds='mean_variance' use storage='float32'"):
        GramDetector(net, bounds="mean_variance", storage="float16")


def test_bounds_of_a_resnet_50_for_imagenet_fit_into_4_gigabytes() -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("resnet50").eval()
    asked = GramDetector(net, storage="float16").needs.statistics
    at = [asked.at(tap) for tap in find_taps(net, torch.randn(1, 3, 64, 64))]
    features = sum(each.size for each in at)
    groups = [each.features for each in at for _ in each.orders]
    state = make_bounds("min_max", "float16", 1000, groups, "meta")._state
    assert state["minimum"].shape == (1001, features)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert 2 * 1001 * features * 2 <= size < 1.01 * 2 * 1001 * features * 2
    assert features > 400_000
    assert size < 4e9


@pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")
@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_training_examples_that_are_all_alike_are_noticed_in_both_storages(net, storage):
    """Rounding widens bounds in float16, which is no difference between examples."""
    one = images(1, 0)
    alike = GramDetector(net, storage=storage).fit([one.repeat(50, 1, 1, 1)], progress=False)
    assert not alike.sees_differences
    assert fitted(net, storage).sees_differences
