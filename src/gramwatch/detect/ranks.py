"""Ranks: fits and measurements of several processes become one."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramwatch.detect.contract import Contract
from gramwatch.detect.counted import Counted, checksums
from gramwatch.detect.distributed import Group, together
from gramwatch.detect.measurement import Measurement
from gramwatch.detect.split import KeptInputs
from gramwatch.errors import InputError
from gramwatch.inputs.batches import Inputs, count_examples, on_device_ahead
from gramwatch.watch import Network

_C = TypeVar("_C", bound=Contract)


# --- fits --------------------------------------------------------------------------------------------


def begin_on_ranks(group: Group, leaves: Iterable[Contract], keep: bool = False) -> None:
    """Before a fit by several ranks: let rank 0 alone keep earlier fits, so that they count once.

    With `keep`, every rank keeps its own: an interrupted fit has left a part on each.
    """
    if group.size == 1:
        return
    for leaf in leaves:
        if leaf.learns and leaf.why_not_merged:
            raise ValueError(f"several ranks cannot fit '{leaf.name}'. {leaf.why_not_merged}")
        if leaf.learns and group.rank and not keep:
            leaf.reset()


def packed(detector: Contract) -> tuple[Any, dict[str, Tensor]]:
    """The states of a fit, as a file holds them. None and no tensors before the first example."""
    if not all(leaf.has_examples for leaf in detector.leaves):
        return None, {}
    header, tensors = detector.contents()
    header |= {"counted": detector.counted.as_json()}
    return (json.loads(json.dumps(header)), tensors) if tensors else (None, {})


def unpacked(like: _C, header: Any, tensors: Mapping[str, Tensor]) -> _C:
    """A detector with these states, of the same kind and network as another one."""
    detector, _ = type(like).described(header, like.network)
    detector.restore(header, tensors)
    for leaf in detector.leaves:
        leaf._examples = Counted.from_json(header["counted"])
    return detector


def _reduced(leaf: Contract, group: Group) -> None:
    """Join the states of all ranks on rank 0, in pairs: 1 to 0, 3 to 2, ..., then 2 to 0, and so on."""
    step = 1
    while step < group.size:
        if group.rank % (2 * step):
            group.send(group.rank - step, *packed(leaf))
            return
        if group.rank + step < group.size:
            header, tensors = group.receive(group.rank + step)
            if header is not None:
                other = unpacked(leaf, header, tensors)
                del tensors  # a state may be large
                add = leaf.take_over if packed(leaf)[0] is None else leaf.add_unfinished
                add(other)
        step *= 2


def finish_on_ranks(leaf: Contract, group: Group, left_out: int) -> None:
    """Finish a fit on rank 0, which has the states of all, and give it to all ranks."""
    _reduced(leaf, group)
    state: tuple[Any, dict[str, Tensor]] = (None, {})
    if group.rank == 0:
        leaf.finish(left_out)
        state = packed(leaf)
    header, tensors = group.broadcast(*state)
    if group.rank:
        leaf.adopt(unpacked(leaf, header, tensors))


# --- measurements ------------------------------------------------------------------------------------


def measured_all(
    network: Network,
    loader: Iterable[Any],
    measure: Callable[[Inputs], Mapping[str, Measurement]],
    doing: str,
    progress: bool,
    kept: KeptInputs | None = None,
    sharded: bool | None = None,
) -> dict[str, Measurement]:
    """The measurements of a whole loader, by detector, on the CPU. Ranks measure their parts.

    The result has the batches in turns: the first of every rank, the second of every rank, and so on. If the
    ranks deal out the batches of one loader, this is the order of the loader. The running numbers of the
    inputs that are `kept` are those of this order.
    """
    numbers: list[int] = []
    parts: list[Mapping[str, Measurement]] = []
    counted = Counted()
    with together(network.model, doing) as group:
        part = group.part(loader, network.inputs_of, sharded)
        numbered = network.numbered(part, doing, progress and group.rank == 0)
        read = ((number, inputs) for number, inputs, _ in numbered)
        watched = read if kept is None else _keeping(kept, read, group)
        for number, inputs in on_device_ahead(watched, network.model):
            numbers.append(number)
            if group.size > 1:
                counted = counted.joined(Counted.of(checksums(inputs)))
            parts.append(measure(inputs))
        group.compare(part, [counted])
        counts = [len(next(iter(measured.values()))) for measured in parts]
        mine = {
            name: Measurement.joined([part[name] for part in parts]) for name in (parts[0] if parts else ())
        }
        reading = None if kept is None else kept.reading()
        ranks = group.gather((numbers, counts, _sharing_logits(mine), reading))
        turns = _in_turns([(numbers, counts) for numbers, counts, _, _ in ranks])
        if kept is not None:
            readings = [reading for *_, reading in ranks if reading is not None]
            kept.settle(readings, _firsts(turns, group.size), group.rank)
        return _ordered([measured for _, _, measured, _ in ranks], turns, doing)


def _keeping(
    kept: KeptInputs, read: Iterable[tuple[int, Inputs]], group: Group
) -> Iterator[tuple[int, Inputs]]:
    """The batches, which `kept` takes in before they are moved to a GPU."""
    first = usual = 0
    for number, inputs in read:
        usual = usual or count_examples(inputs)
        if group.size > 1:  # the batches of the other ranks are not known: see `KeptInputs`
            first = (number * group.size + group.rank) * usual
        kept.add(inputs, first)
        first += count_examples(inputs)
        yield number, inputs


_Turn = tuple[int, int, int, int]
"""A batch: its number, its rank, its place among all examples rank by rank, and its number of examples."""


def _in_turns(ranks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[_Turn]:
    """The batches of all ranks in turns, from the numbers of the batches and of the examples in each."""
    turns: list[_Turn] = []
    start = 0
    for rank, (numbers, counts) in enumerate(ranks):
        for number, count in zip(numbers, counts, strict=True):
            turns.append((number, rank, start, count))
            start += count
    return sorted(turns)


def _firsts(turns: Sequence[_Turn], ranks: int) -> list[list[int]]:
    """The running number of the first example of each batch, for every rank."""
    firsts: list[list[int]] = [[] for _ in range(ranks)]
    running = 0
    for _, rank, _, count in turns:
        firsts[rank].append(running)
        running += count
    return firsts


def _ordered(
    ranks: Sequence[dict[str, Measurement]], turns: Sequence[_Turn], doing: str
) -> dict[str, Measurement]:
    """One measurement of all ranks, in turns."""
    given = [measured for measured in ranks if measured]
    if not given:
        raise InputError(f"the loader yielded no example: {doing} needs some")
    if len(ranks) == 1:
        return given[0]
    order = torch.cat([torch.arange(start, start + count) for _, _, start, count in turns])
    names = given[0]
    return _sharing_logits(
        {n: Measurement.of_pieces([measured[n] for measured in given])[order] for n in names}
    )


def _sharing_logits(measured: dict[str, Measurement]) -> dict[str, Measurement]:
    """The same with one copy of equal logits: detectors that share a pass have the same."""
    first = next(iter(measured.values()), None)
    return {
        name: replace(each, logits=first.logits)
        if first is not None and each.logits.equal(first.logits)
        else each
        for name, each in measured.items()
    }
