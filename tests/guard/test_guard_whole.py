"""A guard as a whole: its full effort, forged classes in its file, the fit of another guard."""

import pytest
import torch

import gramwatch
from gramwatch import ArtifactError, GramDetector, Guard
from gramwatch.detect.fitting import packed, unpacked
from gramwatch.files import artifact
from tests.guarded import images, made


@pytest.fixture
def net():
    return made()


@pytest.fixture
def ready(net):
    guard = Guard(net).fit(images(300, 0).split(64), progress=False)
    return guard.calibrate(images(200, 1).split(64), progress=False)


def test_full_effort_looks_at_everything(net):
    gram = Guard(net, effort="full").members["gram"]
    assert gram.selection == "all"
    assert gram.orders == tuple(range(1, 11))
    assert (gram.pixels, gram.channels) == (None, None)
    assert gram.settings_as_json() == GramDetector(net).settings_as_json()


@pytest.mark.parametrize(
    ("members", "classes", "match"),
    [
        (("energy",), 0, "no 0 classes"),
        (("energy",), -1, "no -1 classes"),
        (("energy",), 2**24 + 1, "no 16,777,217 classes"),
        (("gram", "energy"), 40, "other than 40 classes"),
        (("energy",), 3.0, "classes cannot be 3.0"),
        (("energy",), 1, "must be from 0 to 0"),
    ],
)
def test_a_file_with_forged_classes_is_refused(net, members, classes, match, tmp_path):
    guard = Guard(net, members=members, orders=[1]).fit([images(300, 0)], progress=False)
    guard.calibrate([images(200, 1)], progress=False).save(tmp_path / "guard")
    saved = artifact.read(tmp_path / "guard")
    header = {**saved.header, "calibration": {**saved.header["calibration"], "classes": classes}}
    tensors = {name: saved.file.tensor(name) for name in saved.file.layout}
    artifact.write(tmp_path / "guard", header, tensors)
    with pytest.raises(ArtifactError, match=match):
        gramwatch.load(tmp_path / "guard", net)


def test_a_guard_adopts_the_fit_of_another_one_as_a_whole(net, ready):
    """Ray's workers and other ranks send their fits in this form."""
    adopted = Guard(net)
    adopted.adopt(unpacked(ready, *packed(ready)))
    assert adopted.is_fitted
    assert adopted.counted == ready.counted
    adopted.calibrate(images(200, 1).split(64), progress=False)
    x = images(20, 2)
    assert torch.equal(adopted(x).score, ready(x).score)
