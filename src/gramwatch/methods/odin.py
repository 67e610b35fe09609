"""ODIN: the maximum softmax probability at a high temperature, after a step towards the prediction."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.inputs.batches import Inputs
from gramwatch.methods.base import Record
from gramwatch.methods.perturb import Scale, StepMethod, checked_eps, gradient, inputs_of, separation
from gramwatch.observe.observation import Observation

TEMPERATURES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
"""The temperatures that the paper chooses from."""
STEPS = tuple(round(0.0002 * n, 4) for n in range(21))
"""The steps that the paper chooses from: 21 from 0 to 0.004."""


class ODIN(StepMethod):
    """The softmax probability after a step that raises it (Liang, Li & Srikant, 2018, Eq. 1 and 2).

    Args:
        model: any classifier that returns logits.
        temperature: `T`. The paper's is 1000.
        eps: the size of the step. The paper's is 0.0014 for DenseNet on CIFAR-10. With zero no gradient is
            needed.
        scale: the divisor of the step, one number or one for each channel of the inputs. The original
            divides by the standard deviations of the normalisation, so that `eps` is in units of images
            scaled to 0 ... 1. Without a scale, `eps` is in units of the network's own inputs.
        options: the arguments of every `Method`.

    """

    name = "odin"
    record = Record(
        title="ODIN",
        paper="Liang, Li & Srikant: Enhancing The Reliability of Out-of-distribution Image Detection in "
        "Neural Networks. ICLR 2018",
        equation="-max_c softmax(f(x') / T)_c, x' = x - eps sign(-grad_x log max_c softmax(f(x) / T)_c)",
        fitted=False,
        outliers=True,
        gradients=True,
        cost="one backward and one more forward pass",
        limits="The published figures are of a T and an eps chosen on the outliers themselves. Inputs must "
        "be continuous.",
    )
    settings = ("temperature", "eps", "scale")

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1000.0,
        eps: float = 0.0014,
        scale: Scale = None,
        **options: Any,
    ) -> None:
        super().__init__(model, eps=eps, scale=scale, **options)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.temperature = float(temperature)

    def score(self, observation: Observation) -> Tensor:
        """Minus the largest softmax probability; Eq. 1. The observation shows inputs after the step."""
        return _score(observation.logits, self.temperature)

    def score_inputs(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The logits of a batch, and its scores after the step."""
        if not self.gradients:
            return super().score_inputs(inputs)
        logits, scores = self._scores_on(inputs, [self.temperature], [self.eps])
        return logits, scores[:, 0, 0]

    def tune(
        self,
        in_distribution: Iterable[Any] | Tensor,
        outliers: Iterable[Any] | Tensor,
        *,
        temperatures: Sequence[float] = TEMPERATURES,
        steps: Sequence[float] = STEPS,
        progress: bool = True,
    ) -> "ODIN":
        """Choose the T and the eps that separate these outliers best: by TNR at TPR 95 %, then by AUROC.

        The paper takes 1,000 images of each kind. A tuned detector has seen outliers: tables must say so.
        Calibrate it afterwards, on other data. Both arguments may also be results of `scores_on_grid`. To
        tune on many sets, compute the scores of the in-distribution images once.
        """
        temperatures = [float(t) for t in temperatures]
        steps = [checked_eps(eps) for eps in steps]
        inside, outside = (
            given
            if isinstance(given, Tensor)
            else self.scores_on_grid(given, temperatures=temperatures, steps=steps, progress=progress)
            for given in (in_distribution, outliers)
        )
        for given in (inside, outside):
            if given.shape[1:] != (len(temperatures), len(steps)):
                raise ValueError(
                    f"tune takes batches of images, or their scores of {len(temperatures)} temperatures and "
                    f"{len(steps)} steps; got a tensor of {tuple(given.shape)}"
                )
        choices = [(t, e) for t in range(len(temperatures)) for e in range(len(steps))]
        t, e = max(choices, key=lambda te: separation(inside[:, te[0], te[1]], outside[:, te[0], te[1]]))
        self.temperature, self.eps = temperatures[t], steps[e]
        self.tuned_ = torch.tensor(True)
        self.forget_calibration()
        return self

    def scores_on_grid(
        self,
        images: Iterable[Any],
        *,
        temperatures: Sequence[float] = TEMPERATURES,
        steps: Sequence[float] = STEPS,
        progress: bool = True,
    ) -> Tensor:
        """The scores of images for all temperatures and steps, `(N, temperatures, steps)`, on the CPU."""
        temperatures = [float(t) for t in temperatures]
        steps = [checked_eps(eps) for eps in steps]
        if not temperatures or not steps or min(temperatures) <= 0:
            raise ValueError("temperatures must be positive, and neither temperatures nor steps may be empty")
        batches = inputs_of(self.network, images, "tuning", progress)
        return torch.cat([self._scores_on(inputs, temperatures, steps)[1].cpu() for inputs in batches])

    def _scores_on(
        self, inputs: Inputs, temperatures: Sequence[float], steps: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """The logits of the unmoved batch, and the scores for all temperatures and steps."""
        images, leaf, seen = self.observed_leaf(inputs)
        columns = []
        for number, temperature in enumerate(temperatures):
            # Times T: the sign stays the same, and the gradient does not vanish in half precision.
            with torch.inference_mode(False), torch.enable_grad():
                value = temperature * (seen.logits / temperature).log_softmax(1).amax(1)
            towards = gradient(value, leaf, self.name, keep=number + 1 < len(temperatures))
            with torch.inference_mode():
                for eps in steps:
                    moved = self.moved(images, towards, eps) if eps else seen
                    score = _score(moved.logits, temperature)
                    columns.append(self._infinite_where_broken(score, moved.finite))
        scores = torch.stack(columns, 1).unflatten(1, (len(temperatures), len(steps)))
        return seen.logits.detach(), scores.detach()


def _score(logits: Tensor, temperature: float) -> Tensor:
    return -(logits.double() / temperature).softmax(1).amax(1)
