"""Several processes end with the result of one, and a process that fails or ends stops the others."""

import inspect
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import gramwatch
from gramwatch import GramDetector, Guard, InputError, RankError
from gramwatch.detect import distributed, exchange
from gramwatch.detect.distributed import Shard
from gramwatch.detect.split import KeptInputs
from gramwatch.methods import FDBD, KNN, Energy, Mahalanobis, ViM
from tests.guarded import Net, images, made
from tests.ranked import Run

TRAIN, VALIDATION, TEST = images(187, 1), images(90, 2), images(20, 3)
WIDE = 3 * images(30, 4)
BATCH = 16
QUIET = 4.0
"""Seconds without a sign of life after which a rank counts as ended, in these tests."""
CLOSE = 1e-6
"""The largest difference of sums, relative to the largest number of a tensor."""


# --- what the processes do ---------------------------------------------------------------------------


def quietly(function, *args, **options):
    """Few training examples of some classes are not what these tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gramwatch.GramwatchWarning)
        return function(*args, progress=False, **options)


def states(detector):
    return {name: tensor.clone() for name, tensor in detector.contents()[1].items()}


def together(loader, **detectors):
    """The states of several detectors after one fit."""
    quietly(gramwatch.fit_together, detectors, loader)
    return {
        f"{name} {key}": tensor for name, each in detectors.items() for key, tensor in states(each).items()
    }


def parts_of(size):
    """Uneven parts of the training batches. If there are three or more parts, the last one is empty."""
    batches = list(TRAIN.split(BATCH))
    owners = torch.randint(
        max(1, size - (size > 2)), (len(batches),), generator=torch.Generator().manual_seed(5)
    )
    return [
        [batch for batch, own in zip(batches, owners.tolist(), strict=True) if own == r] for r in range(size)
    ]


class Augmented(Dataset):
    """Examples that are shifted at random whenever they are read."""

    def __len__(self):
        return 60

    def __getitem__(self, number):
        return TRAIN[number].roll(int(torch.randint(3, ())), -1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TRAIN)


def program(rank, size):
    """The program of a user who knows nothing of ranks."""
    guard = Guard(made(), orders=(1, 2), per_class=True)
    quietly(guard.fit, TRAIN.split(BATCH))
    quietly(guard.calibrate, VALIDATION.split(25))
    table = quietly(gramwatch.evaluate, guard, VALIDATION.split(25), {"wide": WIDE.split(7)}, draws=2)
    found = guard(TEST)
    rows = [[*row.mean.values(), *row.spread.values()] for row in table.rows]
    results = {"table": torch.tensor(rows), "scores": found.score, "p-values": found.p_value}
    return states(guard) | results


def loaders(rank, size):
    """Loaders of all kinds, the same on all ranks."""
    dataset = TensorDataset(TRAIN, torch.arange(len(TRAIN)) % 3)
    each = {
        "tensor": TRAIN,
        "data set": dataset,
        "loader": DataLoader(dataset, batch_size=BATCH),
        "workers": DataLoader(dataset, batch_size=2 * BATCH, num_workers=1),
        "stream": DataLoader(Stream(), batch_size=BATCH),
        "generator": (batch for batch in TRAIN.split(BATCH)),
    }
    return {
        f"{name} {key}": tensor
        for name, loader in each.items()
        for key, tensor in together(loader, mahalanobis=Mahalanobis(made())).items()
    }


def random_loaders(rank, size):
    """How many examples count if their order, or they themselves, are random."""
    each = {
        "order": DataLoader(TensorDataset(TRAIN), batch_size=BATCH, shuffle=True),
        "examples": DataLoader(Augmented(), batch_size=8, shuffle=True),
    }
    return {
        name: quietly(GramDetector(made(), orders=(1,)).fit, loader).class_counts_.sum()
        for name, loader in each.items()
    }


def every_state(loader):
    network = made()
    return together(
        loader,
        float32=GramDetector(network, orders=(1, 2)),
        float16=GramDetector(network, orders=(1, 2), storage="float16"),
        mean_variance=GramDetector(network, orders=(1, 2), bounds="mean_variance"),
        mahalanobis=Mahalanobis(network),
        fdbd=FDBD(network),
    )


def shards(rank, size):
    """Parts that differ."""
    return every_state(Shard(parts_of(size)[rank]))


def sampler(rank, size):
    """A `DistributedSampler`, which repeats examples so that all ranks have equally many."""
    dataset = TensorDataset(TRAIN)
    mine = DistributedSampler(dataset, size, rank, shuffle=False)
    return every_state(DataLoader(dataset, batch_size=BATCH, sampler=mine))


def further(rank, size):
    """A second fit adds to the first, which counts once."""
    guard = Guard(made(), orders=(1, 2))
    quietly(guard.fit, TRAIN[:90].split(BATCH))
    quietly(guard.fit, TRAIN[90:].split(BATCH))
    return states(guard)


def sample(rank, size):
    """Scores of a method that keeps all of these examples: in the order of their keys, which ranks change."""
    knn = quietly(KNN(made(), k=5).fit, TRAIN.split(BATCH))
    return {"scores": knn.score_inputs(TEST)[1], "count_": knn.count_}


JOBS = (program, shards, sampler, loaders, random_loaders, further, sample)


def jobs_of(size):
    """Eight processes take their time on one core: they do what depends on their number."""
    return JOBS if size < 8 else JOBS[:3]


def all_jobs(rank, size):
    return {job.__name__: job(rank, size) for job in jobs_of(size)}


# --- as one process ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=(1, 2, 3, 4, 8))
def ran(request, tmp_path_factory):
    """The number of ranks, and what all jobs returned on each."""
    size = request.param
    return size, Run(tmp_path_factory.mktemp("ranks") / "run", size, all_jobs).results()


@pytest.fixture(scope="module")
def alone():
    return {job: job(0, 1) for job in (program, loaders, random_loaders, further, sample)}


def by_one_process(job, size, alone):
    """The same job in this process, on the batches of all ranks."""
    if job is shards:
        return every_state([batch for part in parts_of(size) for batch in part])
    if job is sampler:
        return every_state([batch for rank in range(size) for batch in TRAIN[rank::size].split(BATCH)])
    return alone[job]


def is_exact(name, tensor):
    """Whether a state is a minimum, a maximum or a count, or consists of these."""
    bounds = ("minimum", "maximum", "exponent", "class_counts", "count_")
    return name.rpartition(".")[2] in bounds or not tensor.is_floating_point()


def difference(mine, other):
    """The largest difference, relative to the largest number."""
    finite = other.isfinite()
    assert torch.equal(mine[~finite], other[~finite])
    gap = (mine[finite].double() - other[finite].double()).abs()
    return float(gap.max() / other[finite].abs().max().clamp_min(1e-30)) if gap.numel() else 0.0


def test_the_result_is_that_of_one_process(ran, alone):
    size, results = ran
    assert len(results) == size
    for job in jobs_of(size):
        expected = by_one_process(job, size, alone)
        for result in results:
            assert not isinstance(result, BaseException), result
            assert_same(result[job.__name__], expected, job.__name__)


def assert_same(found, expected, job):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if is_exact(name, tensor):
            assert torch.equal(found[name], tensor), f"{job}: {name}"
        else:
            assert difference(found[name], tensor) <= CLOSE, f"{job}: {name}"


def test_all_ranks_end_with_the_same_bits(ran):
    size, (first, *others) = ran
    for other in others:
        for job in jobs_of(size):
            for name, tensor in first[job.__name__].items():
                assert torch.equal(other[job.__name__][name], tensor), f"{job.__name__}: {name}"


def test_several_processes_have_the_methods_of_one():
    for name, method in vars(distributed.Group).items():
        if callable(method) and not name.startswith("_"):
            ours = inspect.signature(getattr(exchange.Ranks, name)).parameters
            assert list(ours) == list(inspect.signature(method).parameters), name


def test_shards_are_uneven_and_one_is_empty():
    for size in (3, 4, 8):
        lengths = [len(part) for part in parts_of(size)]
        assert lengths[-1] == 0
        assert len(set(lengths)) > 2
        assert sum(lengths) == len(TRAIN.split(BATCH))
    assert len(TRAIN) % 2
    assert len(TRAIN) % 3
    assert len(TRAIN) % 8


def test_nccl_carries_the_states_of_networks_on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    place = exchange._place_of_exchange
    assert place("cpu:gloo,cuda:gloo", gpu) == place("cpu:gloo,cuda:gloo", cpu) == cpu
    assert place("cpu:gloo,cuda:nccl", gpu) == place("cuda:nccl", gpu) == gpu
    assert place("cpu:gloo,cuda:nccl", None) == cpu
    assert place("cuda:nccl", cpu) == torch.device("cuda", 3)


# --- failures ----------------------------------------------------------------------------------------


def burn():
    raise ValueError("the disk is on fire")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stumbling(rank, size, unlucky, stumble, others_end):
    """A fit in which one rank stumbles. The others are waiting for it by then, or have batches for ever."""
    exchange.SILENT = QUIET

    def batches():
        yield images(16, 10 + rank)
        if rank == unlucky:
            time.sleep(0.5)
            stumble()
        while not others_end:
            time.sleep(0.05)
            yield images(16, 10 + rank)

    quietly(GramDetector(made(), orders=(1,)).fit, Shard(batches()))


@pytest.mark.parametrize("others_end", [True, False], ids=["others wait", "others compute"])
def test_an_exception_is_passed_on_to_all(tmp_path, others_end):
    run = Run(tmp_path / "run", 3, stumbling, 1, burn, others_end)
    first, unlucky, last = run.results(30)
    assert isinstance(unlucky, ValueError)
    assert str(unlucky) == "the disk is on fire"
    for error in (first, last):
        assert isinstance(error, RankError)
        assert str(error) == "rank 1 failed: ValueError: the disk is on fire"


def test_a_rank_that_is_killed_stops_the_others(tmp_path):
    """Here after 4 seconds, to be quick. `lab.benchmarks.scale` measures how long it takes a user."""
    assert exchange.SILENT + 5 * exchange.BEAT < 30
    waiting = Run(tmp_path / "waiting", 3, stumbling, 1, die, True)
    computing = Run(tmp_path / "computing", 3, stumbling, 2, die, False)
    host = Run(tmp_path / "host", 2, stumbling, 0, die, False, rank_0_is_host=True)
    for run, unlucky in ((waiting, 1), (computing, 2)):
        results = run.results(30)
        assert results[unlucky] is None
        assert run.processes[unlucky].exitcode == -signal.SIGKILL
        for rank, error in enumerate(results):
            if rank != unlucky:
                assert isinstance(error, RankError)
                assert str(error).startswith(f"rank {unlucky} ended or hangs: it has shown no sign of life")
    killed, other = host.results(30)
    assert killed is None
    assert isinstance(other, RankError)
    assert "That is rank 0, or torchrun" in str(other)


def ended_rank_0(rank, size):
    """Rank 0 keeps the store and ends at once, the others go on."""
    detector = quietly(GramDetector(made(), orders=(1,)).fit, TRAIN.split(BATCH))
    if rank:
        time.sleep(1)
    return detector.class_counts_.sum()


def test_rank_0_may_end_before_the_others(tmp_path):
    results = Run(tmp_path / "run", 3, ended_rank_0, rank_0_is_host=True).results(30)
    assert [int(result) for result in results] == [len(TRAIN)] * 3


def keeping_inputs(rank, size):
    """What a rank knows of kept inputs and copies, and the tolerance that all ranks measure together."""
    images = VALIDATION.clone()
    images[80:] = images[:10]
    kept, detector = KeptInputs(3, most=30), Energy(made())
    with distributed.together(detector.model, "measure") as group:
        detector.measure_all((part for part in images.split(16)), progress=False, kept=kept)
        own = {int(n): x for numbers, batch in kept.batches(4) for n, x in zip(numbers, batch, strict=True)}
        assert all(x.equal(images[number]) for number, x in own.items())
        everyone = sorted(number for of_rank in group.gather(list(own)) for number in of_rank)
    quietly(detector.calibrate, images.split(16))
    ranking = detector.calibration().scores
    return kept.numbers, everyone, kept.copies(torch.arange(90)), detector.calibration().tolerance, ranking


def test_ranks_keep_the_inputs_of_one_process_and_share_their_tolerance(tmp_path):
    numbers, everyone, copies, _, ranking = keeping_inputs(0, 1)
    assert everyone == sorted(numbers.tolist())
    assert copies == 10
    results = Run(tmp_path / "run", 3, keeping_inputs).results(60)
    for found in results:
        assert not isinstance(found, BaseException), found
        assert found[0].equal(numbers)
        assert found[1:3] == (everyone, copies)
        assert found[3].equal(results[0][3])
        assert float(found[3]) > 0
        torch.testing.assert_close(found[4], ranking)


def different_calls(rank, size):
    detector = quietly(GramDetector(made(), orders=(1,)).fit, TRAIN.split(BATCH))
    if rank == 0:
        quietly(detector.fit, VALIDATION.split(BATCH))
    else:
        quietly(detector.calibrate, VALIDATION.split(BATCH))


def partly_equal(rank, size):
    quietly(GramDetector(made(), orders=(1,)).fit, [images(16, min(rank, 1))])


def empty(rank, size):
    quietly(GramDetector(made(), orders=(1,)).fit, Shard([]))


def keeping_examples(rank, size):
    quietly(ViM(made()).fit, TRAIN.split(BATCH))


def too_few(rank, size):
    detector = quietly(GramDetector(made(), orders=(1,)).fit, TRAIN.split(BATCH))
    quietly(detector.calibrate, VALIDATION[:10].split(2))


@pytest.mark.parametrize(
    ("size", "job", "kind", "reason"),
    [
        (2, different_calls, InputError, "rank 1 calls calibrate, rank 0 calls fit"),
        (
            3,
            partly_equal,
            InputError,
            "ranks 1, 2 were given the same examples, other ranks were given others",
        ),
        (2, empty, InputError, "the loader yielded no example: there is nothing to fit"),
        (2, keeping_examples, ValueError, "several ranks cannot fit 'vim'. what it learns from two parts"),
        (2, too_few, gramwatch.CalibrationError, "10 calibration examples cannot support level 0.95"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mistakes_are_named(tmp_path, size, job, kind, reason):
    results = Run(tmp_path / "run", size, job).results(30)
    for error in results:
        assert isinstance(error, kind | RankError)
        assert reason in str(error)
    assert any(isinstance(error, kind) for error in results)


def late(rank, size):
    exchange.LATE = 0.2
    if rank == 1:
        time.sleep(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GramDetector(made(), orders=(1,)).fit(TRAIN.split(BATCH), progress=False)
    return [str(warning.message) for warning in caught if "few" not in str(warning.message)]


def test_a_rank_that_does_not_come_is_named(tmp_path):
    first, second = Run(tmp_path / "run", 2, late).results(30)
    assert second == []
    assert len(first) == 1
    assert "still waiting for rank 1. Every rank must make this call" in first[0]


def by_itself(rank, size):
    if rank:
        return None
    with distributed.alone():
        detector = quietly(GramDetector(made(), orders=(1,)).fit, TRAIN.split(BATCH))
    return detector.class_counts_.sum()


def test_one_rank_can_work_by_itself(tmp_path):
    first, second = Run(tmp_path / "run", 2, by_itself).results(30)
    assert int(first) == len(TRAIN)
    assert second is None


class Doubled(Net):
    """Its logits are not made by a linear layer alone, so that fDBD cannot be used."""

    def forward(self, x):
        return 2 * super().forward(x)


def broken_examples(rank, size):
    batches = [batch.clone() for batch in TRAIN.split(BATCH)]
    for batch in batches:
        batch[0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guard = Guard(made(Doubled), orders=(1,), members=("gram", "fdbd")).fit(batches, progress=False)
    return [str(warning.message) for warning in caught], int(guard.members["gram"].class_counts_.sum())


def test_warnings_are_about_all_ranks_and_said_once(tmp_path):
    (said, counted), (other, same) = Run(tmp_path / "run", 2, broken_examples).results(30)
    batches = len(TRAIN.split(BATCH))
    assert counted == same == len(TRAIN) - batches
    assert any(f"{batches} training example(s) with NaN or infinity were left out" in text for text in said)
    assert sum("fdbd is left out of the guard" in text for text in said) == 1
    assert other == []


# --- checkpoints -------------------------------------------------------------------------------------


def interrupted(rank, size, checkpoint):
    """A fit that is interrupted on one rank, then a further try."""

    def batches(stop):
        for number, batch in enumerate(TRAIN.split(BATCH)):
            if stop and number == 5 + rank:  # the batches are dealt out, so that this is the third or so
                raise KeyboardInterrupt
            yield batch

    first = GramDetector(made(), orders=(1,))
    try:
        quietly(first.fit, batches(stop=True), checkpoint=checkpoint)
    except (KeyboardInterrupt, RankError):
        written = sorted(path.name for path in checkpoint.parent.glob("fit*"))
    second = GramDetector(made(), orders=(1,))
    quietly(second.fit, batches(stop=False), checkpoint=checkpoint)
    if rank == 0:
        second.save(checkpoint.parent / "detector.safetensors")
    return written, states(second)


def test_every_rank_has_a_checkpoint_of_its_own(tmp_path):
    results = Run(tmp_path / "run", 2, interrupted, tmp_path / "fit").results(30)
    expected = states(quietly(GramDetector(made(), orders=(1,)).fit, TRAIN.split(BATCH)))
    for written, found in results:
        assert "fit.rank0of2" in written or "fit.rank1of2" in written
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    assert not list(tmp_path.glob("fit*"))
    saved = gramwatch.load(tmp_path / "detector.safetensors", made())
    assert int(saved.class_counts_.sum()) == len(TRAIN)


# --- torchrun ----------------------------------------------------------------------------------------

SCRIPT = """
import sys
import warnings

import torch

import gramwatch
from tests.guarded import images, made

warnings.simplefilter("ignore")
guard = gramwatch.Guard(made(), orders=(1, 2))
guard.fit(images(187, 1).split(16))
guard.calibrate(images(90, 2).split(25))
guard.save(sys.argv[1])
"""


def test_a_program_runs_unchanged_under_torchrun(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, script, tmp_path / "guard.safetensors"],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    guard = gramwatch.load(tmp_path / "guard.safetensors", made())
    alone = Guard(made(), orders=(1, 2))
    quietly(alone.fit, TRAIN.split(BATCH))
    quietly(alone.calibrate, VALIDATION.split(25))
    found, expected = guard.contents()[1], alone.contents()[1]
    for name, tensor in expected.items():
        assert difference(found[name], tensor) <= CLOSE, name
    gram = [name for name in expected if is_exact(name, expected[name])]
    assert len(gram) > 3
    assert all(torch.equal(found[name], expected[name]) for name in gram)
