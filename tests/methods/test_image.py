"""The member that looks at the image: its score against the formula, and what it sees."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramwatch
from gramwatch import GramwatchWarning, Guard, InputError
from gramwatch.errors import ArtifactError
from gramwatch.files import artifact
from gramwatch.inputs import image_numbers
from gramwatch.inputs.image_numbers import GROUPS
from gramwatch.methods import Image


class Net(nn.Module):
    """Any network will do: it is not looked at."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


def images(count: int, seed: int, channels: int = 3, size: int = 16) -> Tensor:
    """Images of smooth shapes in warm colours, lit from above, with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(count, 1, 5, 5, generator=generator) + 0.2 * torch.rand(
        count, channels, 5, 5, generator=generator
    )
    shapes = F.interpolate(small, (size, size), mode="bicubic")
    tint = torch.linspace(0.5, 0.3, channels).view(1, -1, 1, 1) * (
        1 + 0.1 * torch.rand(count, 1, 1, 1, generator=generator)
    )
    light = torch.linspace(1.2, 0.8, size).view(1, 1, -1, 1)
    noise = 0.02 * torch.randn(count, channels, size, size, generator=generator)
    return (tint * light * shapes + 0.1 + noise).clamp(0, 1)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(2)
    return Net().eval()


@pytest.fixture(scope="module")
def ready(net) -> Image:
    detector = Image(net).fit(images(300, 0).split(64), progress=False)
    return detector.calibrate([images(200, 1)], progress=False)


def distances(train: Tensor, x: Tensor) -> np.ndarray:
    """The logarithms of the distances of the groups, in float64."""
    of_train, of_x = (image_numbers.look(images).double().numpy() for images in (train, x))
    found = []
    for group in GROUPS:
        part = image_numbers.columns(of_train.shape[1], group)
        numbers, new = of_train[:, part], of_x[:, part]
        mean, scale = numbers.mean(0), numbers.std(0)
        z = (numbers - mean) / scale
        covariance = sum(np.outer(row, row) for row in z) / len(z) + 0.05 * np.eye(len(mean))
        inverse = np.linalg.inv(covariance)
        found.append([np.log(row @ inverse @ row / len(row)) for row in (new - mean) / scale])
    return np.array(found).T


def test_the_score_equals_its_formula(net, ready):
    train, calibration, new = images(300, 0), images(200, 1), images(30, 2)
    new[::3] = F.avg_pool2d(new[::3], 3, 1, 1)
    fitting, _ = gramwatch.detect.split.halves(200, 0)
    usual = distances(train, calibration[fitting])
    median = np.median(usual, 0)
    tail = np.maximum(np.quantile(usual, 0.99, 0) - median, usual.std(0))
    expected = ((distances(train, new) - median) / tail).max(1)
    np.testing.assert_allclose(ready(new).score.numpy(), expected, rtol=1e-6)


def blurred(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)


def dead_block(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :, 4:8, 8:12] = 0
    return x


FAULTS = {
    "blur": blurred,
    "noise": lambda x: (x + 0.1 * torch.randn(x.shape)).clamp(0, 1),
    "grey": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "swapped channels": lambda x: x.flip(1),
    "a dead block": dead_block,
    "dead rows": lambda x: torch.where(torch.arange(16).view(1, 1, -1, 1) % 5 == 0, 0.0, x),
    "dark": lambda x: 0.2 * x,
    "another normalisation": lambda x: (x - 0.45) / 0.25,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_image_are_flagged(ready, fault):
    clean = images(100, 3)
    found = ready(FAULTS[fault](clean))
    assert (found.score > ready(clean).score).float().mean() > 0.95
    assert found.is_ood.float().mean() > 0.9


def test_fresh_images_are_kept(ready):
    assert ready(images(1000, 4)).is_ood.float().mean() < 0.1


def test_two_fits_merged_equal_one(net, ready):
    train = images(300, 0)
    one, two = (Image(net).fit([part], progress=False) for part in train.split([110, 190]))
    one.merge(two)
    one.calibrate([images(200, 1)], progress=False)
    new = images(20, 5)
    torch.testing.assert_close(one(new).score, ready(new).score, rtol=1e-6, atol=1e-6)


def test_a_saved_member_judges_the_same(net, ready, tmp_path):
    path = tmp_path / "image.safetensors"
    ready.save(path)
    loaded = gramwatch.load(path, net)
    new = images(20, 5)
    assert loaded(new).score.equal(ready(new).score)
    assert loaded(new).p_value.equal(ready(new).p_value)


def forged(ready, net, path, **changed: Tensor) -> None:
    _, tensors = ready.contents()
    ready.save(path)
    saved = artifact.read(path)
    header = {key: saved.header[key] for key in saved.header if key not in ("format", "library", "tensors")}
    tensors |= {f"state.{name}": t for name, t in changed.items()}
    artifact.write(path, header | {"shapes": {k: list(t.shape) for k, t in tensors.items()}}, tensors)
    gramwatch.load(path, net)


def test_forged_sums_are_refused(net, ready, tmp_path):
    path, width = tmp_path / "image.safetensors", 137
    forged(ready, net, path)
    with pytest.raises(ArtifactError, match="it has seen no image"):
        forged(ready, net, path, count_=torch.tensor(0))
    wild = torch.full((width, width), 1e9, dtype=torch.float64).triu(1)
    wild = wild + wild.T + 1e9 * torch.eye(width, dtype=torch.float64)
    wild[::2, 1::2] *= -3
    wild[1::2, ::2] *= -3
    with pytest.raises(ArtifactError, match="products_ are not those of any images"):
        forged(ready, net, path, products_=wild)
    few = torch.zeros(5, dtype=torch.float64)
    with pytest.raises(ArtifactError, match="no image has 5 numbers"):
        forged(ready, net, path, sum_=few, products_=few.outer(few))


def test_images_of_another_form_are_refused(ready, net):
    grey = Image(Net(1)).fit([images(50, 0, channels=1)], progress=False)
    with pytest.raises(InputError, match="another number of channels"):
        grey.measured(observed(images(3, 1)))
    for size in (12, 24):
        assert ready(images(2, 0, size=size)).score.isfinite().all()


def observed(x: Tensor) -> gramwatch.observe.observation.Observation:
    return gramwatch.observe.observation.Observation(torch.zeros(len(x), 4), image=image_numbers.look(x))


def test_an_input_that_is_no_image_is_an_error_by_itself():
    table = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    with pytest.raises(InputError, match="the input holds no image"):
        Image(table).fit([torch.randn(40, 7)], progress=False)


@pytest.mark.filterwarnings("error::gramwatch.GramwatchWarning")
def test_a_guard_of_tables_works_without_the_member_and_says_nothing():
    torch.manual_seed(0)
    table = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    with torch.no_grad():
        table[-1].weight *= 20  # so that all classes are predicted
        table[-1].bias -= table(torch.randn(500, 7)).mean(0)
    guard = Guard(table, rehearse=True).fit([torch.randn(300, 7)], progress=False)
    guard.calibrate([torch.randn(200, 7)], progress=False)
    assert "image" not in guard.members
    assert set(guard.weights_.values()) == {1.0}
    assert guard(20 * torch.randn(5, 7)).is_ood.all()


def test_huge_images_stay_out_of_the_fit(net, ready):
    """Their values are finite and the squares are not."""
    train = torch.cat([images(300, 0), torch.full((2, 3, 16, 16), 1e25)])
    with pytest.warns(GramwatchWarning, match="2 training example"):
        fit = Image(net).fit([train], progress=False)
    assert fit.count_ == 300
    new = images(4, 5)
    torch.testing.assert_close(fit.measure(new).values, ready.measure(new).values, rtol=1e-6, atol=1e-6)
    with pytest.warns(GramwatchWarning, match="1 input"):
        assert ready(train[-1:]).score.isinf().all()


def test_the_member_of_half_precision_images_is_near(net, ready):
    x = images(50, 6)
    assert (ready.measure(x).values - ready.measure(x.half().float()).values).abs().median() < 0.05
