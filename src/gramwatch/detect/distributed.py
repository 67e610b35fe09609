"""Several processes: every process reads a part of the data, and all of them end with the same result.

`torchrun` starts the processes. A rank is the number of a process. `fit`, `calibrate` and `evaluate` run
inside `together`, a block that all ranks must enter. The group of one process is here. `exchange` is for
several: it is imported when there are several. docs/scale.md is for users.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gramwatch.detect.progress import Counted
from gramwatch.errors import RankError
from gramwatch.inputs.batches import Inputs, batches_in, device_of

_T = TypeVar("_T")


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
    """The names of the files of all ranks, such as their checkpoints, made of one name."""
    name = os.fspath(path)
    return [name] if size == 1 else [f"{name}.rank{rank}of{size}" for rank in range(size)]


_current: "Group | None" = None


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
    from gramwatch.detect.exchange import Ranks

    _join_process_group(model)
    group: Any = Ranks(rank, size, model)  # it has the methods of `Group`
    _current = group
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
    """The ranks of a run. This class is the group of one process, which exchanges nothing.

    `exchange.Ranks` has the same methods.
    """

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

    def one_voice(self) -> AbstractContextManager[None]:
        """A block in which all ranks do the same, so that rank 0 warns for all."""
        return nullcontext()

    def part(
        self, loader: Iterable[Any], read: Callable[[Any], Inputs], sharded: bool | None = None
    ) -> Iterable[Any]:
        """The part of a loader's batches for this rank. `read` makes the network's inputs of a batch.

        With `sharded=False`, all ranks were given the same, and batches are dealt out: rank r gets the
        batches r, r + size, and so on. With `sharded=True`, these are the ranks' parts already. With `None`,
        the ranks compare their loaders, and an error asks if they cannot tell.
        """
        return loader

    def compare(self, part: Iterable[Any], counted: Sequence[Counted]) -> list[Counted]:
        """After the last batch: the examples that all ranks counted together, for each detector.

        It is an error if batches were dealt out that were not the same on all ranks. A warning tells if two
        ranks counted the same examples.
        """
        return list(counted)


@dataclass(frozen=True)
class Shard:
    """A loader whose batches are the part of this rank, as with `sharded=True`."""

    loader: Iterable[Any]
    is_shard: ClassVar[bool] = True

    def __iter__(self) -> Iterator[Any]:
        return iter(batches_in(self.loader))

    def __len__(self) -> int:
        return len(batches_in(self.loader))  # type: ignore[arg-type]
