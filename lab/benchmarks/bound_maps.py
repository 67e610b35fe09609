"""Another definition of a guard's map: what pixels add to Gram statistics that lie outside their range."""

import torch
from torch import Tensor

from gramwatch.explain.explained import Explained
from gramwatch.numerics.samples import Sample
from gramwatch.observe.places import Places, observe_tensors

ORDER = 2


def by_bounds(explanation: Explained) -> Tensor:
    """The map of Gram's taps by the bounds of single channels, `(N, H, W)`.

    The row sum of channel `i`, before its root, is the sum over pixels of `v_i(x) = a_i(x)^2 sum_j a_j(x)^2`.
    If it is too high, a pixel has the part by which `v_i(x)` exceeds the bound over the number of pixels; if
    it is too low, the part by which it falls short. The parts of a channel are scaled to its contribution.
    """
    run = explanation._lookup.__self__  # type: ignore[union-attr]
    (gram,) = (part.part for part in run.contributions if part.name == "gram")
    observation = run.observed[gram]
    amounts = explanation.taps["gram"][:, :-1].nan_to_num(0.0).clamp_min(0).float()
    places = Places(run.inputs)

    def receive(number: int, tensor: Tensor) -> None:
        tap = gram.taps[number]
        maps, grid = places.place(tensor, tap)
        asked = gram.statistics.at(tap)
        if grid is None or ORDER not in asked.orders or asked.statistic != "row_sums":
            return
        value, low, high, outside = (
            part[:, asked.orders.index(ORDER)] for part in gram._at(observation, number)
        )
        squares = maps[:, gram.channels_at(tap)].float().square()
        parts = squares * squares.sum(1, keepdim=True)
        shape = (maps.shape[2],) if grid[0] else grid[1]
        counted = Sample(gram.pixels).of((1, 1, *shape), 1).maps(tensor.new_empty(1, 1, *shape)).shape[2]
        limits = (torch.where(value > high, high, low).square() / counted).unsqueeze(2)
        excess = torch.where((value > high).unsqueeze(2), parts - limits, limits - parts).clamp_min(0)
        shares = outside.unsqueeze(2) * excess / excess.sum(2, keepdim=True).clamp_min(1e-30)
        shares = shares.sum(1)
        shares = shares / shares.sum(1, keepdim=True).clamp_min(1e-30)
        places.add(amounts[:, number : number + 1] * shares, grid)

    with places.noting(run.network.module):
        observe_tensors(run.network, gram.taps, run.inputs, receive)
    heat = places.whole()
    assert heat is not None
    return heat
