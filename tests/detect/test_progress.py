"""What a fit knows of the examples it counted: the same ones are recognised in any batches."""

import json

import pytest
import torch

import gramwatch
from gramwatch import ArtifactError, GramDetector, GramwatchWarning, Guard, InputError
from gramwatch.detect.progress import KEPT, MOST_NUMBERS, Counted, Read, checksums
from gramwatch.files import artifact
from gramwatch.inputs.batches import tensors_in
from gramwatch.methods import Mahalanobis
from tests.guarded import images, made


def test_an_example_has_one_checksum_in_any_batch_and_layout():
    large = torch.randn(30, 3, 40, 50)
    together = checksums(large)
    assert together.unique().numel() == 30
    assert together.equal(torch.cat([checksums(part) for part in large.split(7)]))
    assert together.equal(checksums(large.to(memory_format=torch.channels_last)))
    assert together.flip(0).equal(checksums(large.flip(0)))
    assert together.equal(checksums((large,)))


def test_checksums_are_computed_where_the_inputs_are():
    """Nothing is copied from the CPU, which would wait for a GPU."""
    checksums(torch.zeros(2, 5))
    assert checksums(torch.empty(3, 5, device="meta")).device.type == "meta"


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool],
)
def test_other_examples_have_other_checksums(dtype):
    one = torch.zeros(1, 9, dtype=dtype)
    others = torch.eye(9).to(dtype)
    assert torch.cat([checksums(one), checksums(others)]).unique().numel() == 10


def test_every_tensor_of_an_input_counts():
    tokens, mask = torch.arange(12).reshape(4, 3), torch.ones(4, 3, dtype=torch.int64)
    both = checksums({"input_ids": tokens, "mask": mask})
    assert not both.eq(checksums({"input_ids": tokens, "mask": mask - torch.eye(4, 3).long()}))[:3].any()
    assert not both.eq(checksums({"input_ids": mask, "mask": tokens})).any()
    scale = torch.tensor(3.0)  # of no example
    assert both.equal(checksums({"input_ids": tokens, "mask": mask, "scale": scale}))


def test_large_examples_are_read_in_part_and_evenly():
    one = torch.zeros(1, 3, 224, 224)
    other = one.clone()
    other[..., 150:, 150:] = 1
    assert checksums(one) != checksums(other)
    assert one.numel() > MOST_NUMBERS


@pytest.mark.parametrize(("first", "second", "shared"), [(40, 40, 0), (100, 60, 45), (9000, 6000, 6000)])
def test_the_share_of_equal_examples_is_estimated(first, second, shared):
    sums = checksums(torch.randn(first + second, 4))
    a, b = Counted.of(sums[:first]), Counted.of(sums[first - shared : first - shared + second])
    share = shared / min(first, second)
    assert a.share_in_both(b) == b.share_in_both(a) == pytest.approx(share, abs=0.1)


def test_what_is_joined_in_parts_is_the_whole():
    sums = checksums(torch.randn(2000, 4))
    whole = Counted.of(sums)
    joined = Counted()
    for part in sums.split(64):
        joined = joined.joined(Counted.of(part))
    assert joined == whole
    assert whole.number == 2000
    assert len(whole.sample) == KEPT
    assert Counted.from_json(json.loads(json.dumps(whole.as_json()))) == whole


def test_too_few_comparable_checksums_say_nothing():
    sums = checksums(torch.randn(100_000, 2))
    assert Counted.of(sums).share_in_both(Counted.of(sums[:50])) == 0
    assert Counted().share_in_both(Counted.of(sums)) == 0


def test_the_order_is_read_but_not_the_batches():
    sums = checksums(images(50, 0))
    whole, parts, turned = Read(), Read(), Read()
    whole.add(sums)
    for part in sums.split(7):
        parts.add(part)
    turned.add(sums.flip(0))
    assert whole == parts
    assert whole.number == turned.number
    assert whole != turned


# --- merging -----------------------------------------------------------------------------------------


def fitted(kind, *batches, **options):
    return kind(made(), **options).fit(list(batches), progress=False)


KINDS = [(GramDetector, {"orders": (1,)}), (Mahalanobis, {}), (Guard, {"orders": (1,)})]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_two_loads_of_one_file_are_not_merged(kind, options, tmp_path):
    first = fitted(kind, images(300, 0), **options)
    first.save(tmp_path / "first")
    one, two = (gramwatch.load(tmp_path / "first", made()) for _ in range(2))
    with pytest.raises(ValueError, match=r"the same 300 examples\. A fit cannot be merged with itself"):
        one.merge(two)
    other = fitted(kind, images(300, 1), **options)
    merged = one.merge(other)
    assert merged.counted.number == 600
    merged.save(tmp_path / "merged")
    with pytest.warns(GramwatchWarning, match="600 and 300 examples. About 100% are the same") as caught:
        gramwatch.load(tmp_path / "merged", made()).merge(two)
    assert len(caught) == 1  # once, not for every member


def test_the_members_of_a_guard_know_what_they_counted():
    guard = fitted(Guard, images(300, 0), orders=(1,))
    alone = fitted(GramDetector, images(300, 0), taps="spread", orders=(1,), pixels=256, channels=128)
    with pytest.raises(ValueError, match="the same 300 examples"):
        alone.merge(guard.members["gram"])
    again = Guard.of(guard.members)
    assert again.counted == guard.counted


