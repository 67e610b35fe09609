"""Sets of images: publishers' layouts, reducing, made-up images, and what happens where data is absent."""

import gzip
import io
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gramwatch import DataError, MissingDataError, datasets, networks
from gramwatch.datasets import CATALOGUE, load, synthetic


def photographs(count, size, seed=0):
    """Random colour images N x H x W x 3."""
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def save(folder, images, end="png", **settings):
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:04d}.{end}", **settings)


def planes(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def as_tensor(images):
    return torch.from_numpy(images.copy()).permute(0, 3, 1, 2)


def cifar_batch(path, images, labels, key=b"labels"):
    """A batch as Python 2 and its numpy wrote it."""
    content = pickle.dumps({b"data": planes(images), key: list(labels)}, protocol=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def test_cifar10_is_the_same_in_both_layouts(tmp_path):
    images, labels = photographs(12, 32), np.arange(12) % 10
    for i in range(5):
        part = slice(2 * i, 2 * i + 2)
        cifar_batch(
            tmp_path / f"py/cifar-10-batches-py/data_batch_{i + 1}", images[part], labels[part].tolist()
        )
        folder = tmp_path / "bin" / "cifar-10-batches-bin"
        folder.mkdir(parents=True, exist_ok=True)
        rows = np.concatenate([labels[part, None].astype(np.uint8), planes(images[part])], axis=1)
        (folder / f"data_batch_{i + 1}.bin").write_bytes(rows.tobytes())
    for layout in ("py", "bin"):
        found = load("cifar10", tmp_path / layout, split="train")
        assert found.name == "CIFAR-10"
        assert torch.equal(found.images, as_tensor(images[:10]))
        assert found.labels.tolist() == labels[:10].tolist()


def test_cifar100_has_its_fine_labels_in_both_layouts(tmp_path):
    images, fine = photographs(3, 32), [7, 99, 0]
    cifar_batch(tmp_path / "py/cifar-100-python/test", images, fine, b"fine_labels")
    (tmp_path / "bin/cifar-100-binary").mkdir(parents=True)
    rows = np.concatenate([np.full((3, 1), 5, np.uint8), np.uint8(fine)[:, None], planes(images)], axis=1)
    (tmp_path / "bin/cifar-100-binary/test.bin").write_bytes(rows.tobytes())
    for layout in ("py", "bin"):
        found = load("cifar100", tmp_path / layout)
        assert torch.equal(found.images, as_tensor(images))
        assert found.labels.tolist() == fine


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


def batch(tmp_path, content):
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    datasets._load.cache_clear()
    return path


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
        nested(1_000_000),  # hashed, it overflows Python's stack
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


def test_a_batch_far_too_large_is_not_read(tmp_path):
    with batch(tmp_path, b"").open("wb") as file:
        file.truncate(6 * 2**30)
    with pytest.raises(DataError, match="6,442,450,944 bytes: no batch of CIFAR"):
        load("cifar10", tmp_path)


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
    for each in (theirs, *ours, *both, pickle.dumps(content, protocol=2)):
        batch(tmp_path, each)
        found = load("cifar10", tmp_path)
        assert torch.equal(found.images, as_tensor(images))
        assert found.labels.tolist() == labels


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({b"data": planes(photographs(3, 32))}, "it has no b'labels'"),
        ({b"data": planes(photographs(3, 32)), b"labels": [1, 2]}, "3 images and 2 labels"),
        ({b"data": planes(photographs(3, 32)), b"labels": [1, 2, 10]}, "labels are not below 10"),
        ({b"data": planes(photographs(3, 32)), b"labels": [1, 2, -1]}, "labels are not below 10"),
        ({b"data": planes(photographs(3, 32)), b"labels": [1, 2, 0.5]}, "not a whole number"),
        ({b"data": np.zeros((3, 9), np.uint8), b"labels": [1, 2, 3]}, "not rows of 3072 bytes"),
        ({b"data": np.zeros((3, 3072), np.int64), b"labels": [1, 2, 3]}, "not rows of 3072 bytes"),
        ({b"data": np.zeros((3, 3072)), b"labels": [1, 2, 3]}, "not of plain whole numbers"),
    ],
)
def test_labels_and_images_that_do_not_fit_are_refused(content, says, tmp_path):
    path = batch(tmp_path, pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=says) as raised:
        load("cifar10", tmp_path)
    assert str(path) in str(raised.value)


