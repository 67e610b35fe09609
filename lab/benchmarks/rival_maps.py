"""Maps to compare with: activation norm, Grad-CAM, and the gradient of a guard's score."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch import Guard
from gramwatch.numerics.deviation import outside_range
from gramwatch.numerics.samples import Sample
from gramwatch.observe.observation import Observation
from gramwatch.observe.places import Places
from gramwatch.watch import Tap, Taps, judging
from gramwatch.watch.running import Watch


def rival_maps(guard: Guard, inputs: Tensor) -> dict[str, Tensor]:
    """The three maps of a batch, `(N, H, W)` each. The guard must have all default members."""
    run = _Run(guard, inputs)
    last = _last_with_places(inputs, run.taps, run.kept)
    top = run.logits.gather(1, run.logits.argmax(1, keepdim=True)).sum()
    (pull,) = torch.autograd.grad(top, run.kept[last], retain_graph=True)
    maps = _of_last(inputs, run.taps[last], run.kept[last].detach(), pull)
    maps["gradient of the score"] = _smoothed(run.gradient_of_score().abs().sum(1))
    return maps


def gradient_of_score(guard: Guard, inputs: Tensor) -> Tensor:
    """The gradient of the score by the inputs. Gram's pairs at plain vectors are left out."""
    return _Run(guard, inputs).gradient_of_score()


class _Run:
    """A pass of the network that can be differentiated, with the tensors of all taps."""

    def __init__(self, guard: Guard, inputs: Tensor) -> None:
        self.guard = guard
        self.sample, self.kept = guard.members["gram"].statistics.sample, {}
        self.of_score = _gradients_of_score(guard, guard._observed(inputs))
        self.leaf = inputs.clone().requires_grad_()
        self.taps = guard.planned(inputs).taps
        network = guard.network
        with judging(network.module), torch.enable_grad():
            output = Watch(self.taps, self._keep).run(network.module, self.leaf)
            self.logits = network.logits_of(output)

    def _keep(self, number: int, tensor: Tensor) -> None:
        self.kept[number] = tensor

    def gradient_of_score(self) -> Tensor:
        """The gradient by statistics, channel means and logits, handed back through the network."""
        of_statistics, of_means, of_logits, of_others = self.of_score
        tensors, grads = [self.logits], [of_logits]
        for number, tap in enumerate(self.taps):
            tensor = self.kept[number]
            grad = _at_tap(
                tensor.detach(), tap, self.sample, of_statistics.get(tap.call), of_means.get(tap.call, [])
            )
            if grad is not None and tensor.requires_grad:
                tensors.append(tensor)
                grads.append(grad)
        torch.autograd.backward(tensors, grads)
        assert self.leaf.grad is not None
        return self.leaf.grad + self._gradient_of(of_others)

    def _gradient_of(self, of_others: dict[str, Tensor]) -> Tensor:
        """The part of members that look at features or at the image itself."""
        inputs = self.leaf.detach().clone().requires_grad_()
        observations = self.guard.planned(inputs.detach()).differentiable(inputs)
        seen = dict(zip(self.guard._observers, observations, strict=True))
        with torch.enable_grad():
            parts = [
                (self._score_of(name, seen[self.guard.members[name]]) * grad).sum()
                for name, grad in of_others.items()
            ]
        (gradient,) = torch.autograd.grad(sum(parts), inputs) if parts else (torch.zeros_like(inputs),)
        return gradient

    def _score_of(self, name: str, seen: Observation) -> Tensor:
        member, rule = self.guard.members[name], self.guard.calibration().rule
        if name in rule.rules:
            with_gradients = type(member).measured.__wrapped__  # outside of inference mode
            return rule.rules[name](with_gradients(member, seen))[:, 0]
        return member.score(seen)


Powers = tuple[tuple[int, ...], Tensor]
Means = tuple[Sample, Tensor]


def _gradients_of_score(
    guard: Guard, observed: dict[object, Observation]
) -> tuple[dict[int, Powers], dict[int, list[Means]], Tensor, dict[str, Tensor]]:
    """The gradient of the score by statistics and channel means at each call, and by logits.

    And by the scores of members that look at features or at the image itself.
    """
    rule = guard.calibration().rule
    gram, plan = guard.members["gram"], guard._plan
    assert plan is not None
    logits = observed[gram].logits.clone().requires_grad_()
    table = observed[gram].statistics.clone().requires_grad_()
    leaves: dict[str, list[Tensor]] = {}
    others: dict[str, Tensor] = {}
    scores = []
    with torch.enable_grad():
        probability = logits.double().softmax(1).amax(1)
        for name, member in guard.members.items():
            seen = observed[member]
            if member is gram:
                scores.append(_gram_score(gram, rule.rules[name].total, table, logits, probability))
                continue
            if member.needs.features or member.needs.image:
                own_rule = rule.rules.get(name)
                score = member.score(seen) if own_rule is None else own_rule(member.measured(seen))[:, 0]
                others[name] = score.detach().clone().requires_grad_()
                scores.append(others[name])
                continue
            leaves[name] = [means.clone().requires_grad_() for means in seen.channel_means]
            own = Observation(logits, channel_means=tuple(leaves[name]))
            if name in rule.rules:
                with_gradients = type(member).measured.__wrapped__  # without its inference mode
                scores.append(rule.rules[name](with_gradients(member, own))[:, 0])
            else:
                scores.append(member.score(own))
        total = rule.joined(torch.stack(scores, 1)).sum()
    flat = [logits, table, *others.values(), *(leaf for leave in leaves.values() for leaf in leave)]
    by_logits, by_table, *rest = torch.autograd.grad(total, flat, allow_unused=True)
    by_others, by_leaves = dict(zip(others, rest, strict=False)), rest[len(others) :]
    of_means: dict[int, list[Means]] = {}
    left = iter(by_leaves)
    for name in leaves:
        needs = guard.members[name].needs
        for tap in plan.taps_of(needs) or ():
            grad = next(left)
            if grad is not None:
                of_means.setdefault(tap.call, []).append((needs.mean_sample, grad))
    starts = gram._layout("cpu").starts.tolist()
    of_statistics = {}
    for number, tap in enumerate(gram.taps):
        at = gram.statistics.at(tap)
        if at.statistic == "row_sums":
            part = by_table[:, starts[number] : starts[number + 1]]
            of_statistics[tap.call] = (at.orders, part.unflatten(1, (len(at.orders), -1)))
    return of_statistics, of_means, by_logits, by_others


