"""Several processes: every process reads a part of the data, and all of them end with the same result.

`torchrun` starts the processes. A rank is the number of a process. `fit`, `calibrate` and `evaluate` run
inside `together`, a block that all ranks must enter. The ranks exchange states of detectors, in the form that
files have, and measurements. A rank that fails or ends stops the others. docs/scale.md is for users.
"""

import atexit
import hashlib
import itertools
import json
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from gramwatch.batches import Inputs, batches_in, device_of, tensors_in
from gramwatch.errors import GramwatchWarning, InputError, RankError, warn

BEAT = 1.0
"""Seconds between two signs of life of a rank."""
SILENT = 15.0
"""A rank counts as ended after this many seconds without a sign of life."""
LATE = 30.0
"""A warning names the ranks that have not made the same call after this many seconds."""
TOO_LATE = 600.0
"""After this many seconds it is an error."""
_POLL = 0.02
_T = TypeVar("_T")
_Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Shard:
    """A loader whose batches are the part of this rank. Without it, the ranks compare their loaders."""

    loader: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(batches_in(self.loader))

    def __len__(self) -> int:
        return len(batches_in(self.loader))  # type: ignore[arg-type]


def rank_and_size() -> tuple[int, int]:
    """The rank of this process, and the number of ranks. A process by itself is rank 0 of 1."""
    if not dist.is_available():
        return 0, 1
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if dist.is_torchelastic_launched():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def files_of_ranks(path: str | os.PathLike[str], size: int) -> list[str]:
    """The names of the ranks' own files, where all were given the same name."""
    name = os.fspath(path)
    return [name] if size == 1 else [f"{name}.rank{rank}of{size}" for rank in range(size)]


_current: "Group | None" = None
_calls = itertools.count()


@contextmanager
def together(model: nn.Module, doing: str) -> "Iterator[Group]":
    """A block that all ranks run. If it fails on one rank, it fails on all of them.

    Args:
        model: the network. NCCL is used if it is on a GPU and the process group has NCCL.
        doing: the name of the call. All ranks must make the same one.

    """
    global _current
    if _current is not None:
        yield _current
        return
    rank, size = rank_and_size()
    if size == 1:
        yield Group()
        return
    _join_process_group(model)
    group = _current = _Ranks(rank, size, model)
    try:
        group.begin(doing)
        yield group
        group.end()
    except RankError:
        raise
    except BaseException as error:
        group.fail(error)
        raise
    finally:
        group.stop()
        _current = None


@contextmanager
def alone() -> Iterator[None]:
    """A block in which this process works by itself, such as a fit on one rank only."""
    global _current
    before, _current = _current, Group()
    try:
        yield
    finally:
        _current = before


def _join_process_group(model: nn.Module) -> None:
    """Under torchrun, make the process group unless the user's program has made one."""
    if not dist.is_initialized():
        device = device_of(model)
        cuda = device is not None and device.type == "cuda"
        # NCCL needs a GPU for every rank of a machine.
        nccl = cuda and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo")
        atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    with suppress(Exception):
        dist.destroy_process_group()