def test_a_file_cut_short_is_named(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "test_batch.bin").write_bytes(bytes(3073 + 100))
    with pytest.raises(DataError, match=r"test_batch\.bin is cut short.*3173 bytes"):
        load("cifar10", tmp_path)


def test_svhn_has_images_last_and_calls_zero_ten(tmp_path):
    from scipy.io import savemat

    images = photographs(4, 32)
    (tmp_path / "svhn").mkdir()
    content = {"X": images.transpose(1, 2, 3, 0), "y": np.uint8([[10], [1], [9], [10]])}
    savemat(tmp_path / "svhn" / "test_32x32.mat", content)
    found = load("svhn", tmp_path)
    assert torch.equal(found.images, as_tensor(images))
    assert found.labels.tolist() == [0, 1, 9, 0]
    (tmp_path / "svhn" / "train_32x32.mat").write_bytes(b"not a matrix at all")
    with pytest.raises(DataError, match=r"train_32x32\.mat is not SVHN's"):
        load("svhn", tmp_path, split="train")


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.tobytes()


def test_idx_files_gzipped_or_not_and_damaged(tmp_path):
    images, labels = photographs(5, 28)[..., 0], np.arange(5, dtype=np.uint8)
    folder = tmp_path / "KMNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    found = load("kmnist", tmp_path)
    assert torch.equal(found.images[:, 0], torch.from_numpy(images.copy()))
    assert found.labels.tolist() == [0, 1, 2, 3, 4]
    for damaged in (gzip.compress(idx(images)[:-1]), gzip.compress(idx(images))[:-20], b""):
        (folder / "t10k-images-idx3-ubyte.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz is not a whole IDX file"):
            load("kmnist", tmp_path, count=len(damaged) + 1)  # another count: not the set read before


def test_real_mnist_padded_as_cifar_networks_take_it(shared_data):
    import real_data

    found = load("mnist", shared_data, size=32, grey=False)
    assert found.images.shape == (10_000, 3, 32, 32)
    expected = real_data.padded_grey(shared_data / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz", 200)
    assert torch.equal(found.images[:200], as_tensor(expected))
    assert found.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert "put on black of 32 x 32" in found.description
    assert "repeated to three channels" in found.description


def test_tiny_imagenet_has_labels_where_its_lists_are(tmp_path):
    images = photographs(4, 64)
    folder = tmp_path / "tiny-imagenet-200"
    save(folder / "val" / "images", images)
    save(folder / "test" / "images", images[:2])
    for name in ("n02", "n01"):
        save(folder / "train" / name / "images", images[:1])
    assert load("tiny_imagenet", tmp_path, split="val").labels is None
    (folder / "wnids.txt").write_text("n02\nn01\n")
    lines = [f"{i:04d}.png\t{('n01', 'n02')[i % 2]}\t0\t0\t1\t1\n" for i in range(4)]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    found = load("tiny_imagenet", tmp_path, split="val", seed=1)  # another seed: not the set read before
    assert torch.equal(found.images, as_tensor(images))
    assert found.labels.tolist() == [0, 1, 0, 1]
    assert load("tiny_imagenet", tmp_path, split="train").labels.tolist() == [0, 1]
    assert load("tiny_imagenet", tmp_path).labels is None


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("miniplaces", "miniplaces/val"),
        ("miniplaces", "miniplaces/images/val"),
        ("dtd_10_classes", "dtd-32"),
        ("lsun_resize", "LSUN_resize/LSUN_resize"),
        ("lsun_crop", "LSUN/test"),
        ("imagenet_resize", "Imagenet_resize/Imagenet_resize"),
        ("imagenet_crop", "Imagenet/test"),
        ("isun", "iSUN/iSUN_patches"),
    ],
)
def test_folders_of_publishers(tmp_path, name, folder):
    images = photographs(3, 32)
    save(tmp_path / folder, images)
    (tmp_path / folder / "._0000.png").write_bytes(b"what some systems leave in archives")
    found = load(name, tmp_path, size=32)
    assert torch.equal(found.images, as_tensor(images))
    assert found.name == CATALOGUE[name].title  # nothing was done to them
    with pytest.raises(MissingDataError):
        load(name, tmp_path / "elsewhere")