def _gram_score(gram, total, table: Tensor, logits: Tensor, probability: Tensor) -> Tensor:
    low, high = (row.clone() for row in gram._fitted()[1].rows(logits.argmax(1)))
    outside = outside_range(table, low, high) * gram._layout("cpu").weights.clone()
    sizes = gram._layout("cpu").starts.diff().tolist()
    deviations = torch.stack([part.sum(1) for part in outside.split(sizes, 1)], 1)
    terms = total.terms(deviations, probability)
    counted = total.counted
    return (terms + 1e-9).sqrt().sum(1) / counted


def _at_tap(
    tensor: Tensor, tap: Tap, sample: Sample, by_statistics: Powers | None, by_means: list[Means]
) -> Tensor | None:
    """The gradient of the score by the tensor of a tap. Gram's statistics are of a sample of it."""
    if by_statistics is None and not by_means:
        return None
    outputs, grads = [], []
    with torch.enable_grad():
        leaf = tensor.clone().requires_grad_()
        apart, axis = tap.examples_apart(leaf, len(tensor))
        for averaged, means in by_means:
            outputs.append(averaged.of(apart.shape, axis).maps(apart).float().mean(2))
            grads.append(means.to(outputs[-1]))
        if by_statistics is not None:
            outputs.append(sample.of(apart.shape, axis).maps(apart).float())
            grads.append(_by_maps(outputs[-1].detach(), *by_statistics))
    (gradient,) = torch.autograd.grad(outputs, leaf, grads)
    return gradient


def _by_maps(maps: Tensor, orders: tuple[int, ...], by_statistics: Tensor) -> Tensor:
    """The gradient by maps, from the gradient by row sums `(N, orders, channels)`.

    A row sum is `T_i^(1/p)`, `T_i = sum_x a_i^p S`, `S = sum_j a_j^p`. So `sum_i c_i dT_i / da_k` is
    `p a_k^(p - 1) (c_k S + sum_i c_i a_i^p)`.
    """
    scale = maps.abs().amax((1, 2), keepdim=True).clamp_min(1e-30)
    a, total = maps / scale, torch.zeros_like(maps)
    before, reached = torch.ones_like(a), 1
    for number, order in sorted(enumerate(orders), key=lambda map_of_one: map_of_one[1]):
        while reached < order:  # powers by products: `**` is slow
            before, reached = before * a, reached + 1
        wanted = by_statistics[:, number]
        if not bool(wanted.any()):
            continue
        power = before * a
        sums = power.sum(1, keepdim=True)
        rows = (power * sums).sum(2)
        c = wanted * (rows.abs() + 1e-20) ** (1 / order - 1)
        c = torch.where(rows == 0, 0, c).unsqueeze(2)
        total += before * (c * sums + (c * power).sum(1, keepdim=True))
    return total * scale  # a statistic is homogeneous of degree 2


def _last_with_places(inputs: Tensor, taps: Taps, kept: dict[int, Tensor]) -> int:
    places = Places(inputs)
    return max(n for n in kept if places.place(kept[n].detach(), taps[n])[1] is not None)


def _of_last(inputs: Tensor, tap: Tap, tensor: Tensor, pull: Tensor) -> dict[str, Tensor]:
    """Activation norm and Grad-CAM at the last tap that has places."""
    by_method = {}
    for name in ("activation norm", "Grad-CAM"):
        places = Places(inputs)
        maps, grid = places.place(tensor, tap)
        assert grid is not None
        if name == "activation norm":
            amounts = maps.norm(dim=1)
        else:
            weights = places.place(pull, tap)[0].mean(2, keepdim=True)
            amounts = (weights * maps).sum(1).clamp_min(0)
        places.add(amounts, grid)
        whole = places.whole()
        assert whole is not None
        by_method[name] = whole
    return by_method


def _smoothed(values: Tensor) -> Tensor:
    """A mean over squares of about a twentieth of the side: single pixels of a gradient are noise."""
    side = 2 * math.ceil(values.shape[-1] / 40) + 1
    return F.avg_pool2d(values.unsqueeze(1), side, 1, side // 2, count_include_pad=False).squeeze(1)
