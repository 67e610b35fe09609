"""Exchange: what several processes tell each other, and the batches that each of them reads.

The ranks exchange states of detectors, in the form that files have, and measurements. A rank that fails or
ends stops the others. Loaders are compared by checksums.
"""

import functools
import hashlib
import itertools
import json
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from gramwatch.detect.progress import MOSTLY, Counted, checksums
from gramwatch.errors import GramwatchWarning, InputError, RankError, warn
from gramwatch.inputs.batches import Inputs, batches_in, device_of, tensors_in

BEAT = 1.0
"""Seconds between two signs of life of a rank."""
SILENT = 15.0
"""A rank counts as ended after this many seconds without a sign of life."""
LATE = 30.0
"""A warning names the ranks that have not made the same call after this many seconds."""
TOO_LATE = 600.0
"""After this many seconds it is an error."""
COMPARED = 16
"""How many examples of a data set the ranks compare, beside the first, the middle and the last."""
ARGUMENTS = """
    dataset num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator
    prefetch_factor persistent_workers
""".split()
"""The arguments of a `DataLoader` that do not say which examples form a batch."""
_POLL = 0.02
_ASKED = (
    "Say sharded=True if every process has a part of its own, and sharded=False if all have the same batches "
    "in the same order"
)
_calls = itertools.count()
_T = TypeVar("_T")
_Form = tuple[tuple[int, ...], torch.dtype]