def test_dtd_and_folders_have_classes_and_need_a_size(tmp_path):
    for number, name in enumerate(("zigzagged", "banded")):
        save(tmp_path / "dtd" / "images" / name, photographs(2, 40 + 10 * number, seed=number), "jpg")
    with pytest.raises(DataError, match=r"several sizes, from \(40, 40, 3\) to \(50, 50, 3\): give one"):
        load("dtd", tmp_path)
    found = load("dtd", tmp_path, size=32)
    assert found.name == "DTD, anti-aliased"
    assert found.labels.tolist() == [0, 0, 1, 1]
    same = load(str(tmp_path / "dtd" / "images"), size=32)
    assert same.name == "images, anti-aliased"
    assert torch.equal(same.images, found.images)
    (tmp_path / "dtd" / "images" / "banded" / "0000.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"0000\.jpg is not a readable image"):
        load("dtd", tmp_path, size=31)


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    save(folder, photographs(6, 64))
    return str(folder)


def test_the_three_ways_of_reducing(pictures):
    original = as_tensor(photographs(6, 64))
    nearest = load(pictures, reduce="nearest")
    assert nearest.name == "pictures, nearest"
    assert any(torch.equal(nearest.images, original[:, :, i::2, j::2]) for i in (0, 1) for j in (0, 1))
    smooth = load(pictures, reduce="antialiased")
    assert smooth.name == "pictures, anti-aliased"
    # Averaging four independent pixels and their neighbours leaves well under half of the contrast.
    assert smooth.images.float().std() < 0.6 * nearest.images.float().std()
    direct = np.asarray(Image.fromarray(photographs(6, 64)[0]).resize((32, 32), Image.Resampling.BICUBIC))
    assert torch.equal(smooth.images[0], as_tensor(direct[None])[0])
    crops = load(pictures, reduce="crop")
    assert crops.name == "pictures, crops"
    for image, crop in zip(original, crops.images, strict=True):
        windows = image.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4)
        assert (windows == crop).flatten(2).all(2).sum() == 1
    assert {n.images.shape for n in (nearest, smooth, crops)} == {(6, 3, 32, 32)}
    assert load(pictures, reduce="nearest", size=28).name == "pictures, nearest 28 x 28"
    with pytest.raises(DataError, match=r"reduce='bilinear': choose from nearest, antialiased, crop"):
        load(pictures, reduce="bilinear")


def test_draws_and_crops_depend_on_the_seed_alone(pictures):
    crops = load(pictures, reduce="crop")
    few = load(pictures, reduce="crop", count=3)
    assert all(any(torch.equal(a, b) for b in crops.images) for a in few.images)
    assert torch.equal(load(pictures, reduce="crop", count=5).images[:3], few.images)
    assert not torch.equal(load(pictures, reduce="crop", seed=1).images, crops.images)
    everything = load(pictures, count=6).images
    assert len(everything.flatten(1).unique(dim=0)) == 6
    assert "3 of 6, drawn with seed 0" in few.description


def test_images_that_are_not_square_give_their_middle(tmp_path):
    wide = np.zeros((32, 96, 3), np.uint8)
    wide[:, 32:64] = 255
    save(tmp_path, [wide])
    assert (load(str(tmp_path), size=16).images == 255).all()
    assert load(str(tmp_path), size=16, reduce="crop").images.shape == (1, 3, 16, 16)


def test_small_images_are_put_on_black(tmp_path):
    save(tmp_path, [np.full((20, 30, 3), 9, np.uint8)])
    image = load(str(tmp_path), size=32).images[0, 0]
    assert (image[6:26, 1:31] == 9).all()
    assert image.sum() == 9 * 20 * 30