class Group:
    """The ranks of a run. This class is the group of one process, which exchanges nothing."""

    rank, size = 0, 1

    def check(self) -> None:
        """Raise an error if another rank has failed."""

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks, in the order of ranks. Any rank may have to wait for the others."""
        return [value]

    def once(self, function: Callable[[], _T]) -> _T:
        """The result of a function that rank 0 calls for all."""
        return function()

    def send(self, to: int, header: Any, tensors: Mapping[str, Tensor]) -> None:
        """Send plain values and tensors to a rank."""
        raise RankError("there is no other rank")

    def receive(self, source: int) -> tuple[Any, dict[str, Tensor]]:
        """What another rank sends."""
        raise RankError("there is no other rank")

    def broadcast(self, header: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """The plain values and tensors of rank 0."""
        return header, dict(tensors)

    @contextmanager
    def one_voice(self) -> Iterator[None]:
        """A block in which all ranks do the same, so that rank 0 warns for all."""
        with warnings.catch_warnings():
            if self.rank:
                warnings.simplefilter("ignore", GramwatchWarning)
            yield

    def part(self, loader: Iterable[Any], read: Callable[[Any], Inputs]) -> Iterable[Any]:
        """The part of a loader's batches for this rank. `read` makes the network's inputs of a batch.

        If all ranks were given the same examples, batches are dealt out: rank r gets the batches r, r + size,
        and so on. If their examples differ, these are the ranks' parts already.
        """
        return loader


class _Ranks(Group):
    """The ranks of a process group.

    Signs of life and failures go by the store of the process group, and so does waiting: a rank may be hours
    behind another. Data follow once all ranks are there. They go by the process group itself.
    """

    def __init__(self, rank: int, size: int, model: nn.Module) -> None:
        self.rank, self.size = rank, size
        self._place = _place_of_exchange(str(dist.distributed_c10d.get_backend_config()), device_of(model))
        self._meetings, next_call = 0, next(_calls)
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store: Any
        self._thread_store: Any
        self._store, self._thread_store = (
            dist.distributed_c10d.PrefixStore(f"gramwatch/{next_call}", shared.clone()) for _ in range(2)
        )
        self._failure = ""
        self._stopped = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    # --- signs of life and failures ------------------------------------------------------------------

    def begin(self, doing: str) -> None:
        """Show signs of life from now on, and wait for all ranks."""
        self._beating.start()
        calls = self.gather(doing)
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise InputError(f"rank {rank} calls {call}, rank 0 calls {calls[0]}: all must make one call")

    def end(self) -> None:
        """Wait until all ranks are done. Rank 0 leaves last, because it may be the host of the store."""
        self.gather(None)
        self.stop()
        with suppress(RuntimeError):  # of the store. The work is done
            if self.rank:
                self._store.set(f"left/{self.rank}", b"1")
                return
            self._until([f"left/{rank}" for rank in range(1, self.size)], SILENT)
            for rank, key in itertools.product(range(self.size), ("left", "beat", f"met/{self._meetings}")):
                self._store.delete_key(f"{key}/{rank}")

    def stop(self) -> None:
        """Show no further signs of life."""
        self._stopped.set()
        if self._beating.is_alive():
            self._beating.join(2 * BEAT)

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank failed, and give them time to notice."""
        self.stop()
        text = f"rank {self.rank} failed: {type(error).__name__}{': ' if str(error) else ''}{error}"
        with suppress(RuntimeError):  # of the store, or because another rank failed first
            self._store.compare_set("failed", "", json.dumps(text))
            self._store.set(f"noticed/{self.rank}", b"1")
            others = [f"noticed/{rank}" for rank in range(self.size) if rank != self.rank]
            self._until(others, 5 * BEAT)

    def check(self) -> None:
        """Raise an error if another rank has failed, or shows no sign of life."""
        if self._failure:
            raise RankError(self._failure)

    def _beat(self) -> None:
        """Show signs of life, and look for those of the others, until the end of the call."""
        seen: dict[int, tuple[bytes, float]] = {}
        try:
            for count in itertools.count():
                self._thread_store.set(f"beat/{self.rank}", str(count))
                self._failure = self._failure or self._found_failure(seen)
                if self._stopped.wait(BEAT):
                    return
        except RuntimeError as error:  # of the store
            self._failure = _unreachable(error)

    def _found_failure(self, seen: dict[int, tuple[bytes, float]]) -> str:
        """What has happened to the other ranks. Empty if nothing has."""
        store = self._thread_store
        if store.check(["failed"]):
            store.set(f"noticed/{self.rank}", b"1")
            return str(json.loads(store.get("failed")))
        for rank in set(range(self.size)) - {self.rank}:
            if not store.check([f"beat/{rank}"]):
                continue  # it has not made this call yet
            beat, now = store.get(f"beat/{rank}"), time.monotonic()
            if rank not in seen or seen[rank][0] != beat:
                seen[rank] = (beat, now)
            elif now - seen[rank][1] > SILENT:
                return f"rank {rank} ended or hangs: it has shown no sign of life for {SILENT:.0f} seconds"
        return ""

    # --- exchange ------------------------------------------------------------------------------------

    def _until(self, keys: Sequence[str], most: float) -> bool:
        """Wait until all keys are in the store. False if it takes too long."""
        begun = time.monotonic()
        while not self._has(keys):
            waited = time.monotonic() - begun
            if waited > most:
                return False
            self.check()
            time.sleep(min(_POLL + waited / 20, 10 * _POLL))
        return True

    def _has(self, keys: Sequence[str]) -> bool:
        try:
            found: bool = self._store.check(list(keys))
        except RuntimeError as error:
            raise RankError(_unreachable(error)) from error
        return found

    def _meet(self) -> None:
        """Wait until all ranks are here."""
        self._meetings += 1
        self._store.set(f"met/{self._meetings}/{self.rank}", b"1")
        here = [f"met/{self._meetings}/{rank}" for rank in range(self.size)]
        if self._meetings == 1:
            self._meet_first(here)
        while not self._until(here, TOO_LATE):
            pass  # ranks that show signs of life may take their time
        if self._meetings > 1:  # now nobody looks at the last meeting any more
            self._store.delete_key(f"met/{self._meetings - 1}/{self.rank}")

    def _meet_first(self, here: Sequence[str]) -> None:
        """Wait for ranks that have not made this call yet, but not for ever."""
        if self._until(here, LATE):
            return
        missing = [rank for rank in range(self.size) if not self._has([here[rank]])]
        remedy = "Every rank must make this call. For work on one rank: with gramwatch.distributed.alone()"
        warn(f"still waiting for rank {', '.join(map(str, missing))}. {remedy}")
        if not self._until(here, TOO_LATE - LATE):
            raise InputError(f"rank {missing[0]} has not come within {TOO_LATE:.0f} seconds. {remedy}")

    def _exchange(self, action: Callable[[], _T]) -> _T:
        """The result of an action of the process group. It is given up if another rank fails meanwhile."""
        results: list[_T] = []
        errors: list[Exception] = []

        def run() -> None:
            on_gpu = torch.cuda.device(self._place) if self._place.type == "cuda" else nullcontext()
            try:
                with torch.inference_mode(), on_gpu:
                    results.append(action())
                    if self._place.type == "cuda":
                        torch.cuda.synchronize()
            except Exception as error:  # the process group raises several kinds
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL)
            self.check()
        if errors:
            self._until(["failed"], SILENT + 3 * BEAT)  # to learn which rank it was
            raise RankError(f"an exchange between the ranks failed: {errors[0]}") from errors[0]
        return results[0]

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks, in the order of ranks."""
        self._meet()
        values: list[Any] = [None] * self.size
        self._exchange(lambda: dist.all_gather_object(values, value))
        return values

    def once(self, function: Callable[[], _T]) -> _T:
        """The result of a function that rank 0 calls for all."""
        values: list[Any] = [function() if self.rank == 0 else None]
        self._meet()
        self._exchange(lambda: dist.broadcast_object_list(values, 0))
        result: _T = values[0]
        return result

    def send(self, to: int, header: Any, tensors: Mapping[str, Tensor]) -> None:
        """Send plain values and tensors to a rank."""

        def run() -> None:
            dist.send_object_list([(header, _forms(tensors))], to)
            for tensor in tensors.values():
                dist.send(self._bytes(tensor), to)

        self._exchange(run)

    def receive(self, source: int) -> tuple[Any, dict[str, Tensor]]:
        """What another rank sends."""

        def run() -> tuple[Any, dict[str, Tensor]]:
            about: list[Any] = [None]
            dist.recv_object_list(about, source)
            header, forms = about[0]
            return header, self._filled(forms, lambda t: dist.recv(t, source))

        return self._exchange(run)

    def broadcast(self, header: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """The plain values and tensors of rank 0."""

        def run() -> tuple[Any, dict[str, Tensor]]:
            about: list[Any] = [(header, _forms(tensors))]
            dist.broadcast_object_list(about, 0)
            if self.rank == 0:
                for tensor in tensors.values():
                    dist.broadcast(self._bytes(tensor), 0)
                return header, dict(tensors)
            given, forms = about[0]
            return given, self._filled(forms, lambda t: dist.broadcast(t, 0))

        self._meet()
        return self._exchange(run)

    def _bytes(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._place).contiguous().flatten().view(torch.uint8)

    def _filled(self, forms: Mapping[str, _Form], fill: Callable[[Tensor], Any]) -> dict[str, Tensor]:
        """Tensors on the CPU that an action of the process group fills, one after the other."""
        tensors = {}
        for name, (shape, dtype) in forms.items():
            tensor = torch.empty(shape, dtype=dtype, device=self._place)
            fill(tensor.flatten().view(torch.uint8))
            tensors[name] = tensor.cpu()
        return tensors

    # --- data ----------------------------------------------------------------------------------------

    def part(self, loader: Iterable[Any], read: Callable[[Any], Inputs]) -> Iterable[Any]:
        """The part of a loader's batches for this rank."""
        if isinstance(loader, Shard):
            return _Watched(loader, self.check)
        batches = batches_in(loader)
        if _has_numbers(batches):
            return _Watched(self._part_of_indices(batches, read), self.check)
        return _Watched(self._part_of_batches(batches, read), self.check)

    def _part_of_batches(self, batches: Iterable[Any], read: Callable[[Any], Inputs]) -> Iterable[Any]:
        """The part of any iterable for this rank. The ranks compare their first batches."""
        iterator = iter(batches)
        first = list(itertools.islice(iterator, 1))
        everything = itertools.chain(first, iterator)
        if not self._all_have_the_same(_digest(read(first[0])) if first else ""):
            return everything
        return itertools.islice(everything, self.rank, None, self.size)

    def _part_of_indices(self, loader: "DataLoader[Any]", read: Callable[[Any], Inputs]) -> Iterable[Any]:
        """The part of a data set with numbered examples for this rank. Other examples are not read.

        The ranks compare the numbers, and the first, the middle and the last example of these numbers.
        """
        batches = _without_padding(loader)
        numbers = _sorted(itertools.chain.from_iterable(batches))
        digest = ""
        if numbers:
            few = [numbers[0], numbers[len(numbers) // 2], numbers[-1]]
            with _same_dice():
                assert loader.collate_fn is not None
                digest = _digest([read(loader.collate_fn([loader.dataset[number]])) for number in few])
            digest += hashlib.sha256(repr(numbers).encode()).hexdigest()
        if self._all_have_the_same(digest):
            # The order may be random, so that one rank decides.
            batches = self.once(lambda: batches)[self.rank :: self.size]
        return DataLoader(batch_sampler=batches, **{name: getattr(loader, name) for name in _ARGUMENTS})

    def _all_have_the_same(self, digest: str) -> bool:
        """Whether all ranks have the same data. False if their data differ."""
        digests = self.gather(digest)
        given = [each for each in digests if each]
        if len(set(given)) == len(given):
            return False
        if len(set(digests)) == 1:
            return True
        twice = next(each for each in given if given.count(each) > 1)
        ranks = ", ".join(str(rank) for rank, each in enumerate(digests) if each == twice)
        raise InputError(
            f"ranks {ranks} were given the same examples, other ranks were given others. Give all ranks the "
            "same loader, or give each its own part: fit(gramwatch.distributed.Shard(loader))"
        )


def _place_of_exchange(backends: str, device: torch.device | None) -> torch.device:
    """Where tensors lie while they travel. `backends` is such as `"cpu:gloo,cuda:nccl"`."""
    if "cuda:nccl" in backends and device is not None and device.type == "cuda":
        return device
    return torch.device("cpu" if "cpu:" in backends else f"cuda:{torch.cuda.current_device()}")


_ARGUMENTS = """
    dataset num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator
    prefetch_factor persistent_workers
""".split()
"""The arguments of a `DataLoader` that do not say which examples form a batch."""


def _unreachable(error: RuntimeError) -> str:
    return (
        "the process that keeps the ranks together has ended, or cannot be reached. That is rank 0, or "
        f"torchrun ({str(error).splitlines()[0]:.200})"
    )


class _Watched:
    """The batches of a rank. Before each, the rank looks whether another has failed."""

    def __init__(self, batches: Iterable[Any], check: Callable[[], None]) -> None:
        self._batches, self._check = batches, check

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._check()
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, _Form]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _digest(inputs: Inputs) -> str:
    """A checksum of all tensors of inputs."""
    digest = hashlib.sha256()
    for tensor in tensors_in(inputs):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _has_numbers(batches: Iterable[Any]) -> TypeGuard["DataLoader[Any]"]:
    """Whether this is a plain `DataLoader` whose batches are lists of numbers of examples."""
    return (
        type(batches) is DataLoader
        and batches.batch_sampler is not None
        and not isinstance(batches.dataset, IterableDataset)
    )


def _sorted(numbers: Iterable[Any]) -> list[Any]:
    """The numbers of examples, ascending. Other keys of a data set are sorted by their text."""
    every = list(numbers)
    return sorted(every) if all(isinstance(number, int) for number in every) else sorted(every, key=repr)


def _without_padding(loader: "DataLoader[Any]") -> list[list[Any]]:
    """The numbers of the examples of each batch, without examples that a `DistributedSampler` repeats.

    So that all ranks get equally many, it gives some ranks one further example that another rank has, too.
    """
    batches = [list(batch) for batch in loader.batch_sampler or ()]
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler) and sum(map(len, batches)) == sampler.num_samples:
        last = (sampler.num_samples - 1) * sampler.num_replicas + sampler.rank
        if last >= len(sampler.dataset):  # type: ignore[arg-type]
            batches[-1].pop()
    return [batch for batch in batches if batch]


@contextmanager
def _same_dice() -> Iterator[None]:
    """A block in which random augmentation does the same on all ranks."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002, which augmentation uses
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
