"""Ray Data on a local cluster. `make test-ray` has the environment."""

import sys
import warnings

import pytest
import torch

import gramwatch
from gramwatch import GramDetector, Guard, InputError, MissingExtraError
from gramwatch.integrate import ray_data
from gramwatch.methods import ViM
from tests.guarded import images, made

TRAIN, VALIDATION, TEST = images(187, 1), images(90, 2), images(50, 3)


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gramwatch\[ray\]'"):
        ray_data.fit(GramDetector(made()), None, workers=1)


@pytest.fixture(scope="module")
def ray():
    """A local cluster of three CPUs."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    pytest.importorskip("ray.data", reason="Ray Data is not installed: make test-ray")
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=150 * 2**20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def blocks(ray, inputs, count):
    """A data set of so many blocks. Each example has a number."""
    rows = [{"image": example, "number": number} for number, example in enumerate(inputs.numpy())]
    return ray.data.from_items(rows, override_num_blocks=count)


def quietly(function, *args, **options):
    """Few training examples of some classes are not what these tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gramwatch.GramwatchWarning)
        return function(*args, **options)


def assert_same_fit(result, expected):
    mine, theirs = result.contents()[1], expected.contents()[1]
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if "bounds" in name or not tensor.is_floating_point():
            assert torch.equal(mine[name], tensor), name
        else:
            torch.testing.assert_close(mine[name], tensor, rtol=1e-6, atol=1e-6 * float(tensor.abs().max()))


def test_the_fit_of_all_blocks_is_that_of_one_process(ray):
    """With one example at a time, batches are the same whatever the blocks."""
    guard, alone = Guard(made(), orders=(1, 2)), Guard(made(), orders=(1, 2))
    for inputs, count in ((TRAIN[:120], 5), (TRAIN[120:], 1)):  # the second fit adds; a worker gets no block
        quietly(ray_data.fit, guard, blocks(ray, inputs, count), workers=2, batch_size=1)
        quietly(alone.fit, inputs.split(1), progress=False)
        assert_same_fit(guard, alone)
    assert int(guard.members["gram"].class_counts_.sum()) == len(TRAIN)


def test_scores_are_columns_of_a_data_set(ray):
    guard = Guard(made(), orders=(1, 2))
    quietly(guard.fit, TRAIN.split(16), progress=False)
    quietly(guard.calibrate, VALIDATION.split(16), progress=False)
    scored = ray_data.score(guard, blocks(ray, TEST, 3), workers=2, batch_size=8, keep=["number"])
    rows = sorted(scored.take_all(), key=lambda row: row["number"])
    detection = guard(TEST)
    assert [row["number"] for row in rows] == list(range(len(TEST)))
    assert [row["predicted"] for row in rows] == detection.predicted.tolist()
    assert [row["is_ood"] for row in rows] == detection.is_ood.tolist()
    assert [row["p_gram"] for row in rows] == detection.parts["gram"].tolist()
    scores = torch.tensor([row["score"] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(scores, detection.score, rtol=1e-6, atol=1e-6)


def test_mistakes_are_named(ray):
    with pytest.raises(ValueError, match=r"several workers cannot fit 'vim'"):
        ray_data.fit(ViM(made()), blocks(ray, TRAIN, 2), workers=2)
    with pytest.raises(ValueError, match=r"3 worker\(s\) with 1 CPU\(s\) each leave none of 3 CPU\(s\)"):
        ray_data.fit(Guard(made()), blocks(ray, TRAIN, 2), workers=3)
    with pytest.raises(InputError, match="the data set has no example"):
        ray_data.fit(Guard(made()), blocks(ray, TRAIN, 2).limit(0), workers=2)
    with pytest.raises(gramwatch.NotFittedError):
        ray_data.score(Guard(made()), blocks(ray, TRAIN, 2), workers=2)