def test_grey_is_as_pillow_makes_it_and_is_in_the_name(pictures):
    found = load(pictures, size=28, grey=True)
    assert found.name == "pictures, anti-aliased 28 x 28, grey"
    assert found.images.shape == (6, 1, 28, 28)
    colour = load(pictures, size=28).images[0].permute(1, 2, 0).numpy()
    pillow = np.asarray(Image.fromarray(colour).convert("L")).astype(int)
    assert np.abs(found.images[0, 0].numpy().astype(int) - pillow).max() <= 1
    assert "made grey" in found.description


def test_labels_go_with_their_images(tmp_path):
    (tmp_path / "cifar100-subset").mkdir()
    images = np.repeat(np.arange(50, dtype=np.uint8), 32 * 32 * 3).reshape(50, 32, 32, 3)
    np.save(tmp_path / "cifar100-subset" / "images.npy", images)
    np.save(tmp_path / "cifar100-subset" / "labels.npy", np.arange(50))
    found = load("cifar100_subset", tmp_path, count=20)
    assert found.labels.tolist() == found.images[:, 0, 0, 0].tolist()
    assert len(set(found.labels.tolist())) == 20
    small = load("cifar100_subset", tmp_path, count=20, size=28, grey=True)
    assert torch.equal(small.labels, found.labels)
    assert small.images[:, 0, 5, 5].tolist() == found.labels.tolist()


def test_parts_of_cifar100_are_disjoint_and_have_every_class(tmp_path):
    """Each image holds its own number, and the labels are in no order."""
    (tmp_path / "cifar100-subset").mkdir()
    numbers = np.arange(120)
    images = np.broadcast_to(numbers.astype(np.uint8)[:, None, None, None], (120, 32, 32, 3))
    labels = np.random.default_rng(0).permutation(numbers % 2)
    np.save(tmp_path / "cifar100-subset" / "images.npy", images)
    np.save(tmp_path / "cifar100-subset" / "labels.npy", labels)
    parts = {split: load("cifar100_parts", tmp_path, split=split) for split in ("train", "val", "test")}
    for split, of_each_class in (("train", 40), ("val", 10), ("test", 10)):
        found = parts[split]
        assert found.labels.bincount().tolist() == [of_each_class, of_each_class]
        assert found.labels.tolist() == labels[found.images[:, 0, 0, 0].numpy()].tolist()
    together = torch.cat([found.images[:, 0, 0, 0] for found in parts.values()])
    assert sorted(together.tolist()) == numbers.tolist()
    # Not the last of the file, which might be of the official test split.
    assert sorted(parts["test"].images[:, 0, 0, 0].tolist()) != sorted(
        n for c in (0, 1) for n in numbers[labels == c][50:].tolist()
    )


def test_the_part_of_svhn_has_images_alone(tmp_path):
    (tmp_path / "svhn-subset").mkdir()
    images = photographs(3, 32)
    np.save(tmp_path / "svhn-subset" / "images.npy", images)
    found = load("svhn_subset", tmp_path)
    assert found.name == "SVHN, first 1,083 training images"
    assert found.labels is None
    assert torch.equal(found.images, torch.from_numpy(images).permute(0, 3, 1, 2))
    with pytest.raises(DataError, match="no split 'train'"):
        load("svhn_subset", tmp_path, split="train")


def test_an_absent_set_names_the_file_the_place_and_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAMWATCH_DATA", str(tmp_path))
    assert datasets.default_root() == tmp_path
    with pytest.raises(MissingDataError) as raised:
        load("svhn")
    for part in (
        str(tmp_path / "svhn" / "test_32x32.mat"),
        "gramwatch data get svhn",
        str(tmp_path / "svhn"),
    ):
        assert part in str(raised.value)
    with pytest.raises(MissingDataError, match="not published anywhere"):
        load("cifar100_subset")
    monkeypatch.delenv("GRAMWATCH_DATA")
    assert datasets.default_root() == Path.home() / ".cache" / "gramwatch" / "data"


def test_what_cannot_be_asked_for(tmp_path):
    with pytest.raises(DataError, match=r"no set and no folder 'cifar11'\. The sets are cifar10, "):
        load("cifar11", tmp_path)
    with pytest.raises(DataError, match="'mnist' has no split 'val': choose from train, test"):
        load("mnist", tmp_path, split="val")
    with pytest.raises(DataError, match="count=0"):
        load("gaussian", count=0)


