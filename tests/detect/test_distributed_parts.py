"""Which examples several processes count: every one once, or the processes ask."""

import functools
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import gramwatch
from gramwatch import GramDetector, GramwatchError, InputError, RankError
from gramwatch.detect.distributed import Shard
from tests.guarded import images, made
from tests.ranked import Run

SIZE, COUNT, BATCH = 3, 300, 10
DATA = images(COUNT, 1)
CALIBRATION = images(90, 2)


class OwnDice(Dataset):
    """Examples whose augmentation is drawn by a generator of its own."""

    def __init__(self, rank):
        self._dice = np.random.default_rng(rank)

    def __len__(self):
        return COUNT

    def __getitem__(self, number):
        return DATA[number] + float(self._dice.normal())


def part(rank):
    return DATA[rank::SIZE]


def alike_at(places, rank):
    """A part of the data whose examples at some places are blank."""
    own = part(rank).clone()
    own[places] = 0
    return own


def shuffled(rank):
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(rank))
    yield from DATA[order].split(BATCH)


def same_at_first(rank):
    yield DATA[:BATCH]
    yield from images(COUNT, 5 + rank).split(BATCH)


def counted(loader, **options):
    """How many examples a fit counts, and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gramwatch.GramwatchWarning)
        detector = GramDetector(made(), orders=(1,)).fit(loader, progress=False, **options)
    total = int(detector.class_counts_.sum())
    assert detector.counted.number == total
    return total, [text for warning in caught if "few" not in (text := str(warning.message))]


def answered(function, *args, **options):
    """What a call returns, or its error."""
    try:
        return function(*args, **options)
    except GramwatchError as error:
        return error


@functools.cache
def detector():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gramwatch.GramwatchWarning)
        return GramDetector(made(), orders=(1,)).fit(DATA, progress=False)


def calibrated(loader, **options):
    return detector().calibrate(loader, progress=False, **options).calibration().how["examples"]


def evaluated(loader, sets, **options):
    table = gramwatch.evaluate(detector(), loader, sets, draws=1, progress=False, **options)
    return table.rows[0].examples


def fitted_together(loader, **options):
    one = GramDetector(made(), orders=(1,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gramwatch.GramwatchWarning)
        gramwatch.fit_together({"one": one}, loader, progress=False, **options)
    return one.counted.number


def everything(rank, size):
    """What every way to give data to the ranks results in."""
    mine = TensorDataset(part(rank))
    batches = CALIBRATION.split(9)
    return {
        "own lists": answered(counted, list(alike_at(slice(BATCH), rank).split(BATCH))),
        "own data sets": answered(
            counted, DataLoader(TensorDataset(alike_at([0, COUNT // SIZE // 2, -1], rank)), batch_size=BATCH)
        ),
        "own lists, one empty": answered(counted, list(part(rank).split(BATCH)) if rank else []),
        "a list in another order": answered(counted, list(shuffled(rank))),
        "shuffled generators": answered(counted, shuffled(rank)),
        "own generators, told": answered(counted, (b for b in part(rank).split(BATCH)), sharded=True),
        "own generators, one empty": answered(counted, (b for b in part(rank).split(BATCH) if rank)),
        "one generator": answered(counted, shuffled(7)),
        "one generator, told": answered(counted, shuffled(7), sharded=False),
        "same at first": answered(counted, same_at_first(rank)),
        "other lengths, told": answered(
            counted, itertools.islice(shuffled(7), 20 if rank else None), sharded=False
        ),
        "own dice": answered(counted, DataLoader(OwnDice(rank), batch_size=BATCH)),
        "own dice, told": answered(counted, DataLoader(OwnDice(rank), batch_size=BATCH), sharded=False),
        "own dice, told otherwise": answered(counted, DataLoader(mine, batch_size=BATCH), sharded=True),
        "other numbers, told": answered(
            counted, DataLoader(TensorDataset(DATA[: COUNT - rank]), batch_size=BATCH), sharded=False
        ),
        "samples that overlap": answered(
            counted,
            DataLoader(
                TensorDataset(DATA),
                batch_size=BATCH,
                sampler=RandomSampler(mine, num_samples=95, generator=torch.Generator().manual_seed(rank)),
            ),
        ),
        "same examples of other numbers": answered(
            counted,
            DataLoader(
                TensorDataset(DATA[: COUNT // SIZE].repeat_interleave(SIZE, 0)),
                batch_size=BATCH,
                sampler=range(rank, COUNT, SIZE),
            ),
        ),
        "not of one mind": answered(counted, DATA, sharded=bool(rank)),
        "several kinds": answered(counted, list(part(rank).split(BATCH)) if rank else DataLoader(mine)),
        "several kinds, told": answered(
            counted, list(DATA.split(BATCH)) if rank else (b for b in DATA), sharded=False
        ),
        "shard": answered(counted, Shard(b for b in part(rank).split(BATCH))),
        "texts": answered(counted, ({"x": b, "name": str(n)} for n, b in enumerate(DATA.split(BATCH)))),
        "calibrate, asked": answered(calibrated, (b + rank for b in batches)),
        "calibrate, parts": answered(calibrated, (b + rank for b in batches), sharded=True),
        "calibrate, same": answered(calibrated, (b for b in batches), sharded=False),
        "evaluate, asked": answered(evaluated, CALIBRATION, {"ood": (b + rank for b in batches)}),
        "evaluate, parts": answered(
            evaluated, (b + rank for b in batches), {"ood": (b + rank for b in batches)}, sharded=True
        ),
        "together, asked": answered(fitted_together, shuffled(rank)),
        "together, parts": answered(fitted_together, (b for b in part(rank).split(BATCH)), sharded=True),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("parts") / "run", SIZE, everything).results(120)


EVERY = [
    *(
        "own lists",
        "own data sets",
        "own generators, told",
        "one generator",
        "one generator, told",
        "own dice, told",
    ),
    *("own dice, told otherwise", "shard", "texts"),
]


@pytest.mark.parametrize("case", EVERY)
def test_every_example_counts_once(results, case):
    assert [result[case] for result in results] == [(COUNT, [])] * SIZE


@pytest.mark.parametrize("case", ["own lists, one empty", "own generators, one empty"])
def test_a_rank_without_examples_has_a_part(results, case):
    assert [result[case] for result in results] == [(COUNT - COUNT // SIZE, [])] * SIZE


ASKED = {
    "shuffled generators": "the processes cannot tell what they were given. Their first batches differ",
    "calibrate, asked": "the processes cannot tell what they were given. Their first batches differ",
    "evaluate, asked": "the processes cannot tell what they were given. Their first batches differ",
    "together, asked": "the processes cannot tell what they were given. Their first batches differ",
    "own dice": "the processes cannot tell what they were given: an example differs whenever it is read",
    "a list in another order": "ranks 0 and 1 were given 100% the same examples, but in other batches",
    "same at first": "batches were dealt out, but the ranks were not given the same ones (31 on rank 0",
    "other lengths, told": "not given the same ones (30 on rank 0, 20 on rank 1, 20 on rank 2)",
    "other numbers, told": "the data sets of the ranks have other numbers (300, 299, 298 examples)",
    "several kinds, told": "sharded=False, but the ranks have loaders of several kinds",
}


@pytest.mark.parametrize(("case", "reason"), ASKED.items(), ids=list(ASKED))
def test_what_cannot_be_told_is_asked(results, case, reason):
    for result in results:
        assert isinstance(result[case], InputError | RankError)
        assert reason in str(result[case])
        assert "sharded=True" in str(result[case])


def test_all_ranks_must_say_the_same(results):
    for result in results:
        assert "rank 0 False, rank 1 True, rank 2 True" in str(result["not of one mind"])


def test_examples_that_several_ranks_counted_are_said_once(results):
    (total, said), *others = (result["samples that overlap"] for result in results)
    assert total == 95 * SIZE
    assert len(said) == 1
    assert "ranks 0 and 1 counted 95 and 95 examples. About 9" in said[0]
    assert others == [(total, [])] * (SIZE - 1)


def test_numbers_of_examples_tell_parts_apart_where_examples_do_not(results):
    """Every example is there three times, and every rank has one of the three."""
    (total, said), *others = (result["same examples of other numbers"] for result in results)
    assert total == COUNT
    assert "ranks 0 and 1 counted 100 and 100 examples. About 100% are the same" in said[0]
    assert others == [(COUNT, [])] * (SIZE - 1)


def test_loaders_of_several_kinds_are_parts(results):
    assert [result["several kinds"] for result in results] == [(COUNT, [])] * SIZE


def test_calibrate_evaluate_and_fit_together_are_told_too(results):
    for result in results:
        assert result["calibrate, parts"] == SIZE * len(CALIBRATION)
        assert result["calibrate, same"] == len(CALIBRATION)
        assert result["evaluate, parts"] == SIZE * len(CALIBRATION)
        assert result["together, parts"] == COUNT


def test_one_process_needs_no_answer():
    for sharded in (None, True, False):
        assert counted(shuffled(0), sharded=sharded) == (COUNT, [])