def test_a_further_fit_adds_and_a_reset_forgets():
    detector = fitted(GramDetector, images(400, 0), orders=(1,))
    detector.fit([images(60, 1)], progress=False)
    assert detector.counted.number == 460
    assert detector.reset().counted == Counted()


@pytest.mark.parametrize(
    "forged",
    [
        {"examples": 3},
        {"examples": 1, "checksums": [1, 2]},
        {"examples": 3, "checksums": [2, 1]},
        {"examples": 3, "checksums": [1, 1]},
        {"examples": 3, "checksums": [2**63]},
        {"examples": 3, "checksums": ["1"]},
        {"examples": 3.0, "checksums": [1]},
        {"examples": 9999, "checksums": list(range(KEPT + 1))},
        [1],
    ],
    ids=lambda forged: str(forged)[:40],
)
def test_a_file_with_forged_checksums_is_refused(forged, tmp_path):
    fitted(GramDetector, images(400, 0), orders=(1,)).save(tmp_path / "file")
    saved = artifact.read(tmp_path / "file")
    tensors = {name: saved.file.tensor(name) for name in saved.file.layout}
    artifact.write(tmp_path / "file", {**saved.header, "counted": forged}, tensors)
    with pytest.raises(ArtifactError):
        gramwatch.load(tmp_path / "file", made())


# --- a fit that goes on ------------------------------------------------------------------------------


def stopping(batches, after):
    yield from batches[:after]
    raise KeyboardInterrupt


@pytest.fixture(params=[k for k, _ in KINDS], ids=lambda kind: kind.__name__)
def begun(request, tmp_path):
    """A new detector, and the checkpoint of a fit that was stopped after 10 of 40 batches of 25."""
    options = dict(KINDS)[request.param]
    with pytest.raises(KeyboardInterrupt):
        request.param(made(), **options).fit(
            stopping(images(1000, 0).split(25), 10), checkpoint=tmp_path / "fit", progress=False
        )
    return lambda: request.param(made(), **options), tmp_path / "fit"


def test_half_the_batch_size_after_a_resume_is_refused(begun):
    new, checkpoint = begun
    for size, examples in ((12, 120), (50, 500)):
        for _ in range(2):  # a refusal leaves the checkpoint as it is
            with pytest.raises(InputError, match=f"250 examples in 10 batches.* the loader have {examples}"):
                new().fit(images(1000, 0).split(size), checkpoint=checkpoint, progress=False)
    whole = new().fit(images(1000, 0).split(25), checkpoint=checkpoint, progress=False)
    assert whole.counted == new().fit(images(1000, 0).split(250), progress=False).counted
    for name, tensor in whole.contents()[1].items():
        assert torch.equal(tensor, new().fit(images(1000, 0).split(25), progress=False).contents()[1][name])


def test_another_order_after_a_resume_is_said(begun):
    new, checkpoint = begun
    order = torch.randperm(1000)
    with pytest.warns(GramwatchWarning, match="the first 10 batches of the loader are not those of"):
        new().fit(images(1000, 0)[order].split(25), checkpoint=checkpoint, progress=False)


def test_a_checkpoint_that_holds_all_is_compared_too(tmp_path):
    detector = GramDetector(made(), orders=(1,))
    detector.fit(images(400, 0).split(100), checkpoint=tmp_path / "fit", progress=False)
    with pytest.raises(InputError, match=r"holds 400 examples in 4 batches.* the loader have 40"):
        GramDetector(made(), orders=(1,)).fit(
            images(400, 0)[:40].split(10), checkpoint=tmp_path / "fit", progress=False
        )


def test_a_further_fit_with_a_checkpoint_compares_its_own_examples(tmp_path):
    """What the detector had counted before is in the checkpoint, too, but the loader does not yield it."""
    first = GramDetector(made(), orders=(1,)).fit(images(400, 1).split(50), progress=False)
    batches = images(400, 0).split(100)
    with pytest.raises(KeyboardInterrupt):
        first.fit(stopping(batches, 2), checkpoint=tmp_path / "fit", progress=False)
    resumed = GramDetector(made(), orders=(1,)).fit(batches, checkpoint=tmp_path / "fit", progress=False)
    assert resumed.counted.number == int(resumed.class_counts_.sum()) == 800


def test_checkpoints_and_files_of_earlier_versions_go_on(tmp_path):
    new = GramDetector(made(), orders=(1,))
    with pytest.raises(KeyboardInterrupt):
        new.fit(stopping(images(400, 0).split(100), 2), checkpoint=tmp_path / "fit", progress=False)
    saved = artifact.read(tmp_path / "fit")
    tensors = {name: saved.file.tensor(name) for name in saved.file.layout}
    header = {name: value for name, value in saved.header.items() if name not in ("counted", "read")}
    artifact.write(tmp_path / "fit", header, tensors)
    resumed = GramDetector(made(), orders=(1,)).fit(
        images(400, 0).split(100), checkpoint=tmp_path / "fit", progress=False
    )
    assert int(resumed.class_counts_.sum()) == 400


def test_inputs_do_not_change_by_being_counted():
    batch = images(20, 0)
    before = [t.clone() for t in tensors_in(batch)]
    checksums(batch)
    assert all(map(torch.equal, before, tensors_in(batch)))