def test_made_up_images_have_the_published_parameters():
    gaussian = load("gaussian", count=200).images / 255
    assert gaussian.shape == (200, 3, 32, 32)
    # A normal of mean and deviation 0.5 loses 15.9 % at each end to clipping.
    assert (gaussian == 0).double().mean() == pytest.approx(0.1587 + 0.0016, abs=0.003)
    assert (gaussian == 1).double().mean() == pytest.approx(0.1587 + 0.0016, abs=0.003)
    # 125.3, 123.0 and 113.9 less and plus 63.0, 62.1 and 66.7.
    dark, light = load("rademacher", count=50).images.unique().view(2, 3).tolist()
    assert (dark, light) == ([47, 61, 62], [181, 185, 188])
    assert load("bernoulli", count=50).images.unique().tolist() == [0, 255]
    assert load("bernoulli", count=200).images.eq(255).double().mean() == pytest.approx(0.5, abs=0.005)
    blobs = load("blobs", count=50).images
    assert set(blobs.unique().tolist()) <= {0, *range(191, 256)}
    assert 0.05 < blobs.eq(0).double().mean() < 0.95
    # The blur goes across channels: shapes are white but for their edges.
    assert np.corrcoef(blobs[:, 0].flatten(), blobs[:, 1].flatten())[0, 1] > 0.5
    assert load("gaussian", count=3, size=28, grey=True).images.shape == (3, 1, 28, 28)
    for name in synthetic.SOURCES:
        found = load(name, count=4, seed=3)
        assert torch.equal(found.images, load(name, count=4, seed=3).images)
        assert not torch.equal(found.images, load(name, count=4, seed=4).images)
        assert "space" in found.description


def test_normalised_values_reach_the_wide_resnet_but_for_rounding():
    prepare = networks.load("wrn40_2").prepare
    coins = synthetic.rademacher(20, (3, 32, 32))
    torch.testing.assert_close(prepare(load("rademacher", count=20).images), coins, atol=0.009, rtol=0)
    values = synthetic.gaussian_normalised(20, (3, 32, 32))
    assert values.abs().max() == 1
    assert values.std() == pytest.approx(0.48, abs=0.02)
    torch.testing.assert_close(
        prepare(load("gaussian_normalised", count=20).images), values, atol=0.009, rtol=0
    )


def test_sets_are_kept_in_memory(pictures):
    first = load(pictures, reduce="nearest")
    assert load(pictures, reduce="nearest") is first
    shutil.rmtree(pictures)
    assert load(pictures, reduce="nearest") is first


def test_every_checksum_has_a_source_and_every_set_a_line_in_the_docs():
    page = (Path(__file__).parents[1] / "docs" / "datasets.md").read_text(encoding="utf-8")
    for name, source in CATALOGUE.items():
        assert f"`{name}`" in page
        for download in source.downloads:
            assert download.url.startswith("http")
            for checksum, length in ((download.md5, 16), (download.sha256, 32)):
                assert checksum is None or len(bytes.fromhex(checksum)) == length
            if download.has_checksum:
                assert download.url.startswith("https:")
                assert download.cited.partition(",")[0] in page
            else:
                assert name == "miniplaces"


def test_a_label_of_the_binary_layout_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"\x0b" + bytes(3072))
    with pytest.raises(DataError, match=r"test_batch\.bin is damaged.*a label is not below 10"):
        load("cifar10", tmp_path)


