"""Pickles, read without running them."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gramwatch import DataError
from gramwatch_lab.datasets import load
from tests.inputs.files import as_tensor, batch, photographs, planes


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_calls_something_is_refused_and_not_run(tmp_path):
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps({b"data": Evil(tmp_path / "run"), b"labels": [0]}, protocol=2))
    with pytest.raises(DataError, match=r"test_batch is not a batch of CIFAR.*it asks for __builtin__"):
        load("cifar10", tmp_path)
    assert not (tmp_path / "run").exists()


class Pointers:
    """An array of objects, whose bytes numpy would take for pointers."""

    class Objects:
        def __reduce__(self):
            return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)

    def __reduce__(self):
        state = (1, (2, 3072), Pointers.Objects(), False, b"A" * 8 * 2 * 3072)
        return np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b"), state


def test_a_pickle_that_would_corrupt_memory_is_refused(tmp_path):
    batch(tmp_path, pickle.dumps({b"data": Pointers(), b"labels": [0, 1]}, protocol=2))
    code = (
        "import sys; from gramwatch import DataError, datasets\n"
        "try: datasets.load('cifar10', sys.argv[1]).images.sum()\n"
        "except DataError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "an array is of type |O8, not of plain whole numbers" in done.stdout


def nested(depth, kind=b"\x85"):
    """Tuples in tuples, and the outermost as a key."""
    return b"\x80\x02}" + b")" + kind * depth + b"K\x01s."


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # remembered under a number for which Python would take 32 GB
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\x00\x00x.",  # bytes that are not there
        b"\x80\x02T\xff\xff\xff\x7fx.",
        nested(300_000),  # hashed, it overflows Python's stack
        b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b".",
        b"\x80\x02" + b"}" * 2_100_000 + b".",
        b"\x80\x02c_codecs\nencode\n.",
        b"\x80\x02}U\x04datac_codecs\nencode\n)Rs.",
        b"\x80\x02}U\x04dataK\x07s.",
        # An array of a million axes, whose lengths would have to be multiplied.
        b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85R(K\x01("
        + (b"\x8a\xc8" + b"\x7f" * 200) * 100_000
        + b"tNK\x00U\x01xtbs.",
        b"\x80\x02Q.",
        b"R.",
        b"b.",
        b"",
    ],
    ids=lambda content: repr(content[:24]),
)
def test_a_pickle_that_would_fill_memory_or_stack_is_refused(content, tmp_path):
    path = batch(tmp_path, content)
    with pytest.raises(DataError, match="is not a batch of CIFAR images") as raised:
        load("cifar10", tmp_path)
    assert str(path) in str(raised.value)


def python2(images, labels):
    """A batch byte for byte as Python 2 and numpy 1 write it, with protocol 2."""
    count, data = len(images), planes(images).tobytes()
    listed = b"".join(b"K" + bytes([label]) for label in labels)
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15testing batch 1 of 1\nq\x03"
        + b"U\x06labelsq\x04]q\x05(" + listed + b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07"
        + b"cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87R(K\x01K" + bytes([count]) + b"M\x00\x0c\x86"
        + b"cnumpy\ndtype\nq\tU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
        + b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + len(data).to_bytes(4, "little") + data + b"tbu."
    )  # fmt: skip


def test_what_python_2_and_both_numpys_wrote_is_read(tmp_path):
    images, labels = photographs(3, 32), [4, 0, 9]
    content = {b"data": planes(images), b"labels": labels}
    ours = [pickle.dumps(content, protocol=protocol) for protocol in (2, 3, 4)]
    names = b"numpy.core.multiarray", b"numpy._core.multiarray"  # of numpy 1 and of numpy 2
    both = [ours[0].replace(*names), ours[0].replace(*names[::-1])]
    content = {b"data": np.asfortranarray(planes(images)), b"labels": np.array(labels)}
    theirs = python2(images, labels)
    assert np.array_equal(pickle.loads(theirs, encoding="bytes")[b"data"], planes(images))
    for data in (theirs, *ours, *both, pickle.dumps(content, protocol=2)):
        batch(tmp_path, data)
        image_set = load("cifar10", tmp_path)
        assert torch.equal(image_set.images, as_tensor(images))
        assert image_set.labels.tolist() == labels
