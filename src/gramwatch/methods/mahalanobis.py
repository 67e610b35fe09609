"""Mahalanobis: the distance of the features at every tap to the nearest class of training examples."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramwatch.errors import InputError, NotFittedError, warn
from gramwatch.files.artifact import FINITE, Field
from gramwatch.inputs.batches import Inputs
from gramwatch.methods.base import Record
from gramwatch.methods.gaussians import ClassDistances
from gramwatch.methods.perturb import Scale, StepMethod, checked_eps, gradient, inputs_of, separation
from gramwatch.observe.observation import Observation

STEPS = (0.0, 0.01, 0.005, 0.002, 0.0014, 0.001, 0.0005)
"""The steps that the authors choose from."""
JOINS = ("equal", "normalised", "regression")
_FEWEST = 20  # of each kind to tune on: half of them, in five folds


class Mahalanobis(StepMethod, ClassDistances):
    """The distance to the nearest class mean, at every tap (Lee et al., 2018, Eq. 1 and 2, Algorithm 1).

    The features are the means of the channels over the pixels. Classes are the labels if the loader has them,
    else the predictions.

    Args:
        model: any classifier that returns logits.
        join: how the distances of all taps become one score. `"equal"` adds them. `"normalised"` divides each
            distance by its expectation on training data, then adds them. `"regression"` weighs them by a
            logistic regression that `tune` learns from outliers.
        eps: the size of a step towards the nearest class before measuring. With zero no gradient is needed.
        scale: the divisor of the step, one number or one for each channel of the inputs. The original
            divides by the standard deviations of the normalisation.
        options: the arguments of every `Method`. The authors look at the ends of the network's blocks only:
            `taps=[...]`.

    """

    name = "mahalanobis"
    record = Record(
        title="Mahalanobis",
        paper="Lee, Lee, Lee & Shin: A Simple Unified Framework for Detecting Out-of-Distribution Samples "
        "and Adversarial Attacks. NeurIPS 2018",
        equation="sum_l min_c (f_l(x) - mu_lc)^T S_l^-1 (f_l(x) - mu_lc), f_l the channel means at tap l",
        fitted=True,
        outliers=True,
        gradients=False,
        cost="a product with a matrix of channels x channels at each tap; with eps > 0, a backward and "
        "another forward pass for each tap",
        limits="The published figures weigh taps by a regression on the outliers themselves. Takes every "
        "class to be one normal distribution, all of one covariance.",
    )
    settings = ("join", "eps", "scale")
    kept: ClassVar = {
        **ClassDistances.kept,
        "weights_": Field(("taps",), torch.float64, FINITE, optional=True),
        "bias_": Field((), torch.float64, FINITE, optional=True),
    }

    weights_: Tensor | None
    """The weights of the taps, after `tune`."""
    bias_: Tensor | None

    def __init__(
        self, model: nn.Module, *, join: str = "equal", eps: float = 0.0, scale: Scale = None, **options: Any
    ) -> None:
        super().__init__(model, eps=eps, scale=scale, **options)
        if join not in JOINS:
            raise ValueError(f"join must be one of {', '.join(JOINS)}, got {join!r}")
        self.join = join

    def finish(self, left_out: int = 0) -> None:
        """Compute class means and covariances from the sums, and forget an earlier `tune`."""
        super().finish(left_out)
        self.weights_ = self.bias_ = self.tuned_ = None
        assert self.ranks_ is not None
        assert self.widths_ is not None
        singular = int((self.ranks_ < self.widths_).sum())
        if singular and not self.says_nothing:
            warn(
                f"{self.name}: the covariance is singular at {singular} of {len(self.ranks_)} tap(s); "
                "directions in which the training examples do not vary are left out there"
            )

    # --- judge ---------------------------------------------------------------------------------------

    def score(self, observation: Observation) -> Tensor:
        """The joined distances. The observation shows inputs after the step, if there is one."""
        return self._joined(self.distances(observation))

    def terms(self, observation: Observation) -> Tensor:
        """The distances as they are joined, `(N, taps)`. A regression also has a bias."""
        return self._terms(self.distances(observation))

    def _terms(self, distances: Tensor) -> Tensor:
        if self.join == "equal":
            return distances
        if self.join == "normalised":
            return self._over_expectation(distances)
        assert self.weights_ is not None
        return distances * self.weights_.to(distances)

    def _joined(self, distances: Tensor) -> Tensor:
        if self.join != "regression":
            return self._terms(distances).sum(1)
        if self.weights_ is None or self.bias_ is None:
            raise NotFittedError(
                f"{self.name} with join='regression' has no weights yet: call "
                "detector.tune(in_distribution, outliers) after fitting"
            )
        return distances @ self.weights_.to(distances) + self.bias_.to(distances)

    def score_inputs(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The logits of a batch, and its scores."""
        if not self.gradients:
            return super().score_inputs(inputs)
        self.check_fitted()
        logits, distances, finite = self._distances_on(inputs, [self.eps])
        return logits, self._infinite_where_broken(self._joined(distances[0]), finite)

    def _distances_on(self, inputs: Inputs, steps: Sequence[float]) -> tuple[Tensor, list[Tensor], Tensor]:
        """The logits of the unmoved batch, the distances for each step, and which examples are finite.

        Every tap has a step of its own, towards its nearest class.
        """
        if not any(steps):
            with torch.inference_mode():
                seen = self.observe(inputs)
                distances = self.distances(seen)
            assert seen.finite is not None
            return seen.logits, [distances] * len(steps), seen.finite
        images, leaf, seen = self.observed_leaf(inputs)
        assert seen.finite is not None
        taps, finite = len(seen.channel_means), seen.finite
        columns: list[list[Tensor]] = [[] for _ in steps]
        for tap in range(taps):
            only = slice(tap, tap + 1)
            with torch.inference_mode(False), torch.enable_grad():
                (at_tap,) = self._at_taps(seen, only)
            away = gradient(at_tap.nearest, leaf, self.name, keep=tap + 1 < taps)
            with torch.inference_mode():
                for column, eps in zip(columns, steps, strict=True):
                    moved = self.moved(images, away, -eps) if eps else seen
                    (after,) = self._at_taps(moved, only) if eps else (at_tap,)
                    column.append(after.nearest.detach())
                    finite = finite if moved.finite is None else finite & moved.finite
        return seen.logits.detach(), [torch.stack(column, 1) for column in columns], finite

    # --- tune ----------------------------------------------------------------------------------------

    def tune(
        self,
        in_distribution: Iterable[Any],
        outliers: Iterable[Any],
        *,
        steps: Sequence[float] = STEPS,
        progress: bool = True,
    ) -> "Mahalanobis":
        """Weigh the taps by a logistic regression, and choose the eps that separates these outliers best.

        The authors tune in this way. One half of the data fits a regression for each step, with a penalty
        chosen by cross-validation. The other half chooses the step: by TNR at TPR 95 %, then by AUROC. The
        authors take 1,000 images of each kind. A tuned detector has seen outliers: tables must say so.
        Calibrate it afterwards, on other data.
        """
        self.check_fitted()
        steps = [checked_eps(eps) for eps in steps]
        if not steps:
            raise ValueError("steps is empty: give at least one step, such as 0.0")
        inside = self._all_distances(in_distribution, steps, progress)
        outside = self._all_distances(outliers, steps, progress)
        for kind, distances in (("in-distribution", inside), ("outlying", outside)):
            if len(distances[0]) < _FEWEST:
                raise InputError(
                    f"{self.name} cannot be tuned on {len(distances[0])} finite {kind} example(s): at least "
                    f"{_FEWEST} are needed, the authors take 1,000"
                )
        generator = torch.Generator().manual_seed(self.seed)
        order_in = torch.randperm(len(inside[0]), generator=generator)
        order_out = torch.randperm(len(outside[0]), generator=generator)
        tried = []
        for eps, d_in, d_out in zip(steps, inside, outside, strict=True):
            fit_in, held_in = d_in[order_in].tensor_split(2)
            fit_out, held_out = d_out[order_out].tensor_split(2)
            weights, bias = _regression(fit_in, fit_out)
            quality = separation(held_in @ weights + bias, held_out @ weights + bias)
            tried.append((quality, eps, weights, bias))
        _, self.eps, self.weights_, self.bias_ = max(tried, key=lambda trial: trial[0])
        self.join, self.tuned_ = "regression", torch.tensor(True)
        self.forget_calibration()
        return self

    def _all_distances(
        self, loader: Iterable[Any], steps: Sequence[float], progress: bool
    ) -> tuple[Tensor, ...]:
        """The distances of a whole loader for each step, without the examples that are not finite."""
        batches = []
        for inputs in inputs_of(self.network, loader, "tuning", progress):
            _, distances, finite = self._distances_on(inputs, steps)
            good = finite & torch.stack(distances).isfinite().all(2).all(0)
            batches.append([d[good].cpu() for d in distances])
        return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _regression(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and bias of a logistic regression that separates outliers by their distances."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    distances = torch.cat([inside, outside])
    centre, spread = distances.mean(0), distances.std(0)
    spread = torch.where(spread > 0, spread, 1)
    is_out = torch.arange(len(distances)) >= len(inside)
    penalties = {"C": [10**power for power in torch.linspace(-4, 4, 10).tolist()]}
    search = GridSearchCV(LogisticRegression(max_iter=1000), penalties, scoring="accuracy", cv=5)
    best = search.fit(((distances - centre) / spread).numpy(), is_out.numpy()).best_estimator_
    weights = torch.from_numpy(best.coef_[0]).double() / spread
    return weights, torch.tensor(float(best.intercept_[0]), dtype=torch.float64) - weights @ centre