def test_idx_files_that_do_not_fit_or_unpack_to_too_much_are_refused(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images, labels = folder / "t10k-images-idx3-ubyte.gz", folder / "t10k-labels-idx1-ubyte.gz"
    good = idx(photographs(3, 28)[..., 0])
    huge = bytes([0, 0, 8, 3]) + (10**6).to_bytes(4, "big") * 3
    for content, tags, wrong, says in [
        (good, np.arange(2, dtype=np.uint8), labels, "does not hold 3 labels below 10"),
        (good, np.uint8([1, 2, 10]), labels, "does not hold 3 labels below 10"),
        (idx(photographs(3, 20)[..., 0]), np.arange(3, dtype=np.uint8), images, "not images of 28 x 28"),
        (
            huge + bytes(2**20),
            np.arange(3, dtype=np.uint8),
            images,
            "asks for 1,000,000,000,000,000,000 bytes",
        ),
    ]:
        images.write_bytes(gzip.compress(content))
        labels.write_bytes(gzip.compress(idx(tags)))
        datasets._load.cache_clear()
        with pytest.raises(DataError, match=says) as raised:
            load("mnist", tmp_path)
        assert str(wrong) in str(raised.value)


def test_numpy_files_that_are_cut_short_or_hold_something_else_are_refused(tmp_path):
    folder = tmp_path / "cifar100-subset"
    folder.mkdir()
    images, labels = np.zeros((3, 32, 32, 3), np.uint8), np.arange(3)

    def written(array):
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    good = written(images)
    huge = good.replace(b"(3, 32, 32, 3), }", b"(999999999, 3), }")
    assert huge != good
    for content, tags, wrong in [
        (good[:-1], written(labels), "images"),
        (good[:50], written(labels), "images"),
        (b"", written(labels), "images"),
        (huge, written(labels), "images"),
        (written(images.astype(np.float32)), written(labels), "images"),
        (written(images[:, :20]), written(labels), "images"),
        (good, written(labels[:2]), "labels"),
        (good, written(labels / 2), "labels"),
        (good, written(np.array([{}, [], 3], object)), "labels"),
        (good, pickle.dumps([1, 2, 3]), "labels"),
    ]:
        (folder / "images.npy").write_bytes(content)
        (folder / "labels.npy").write_bytes(tags)
        datasets._load.cache_clear()
        with pytest.raises(DataError) as raised:
            load("cifar100_subset", tmp_path)
        assert str(folder / f"{wrong}.npy") in str(raised.value)


def test_svhn_labels_and_images_that_do_not_fit_are_refused(tmp_path):
    from scipy.io import savemat

    (tmp_path / "svhn").mkdir()
    images = photographs(3, 32).transpose(1, 2, 3, 0)
    for content, says in [
        ({"X": images, "y": np.uint8([[1], [2]])}, "3 images, and labels of shape"),
        ({"X": images, "y": np.uint8([[1], [2], [11]])}, "not from 1 to 10"),
        ({"X": images}, "'y'"),
        ({"X": images.astype(float), "y": np.uint8([[1], [2], [3]])}, "its images are double"),
        ({"X": images[:9], "y": np.uint8([[1], [2], [3]])}, "its images are uint8 of shape"),
    ]:
        savemat(tmp_path / "svhn" / "test_32x32.mat", content)
        datasets._load.cache_clear()
        with pytest.raises(DataError, match=rf"test_32x32\.mat.*{says}"):
            load("svhn", tmp_path)


def test_lists_of_tiny_imagenet_that_are_damaged_are_named(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    save(folder / "val" / "images", photographs(1, 64))
    listed, classes = folder / "val" / "val_annotations.txt", folder / "wnids.txt"
    for line, names in ((b"0000.png\tn09\n", b"n01\n"), (b"0000.png", b"n01"), (b"\xff\xfe", b"n01")):
        listed.write_bytes(line)
        classes.write_bytes(names)
        datasets._load.cache_clear()
        with pytest.raises(DataError, match=r"val_annotations\.txt"):
            load("tiny_imagenet", tmp_path, split="val")


def test_what_is_no_image_of_the_formats_we_read_is_named(tmp_path):
    tmp_path = tmp_path / "pictures"
    pcx = io.BytesIO()
    Image.fromarray(photographs(1, 32)[0]).save(pcx, "PCX")
    contents = pcx.getvalue(), b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x89PNG\r\n\x1a\n" + bytes(60)
    for number, content in enumerate(contents):
        (tmp_path / str(number)).mkdir(parents=True)
        (tmp_path / str(number) / "picture.png").write_bytes(content)
        with pytest.raises(DataError, match=r"picture\.png is not a readable image"):
            load(str(tmp_path / str(number)), size=8)
