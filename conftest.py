"""What all tests share: real data and networks where they lie beside the checkout, and small networks."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from gramwatch.numerics import kernels
from tests.guarded import OUTLIERS, rehearsing

# Without a network, Hugging Face's hub would be asked in vain for half a minute. Read when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# How long an example takes depends on what else the machine does.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

# Some torchvision wheels lack their compiled operators for this build of PyTorch; importing torchvision (and
# with it timm) only needs these two to be known.
_torchvision = torch.library.Library("torchvision", "FRAGMENT")
for _schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    if not hasattr(torch.ops.torchvision, _schema.partition("(")[0]):
        _torchvision.define(_schema)

SHARED = Path(os.environ.get("GRAMWATCH_SHARED", Path(__file__).parents[1] / "shared"))

torch.set_num_threads(1)  # tests run side by side, and small networks gain nothing from more


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests with the marker `cuda` need a GPU."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device (make test-cuda)")


def _shared(name: str, what: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"no {what} at {folder} (set GRAMWATCH_SHARED)")
    return folder


@pytest.fixture(scope="session")
def shared_weights() -> Path:
    """The folder of third-party networks, or a skip."""
    return _shared("weights", "third-party networks")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of packed real data sets, or a skip."""
    return _shared("data", "real data")


@pytest.fixture(autouse=True, scope="session")
def _files_need_not_survive_a_power_cut() -> Iterator[None]:
    """Tests write a thousand files, and waiting for the disk takes longer than all else about them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _short_rehearsals() -> Iterator[None]:
    """Ten outliers of each family, not 150: all tests together calibrate hundreds of guards."""
    with rehearsing(OUTLIERS):
        yield


@pytest.fixture(scope="module")
def whole_rehearsals() -> Iterator[None]:
    """Rehearsals as users have them, for tests of what these learn."""
    with rehearsing():
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _kernels_are_not_given_up() -> Iterator[None]:
    """No test leaves the process without kernels: later ones would compare the slow form with itself."""
    before = set(kernels._given_up)
    yield
    given_up, kernels._given_up = kernels._given_up - before, before
    assert not given_up
