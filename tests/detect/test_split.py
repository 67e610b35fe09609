"""The split of calibration data: one random order for halves and kept inputs, however the data are read."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gramwatch.detect.split import KeptInputs, Reading, digests, halves, priorities
from gramwatch.inputs.batches import mapped
from tests import oracle

IMAGES = torch.randn(120, 2, 3, generator=torch.Generator().manual_seed(0))


def settled(kept: KeptInputs) -> KeptInputs:
    """What one process keeps, which has read a whole loader."""
    reading = kept.reading()
    firsts = np.cumsum([0, *map(len, reading.digests)])[:-1].tolist()
    kept.settle([reading], [firsts], 0)
    return kept


def read(batches, **limits) -> KeptInputs:
    """What one process keeps of these batches."""
    kept, first = KeptInputs(7, **limits), 0
    for batch in batches:
        kept.add(batch, first)
        first += len(batch if isinstance(batch, Tensor) else batch["ids"])
    return settled(kept)


def dealt(batches, size: int, most: int) -> list[KeptInputs]:
    """What processes keep that deal out these batches. They count with the size of their first batch."""
    ranks = [KeptInputs(7, most=most) for _ in range(size)]
    starts = np.cumsum([0, *map(len, batches)])[:-1].tolist()
    for number, batch in enumerate(batches):
        usual = len(batches[number % size])
        ranks[number % size].add(batch, number * usual)
    readings = [kept.reading() for kept in ranks]
    for rank, kept in enumerate(ranks):
        kept.settle(readings, [starts[r::size] for r in range(size)], rank)
    return ranks


def inputs_of(kept: KeptInputs) -> dict[int, Tensor]:
    return {int(n): x for numbers, batch in kept.batches(5) for n, x in zip(numbers, batch, strict=True)}


@pytest.mark.parametrize(("examples", "seed"), [(1, 0), (2, 0), (161, 7), (1000, 2**63 + 5)])
def test_the_random_order_is_that_of_splitmix64(examples, seed):
    standard, ranking = halves(examples, seed)
    assert torch.cat([standard, ranking]).tolist() == oracle.drawn(examples, seed).tolist()
    assert len(ranking) - len(standard) == examples % 2  # an odd one ranks


def test_priorities_are_spread_evenly_for_neighbouring_seeds_and_numbers():
    numbers = torch.arange(20_000)
    shares = np.stack([priorities(numbers, seed) / 2.0**64 for seed in range(8)])
    assert np.abs(np.corrcoef(shares)[np.triu_indices(8, 1)]).max() < 0.03
    assert np.abs([np.corrcoef(row[:-1], row[1:])[0, 1] for row in shares]).max() < 0.03
    for row in shares:
        assert np.abs(np.histogram(row, 20, (0, 1))[0] - 1000).max() < 150
        assert len(np.unique(row)) == len(row)


@pytest.mark.parametrize("size", [1, 7, 64, 120])
def test_kept_inputs_are_the_first_of_the_order_in_batches_of_any_size(size):
    kept = read(iter(IMAGES.split(size)), most=30)
    assert kept.numbers.tolist() == oracle.drawn(120, 7)[:30].tolist()
    found = inputs_of(kept)
    assert found.keys() == set(kept.numbers.tolist())
    for number, x in found.items():
        assert x.equal(IMAGES[number])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_kept_inputs_are_the_same_however_many_processes_share_a_loader(ranks):
    dealt_out = dealt(IMAGES.split(16), ranks, 30)
    together: dict[int, Tensor] = {}
    for kept in dealt_out:
        assert kept.numbers.tolist() == oracle.drawn(120, 7)[:30].tolist()
        together |= inputs_of(kept)
    assert together.keys() == set(kept.numbers.tolist())
    assert all(x.equal(IMAGES[number]) for number, x in together.items())


def test_batches_of_all_sizes_that_are_dealt_out_keep_right_inputs_though_fewer():
    kept_of_ranks = dealt(IMAGES.split([3, 30, 1, 17, 9, 40, 20]), 2, 40)
    standard, _ = halves(120, 7)
    for kept in kept_of_ranks:
        kept.restrict(standard)
        assert kept.numbers.equal(kept_of_ranks[0].numbers)
        for number, x in inputs_of(kept).items():
            assert x.equal(IMAGES[number])
            assert number in standard
    assert sum(len(inputs_of(kept)) for kept in kept_of_ranks) == len(kept) > 5


def test_no_more_inputs_are_kept_than_their_memory_allows():
    bytes_of_one = 4 * IMAGES[0].numel()
    kept = read(IMAGES.split(16), most=100, most_bytes=11 * bytes_of_one + 1)
    assert kept.numbers.tolist() == oracle.drawn(120, 7)[:11].tolist()
    # An input too large for the limit ends the run: otherwise what is kept would depend on the size.
    first = int(oracle.drawn(120, 7)[3])
    batches = [x[None] if n != first else x[None].repeat(1, 1, 99) for n, x in enumerate(IMAGES)]
    kept = read(batches, most=100, most_bytes=11 * bytes_of_one + 1)
    assert kept.numbers.tolist() == oracle.drawn(120, 7)[:3].tolist()


def test_a_kept_input_holds_no_more_memory_than_its_own():
    kept = KeptInputs(0)
    kept.add(IMAGES, 0)
    for *_, example in kept._heap:
        assert example.inputs.untyped_storage().nbytes() == 4 * IMAGES[0].numel() == example.bytes


def test_texts_of_any_length_are_kept_with_their_masks_and_joined_if_of_one_length():
    generator = torch.Generator().manual_seed(1)
    batches = []
    for count, length in [(9, 4), (5, 6), (8, 4), (3, 5)]:
        ids = torch.randint(1, 90, (count, length), generator=generator)
        nest = (ids.float(), [ids + 1])
        shared = torch.arange(length)  # of the whole batch
        batches.append({"ids": ids, "attention_mask": ids > 20, "nest": nest, "places": shared, "use": True})
    kept = read(batches)
    assert len(kept) == 25
    seen = []
    for numbers, batch in kept.batches(4):
        assert 1 <= len(numbers) <= 4
        assert batch["use"] is True
        assert batch["places"].equal(torch.arange(batch["ids"].shape[1]))
        assert batch["nest"][0].equal(batch["ids"].float())
        assert batch["nest"][1][0].equal(batch["ids"] + 1)
        assert batch["attention_mask"].equal(batch["ids"] > 20)
        seen += zip(numbers.tolist(), batch["ids"].tolist(), strict=True)
    every = [row for batch in batches for row in batch["ids"].tolist()]
    assert dict(seen) == dict(enumerate(every))
    chosen = [3, 20]
    assert sorted(n for numbers, _ in kept.batches(9, chosen) for n in numbers.tolist()) == chosen


def test_inputs_that_share_other_values_are_not_joined():
    batches = [{"ids": torch.zeros(3, 2), "scale": torch.tensor(float(i))} for i in (1, 1, 2)]
    joined = [(len(numbers), float(batch["scale"])) for numbers, batch in read(batches).batches(9)]
    assert sorted(joined) == [(3, 2.0), (6, 1.0)]


def test_copies_are_counted_to_the_bit_whatever_process_read_them():
    images = IMAGES.clone()
    images[50] = images[7]
    images[51] = images[7]
    images[90] = images[3] + 1e-7
    for size in (1, 2, 3):
        for kept in dealt(images.split(16), size, 10):
            assert kept.copies(torch.arange(120)) == 2
            assert kept.copies(torch.tensor([7, 50, 60, 61])) == 1
            assert kept.copies(torch.tensor([50, 60])) == 0
    assert KeptInputs(0).copies(torch.arange(5)) == 0  # nothing was read


def test_checksums_are_of_bytes_shapes_and_types_of_all_tensors():
    x = torch.zeros(2, 4)
    different = [x, x.view(2, 2, 2), x.double(), torch.zeros(2, 2).double(), x + 1, (x, x), {"a": (x, x + 1)}]
    different += [torch.zeros(2, 0), torch.zeros(2), x.bool(), x.bfloat16(), torch.zeros(2, 4, 0)]
    found = [digests(inputs) for inputs in different]
    assert all(a == b for a, b in found)
    assert len({a for a, _ in found}) == len(found)
    turned = torch.randn(3, 4, 5).transpose(1, 2)
    assert digests(turned) == digests(turned.contiguous())
    assert digests(mapped({"a": x}, lambda t: t + torch.arange(2)[:, None]))[0] == found[0][0]


def test_what_a_process_tells_the_others_is_small():
    kept = KeptInputs(0, most=4)
    kept.add(torch.randn(50, 1000), 0)
    reading = kept.reading()
    assert isinstance(reading, Reading)
    assert reading.sizes == [4000] * 4
    assert [len(batch) for batch in reading.digests] == [50]
    assert sorted(place for _, place in reading.places) == sorted(oracle.drawn(50, 0)[:4].tolist())