class Ranks:
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
                self._failure = self._failure or self._failure_of_others(seen)
                if self._stopped.wait(BEAT):
                    return
        except RuntimeError as error:  # of the store
            self._failure = _unreachable(error)

    def _failure_of_others(self, seen: dict[int, tuple[bytes, float]]) -> str:
        """Why the work cannot go on: another rank failed or ended. Empty if none did."""
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
            present: bool = self._store.check(list(keys))
        except RuntimeError as error:
            raise RankError(_unreachable(error)) from error
        return present

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
        remedy = (
            "Every rank must make this call. For work on one rank: with gramwatch.detect.distributed.alone()"
        )
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
            self._until(["failed"], SILENT + 3 * BEAT)  # then `check` names the rank
            raise RankError(f"an exchange between the ranks failed: {errors[0]}") from errors[0]
        return results[0]

    @contextmanager
    def one_voice(self) -> Iterator[None]:
        """A block in which all ranks do the same, so that rank 0 warns for all."""
        with warnings.catch_warnings():
            if self.rank:
                warnings.simplefilter("ignore", GramwatchWarning)
            yield

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
            header_of_0, forms = about[0]
            return header_of_0, self._filled(forms, lambda t: dist.broadcast(t, 0))

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

    def part(
        self, loader: Iterable[Any], read: Callable[[Any], Inputs], sharded: bool | None = None
    ) -> "Part":
        """The part of a loader's batches for this rank."""
        if getattr(loader, "is_shard", False):
            loader, sharded = loader.loader, True  # type: ignore[attr-defined]
        batches = batches_in(loader)
        ranks = self.gather((kind_of(batches), sharded))
        if len({sharded for _, sharded in ranks}) > 1:
            said = ", ".join(f"rank {rank} {sharded}" for rank, (_, sharded) in enumerate(ranks))
            raise InputError(f"all ranks must say the same of sharded=, and they say: {said}")
        if len({kind for kind, _ in ranks}) > 1:
            if sharded is False:
                raise InputError(f"sharded=False, but the ranks have loaders of several kinds. {_ASKED}")
            sharded = True
        if has_numbers(batches):
            return Part(self._part_of_indices(batches, read, sharded), self.check)
        if sharded:
            return Part(batches, self.check)
        if sharded is None and isinstance(batches, list | tuple):
            same = self._lists_are_the_same(batches, read)
            return Part(batches[self.rank :: self.size] if same else batches, self.check)
        return self._part_of_any(batches, read, sharded)

    def _lists_are_the_same(self, batches: Sequence[Any], read: Callable[[Any], Inputs]) -> bool:
        """Whether all ranks have the same batches in memory. They are compared as a whole."""
        digest, counted = hashlib.sha256(), Counted()
        for batch in batches:
            inputs = read(batch)
            digest.update(digest_of(inputs).encode())
            counted = counted.joined(Counted.of(checksums(inputs)))
        ranks = self.gather((digest.hexdigest() if batches else "", counted))
        if self._all_have_the_same([digest for digest, _ in ranks]):
            return True
        for one, other, share in sharing([counted for _, counted in ranks]):
            raise InputError(
                f"ranks {one} and {other} were given {share:.0%} the same examples, but in other batches or "
                f"in another order. {_ASKED}"
            )
        return False

    def _part_of_any(
        self, batches: Iterable[Any], read: Callable[[Any], Inputs], sharded: bool | None
    ) -> "Part":
        """The part of any iterable for this rank. The ranks compare their first batches.

        If these are the same, the ranks compare all batches while they read them: see `compare`.
        """
        iterator = iter(batches)
        first = list(itertools.islice(iterator, 1))
        everything = itertools.chain(first, iterator)
        if sharded is None:
            digests = self.gather(digest_of(read(first[0])) if first else "")
            if not self._all_have_the_same(digests):
                if all(digests):
                    raise InputError(
                        "the processes cannot tell what they were given. Their first batches differ: these "
                        f"may be parts, or the same examples in a random order. {_ASKED}"
                    )
                return Part(everything, self.check)
        return Dealt(everything, self.check, self.rank, self.size, whole=sharded is None)

    def _part_of_indices(
        self, loader: "DataLoader[Any]", read: Callable[[Any], Inputs], sharded: bool | None
    ) -> Iterable[Any]:
        """The part of a data set with numbered examples for this rank. Other examples are not read.

        The ranks compare the numbers, and a few examples: the first, the middle, the last, and random ones.
        """
        batches = without_padding(loader)
        if not sharded:
            numbers = in_order(itertools.chain.from_iterable(batches))
            counts = self.gather((len(numbers), hashlib.sha256(repr(numbers).encode()).hexdigest()))
            same = len(set(counts)) == 1
            if sharded is False and not same:
                said = ", ".join(f"{count:,}" for count, _ in counts)
                raise InputError(
                    f"sharded=False, but the data sets of the ranks have other numbers ({said} examples). "
                    "Give all ranks the same loader, or say sharded=True"
                )
            if sharded is None:
                same = self._examples_are_the_same(loader, numbers, counts, read)
            if same:
                # The order may be random, so that one rank decides.
                batches = self.once(lambda: batches)[self.rank :: self.size]
        return DataLoader(batch_sampler=batches, **{name: getattr(loader, name) for name in ARGUMENTS})

    def _examples_are_the_same(
        self,
        loader: "DataLoader[Any]",
        numbers: Sequence[Any],
        counts: Sequence[tuple[int, str]],
        read: Callable[[Any], Inputs],
    ) -> bool:
        """Whether the numbers and a few examples are the same on all ranks."""
        few: list[Any] = []
        if numbers:
            chosen = random.Random(len(numbers)).sample(range(len(numbers)), min(COMPARED, len(numbers)))
            few = [numbers[i] for i in (0, len(numbers) // 2, -1, *chosen)]

        def digest() -> str:
            return digest_of_examples(loader, few, read) if few else ""

        own = digest()
        if self._all_have_the_same(self.gather(own and own + counts[self.rank][1])):
            return True
        if len(set(counts)) == 1 and not all(self.gather(digest() == own)):
            raise InputError(
                "the processes cannot tell what they were given: an example differs whenever it is read, by "
                f"augmentation that neither torch nor random nor numpy.random draws. {_ASKED}"
            )
        return False

    def _all_have_the_same(self, digests: Sequence[str]) -> bool:
        """Whether all ranks have the same data. False if their data differ."""
        given = [digest for digest in digests if digest]
        if len(set(given)) == len(given):
            return False
        if len(set(digests)) == 1:
            return True
        twice = next(digest for digest in given if given.count(digest) > 1)
        ranks = ", ".join(str(rank) for rank, digest in enumerate(digests) if digest == twice)
        raise InputError(
            f"ranks {ranks} were given the same examples, other ranks were given others. Give all ranks the "
            "same loader, or give each its own part and say sharded=True"
        )

    def compare(self, part: Iterable[Any], counted: Sequence[Counted]) -> list[Counted]:
        """After the last batch: the examples that all ranks counted together, for each detector."""
        assert isinstance(part, Part)
        ranks = self.gather((part.noted(), list(counted)))
        notes = [note for note, _ in ranks if note]
        if len(set(notes)) > 1:
            said = ", ".join(f"{count:,} on rank {rank}" for rank, (count, _) in enumerate(notes))
            raise InputError(
                f"batches were dealt out, but the ranks were not given the same ones ({said}), so that some "
                f"were read by no rank. {_ASKED}"
            )
        first = [examples[0] for _, examples in ranks]
        for one, other, share in sharing(first) if self.rank == 0 else ():
            warn(
                f"ranks {one} and {other} counted {first[one].number:,} and {first[other].number:,} "
                f"examples. About {share:.0%} are the same and count twice. {_ASKED}"
            )
        return [
            functools.reduce(Counted.joined, of_all) for of_all in zip(*(c for _, c in ranks), strict=True)
        ]


def _place_of_exchange(backends: str, device: torch.device | None) -> torch.device:
    """Where tensors lie while they travel. `backends` is such as `"cpu:gloo,cuda:nccl"`."""
    if "cuda:nccl" in backends and device is not None and device.type == "cuda":
        return device
    return torch.device("cpu" if "cpu:" in backends else f"cuda:{torch.cuda.current_device()}")


def _unreachable(error: RuntimeError) -> str:
    return (
        "the process that keeps the ranks together has ended, or cannot be reached. That is rank 0, or "
        f"torchrun ({str(error).splitlines()[0]:.200})"
    )


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, _Form]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


# --- batches -----------------------------------------------------------------------------------------


def sharing(ranks: Sequence[Counted]) -> list[tuple[int, int, float]]:
    """The first two ranks whose examples are mostly the same, and the share. Empty if there are none."""
    for one, other in itertools.combinations(range(len(ranks)), 2):
        share = ranks[one].share_in_both(ranks[other])
        if share > MOSTLY:
            return [(one, other, share)]
    return []


class Part:
    """The batches of a rank. Before each, the rank looks whether another has failed."""

    def __init__(self, batches: Iterable[Any], check: Callable[[], None]) -> None:
        self._batches, self._check = batches, check

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._check()
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def noted(self) -> tuple[int, str] | None:
        """What was read, for a comparison with the other ranks. None if there is nothing to compare."""
        return None


class Dealt(Part):
    """Every size-th batch of an iterable that all ranks read. It notes what it reads, for a comparison.

    With `whole`, a checksum of all batches is noted, else their number alone.
    """

    def __init__(
        self, batches: Iterable[Any], check: Callable[[], None], rank: int, size: int, whole: bool
    ) -> None:
        super().__init__(batches, check)
        self._rank, self._size, self._whole = rank, size, whole
        self._count, self._digest = 0, hashlib.sha256()

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if self._whole:
                self._digest.update(_noted(batch))
            self._count += 1
            if (self._count - 1) % self._size == self._rank:
                self._check()
                yield batch

    def noted(self) -> tuple[int, str]:
        """The number of batches that were read, and their checksum."""
        return self._count, self._digest.hexdigest()


def _noted(batch: Any) -> bytes:
    """A checksum of a batch as the loader yields it: of its tensors, arrays and texts."""
    if isinstance(batch, Mapping):
        return b"".join(_noted(key) + _noted(value) for key, value in batch.items())
    if isinstance(batch, tuple | list):
        return b"".join(map(_noted, batch))
    if isinstance(batch, np.ndarray) and batch.ndim and not batch.dtype.hasobject:
        batch = torch.from_numpy(np.ascontiguousarray(batch))
    if isinstance(batch, Tensor) and batch.ndim:
        sums: bytes = checksums(batch).cpu().numpy().tobytes()
        return sums
    return repr(batch).encode() if isinstance(batch, str | bytes | int | float) else b""


def digest_of(inputs: Inputs) -> str:
    """A checksum of all tensors of inputs."""
    digest = hashlib.sha256()
    for tensor in tensors_in(inputs):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_examples(
    loader: "DataLoader[Any]", numbers: Sequence[Any], read: Callable[[Any], Inputs]
) -> str:
    """A checksum of some examples of a data set."""
    assert loader.collate_fn is not None
    with _same_dice():
        return digest_of([read(loader.collate_fn([loader.dataset[number]])) for number in numbers])


def has_numbers(batches: Iterable[Any]) -> TypeGuard["DataLoader[Any]"]:
    """Whether this is a plain `DataLoader` whose batches are lists of numbers of examples."""
    return (
        type(batches) is DataLoader
        and batches.batch_sampler is not None
        and not isinstance(batches.dataset, IterableDataset)
    )


def kind_of(batches: Iterable[Any]) -> str:
    """The way in which the ranks compare such a loader."""
    return "numbered" if has_numbers(batches) else "list" if isinstance(batches, list | tuple) else "any"


def in_order(numbers: Iterable[Any]) -> list[Any]:
    """The numbers of examples, ascending. Other keys of a data set are sorted by their text."""
    keys = list(numbers)
    return sorted(keys) if all(isinstance(key, int) for key in keys) else sorted(keys, key=repr)


def without_padding(loader: "DataLoader[Any]") -> list[list[Any]]:
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
