"""A method of your own in one file: written, registered, fitted, merged, resumed, joined, compared, saved.

`LogitGap` looks at the gap between the two largest logits. The gap is small where the network wavers between
two classes. Classes differ in how large it usually is, so it is divided by its mean over the training
examples of the predicted class.

    python examples/own_method.py
    gramwatch evaluate --methods all --own examples/own_method.py --networks mlp
"""

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import gramwatch
from gramwatch import methods
from gramwatch.files.artifact import NOT_NEGATIVE, Field
from gramwatch.inputs.demo import digits, outlier_sets, small_mlp, train
from gramwatch.methods import Method, Record
from gramwatch.observe.observation import Observation


@methods.register
class LogitGap(Method):
    """Minus the gap between the two largest logits, in units of what is usual for the predicted class."""

    name = "logit_gap"
    record = Record(
        title="logit gap",
        paper="an example of gramwatch",
        equation="-(z_(1) - z_(2)) / mean of the same over training examples of the predicted class",
        fitted=True,
        limits="Sees nothing but the logits.",
    )
    running = True  # sums and counts: more data adds to them, and two fits can be merged
    kept: ClassVar = {
        "sums_": Field(("classes",), torch.float64, NOT_NEGATIVE, reduce="sum"),
        "count_": Field(("classes",), torch.float64, NOT_NEGATIVE, reduce="sum"),
    }

    sums_: Tensor | None  # of the gaps of each predicted class
    count_: Tensor | None  # of its examples

    def take(self, observation: Observation) -> Tensor:
        """Add the gaps of one batch of training examples; how many were left out."""
        finite, predicted = observation.finite, observation.predicted
        weights = finite.double()
        gaps = torch.where(finite, gap(observation.logits), 0.0)
        zeros = torch.zeros(observation.logits.shape[1], dtype=torch.float64, device=gaps.device)
        sums, counts = zeros.index_add(0, predicted, gaps), zeros.index_add(0, predicted, weights)
        self.add_states({"sums_": sums, "count_": counts})
        return (~finite).sum()

    def score(self, observation: Observation) -> Tensor:
        """The scores of a batch, `(N,)`: higher is more out-of-distribution."""
        device = observation.logits.device
        sums, counts = self.on(device, "sums_"), self.on(device, "count_")
        pooled = sums.sum() / counts.sum()  # for a class that no training example was predicted to be of
        usual = torch.where(counts > 0, sums / counts.clamp_min(1), pooled)
        return -gap(observation.logits) / usual[observation.predicted]


def gap(logits: Tensor) -> Tensor:
    """The difference of the two largest logits, `(N,)`."""
    largest = logits.double().topk(2, dim=1).values
    return largest[:, 0] - largest[:, 1]


def main() -> None:
    """What a registered method can do."""
    data = digits()
    torch.manual_seed(0)
    model = small_mlp()
    train(model, data.train, data.train_labels)
    batches, held_out = data.train.split(256), data.validation.split(256)

    detector = LogitGap(model).fit(batches).calibrate(held_out)
    print(detector)
    print(detector(data.test[:3]))

    merged = LogitGap(model).fit(batches[:2]).merge(LogitGap(model).fit(batches[2:]))
    print("fitted in two parts and merged:", torch.allclose(merged.sums_, detector.sums_))

    def interrupted() -> Any:
        yield from batches[:2]
        raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder:
        checkpoint, path = Path(folder) / "fit.safetensors", Path(folder) / "gap.safetensors"
        try:
            LogitGap(model).fit(interrupted(), checkpoint=checkpoint)
        except KeyboardInterrupt:
            resumed = LogitGap(model).fit(batches, checkpoint=checkpoint)
        print("interrupted and resumed:", torch.allclose(resumed.sums_, detector.sums_))

        detector.save(path)
        again = gramwatch.load(path, model)
        print("saved and loaded:", torch.equal(again(data.test).score, detector(data.test).score))

        guard = gramwatch.Guard(model, members=["gram", "logit_gap"])
        guard.fit(batches).calibrate(held_out)
        guard.save(path)
        print("in a guard:", list(gramwatch.load(path, model)(data.test[:3]).parts))

    beside = {"Guard": guard, "logit gap": detector, "MSP": methods.MSP(model)}
    sets = {name: images.split(256) for name, images in outlier_sets(data).items()}
    print(gramwatch.evaluate(beside, data.test.split(256), sets).overview())


if __name__ == "__main__":
    main()
