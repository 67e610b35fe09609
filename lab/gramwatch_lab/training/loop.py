"""The training loop: gradient descent over images that are all on the device."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import repeat
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.errors import TrainingError
from gramwatch.files import artifact
from gramwatch.inputs.networks import weights_of
from gramwatch_lab.training import checkpoint as files
from gramwatch_lab.training.base import Network, Objective
from gramwatch_lab.training.crops import Crops
from gramwatch_lab.training.images import Images
from gramwatch_lab.training.optimiser import OPTIMISERS, optimiser_of

TEST_BATCH = 1000
CROPS = "crops"
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class Epoch:
    """The result of one epoch: means over its batches, and the accuracy on the test images after it."""

    number: int
    loss: float
    accuracy: float
    test_accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class History:
    """The results of all epochs of a training, including those of interrupted runs."""

    epochs: tuple[Epoch, ...]

    @property
    def accuracy(self) -> float | None:
        """The accuracy on the test images at the end."""
        return self.epochs[-1].test_accuracy

    @property
    def seconds(self) -> float:
        """The time of all epochs together."""
        return sum(epoch.seconds for epoch in self.epochs)


def train(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    objective: Objective,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    outliers: Tensor | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    epochs: int,
    batch_size: int = 256,
    learning_rate: float = 0.1,
    warmup: float = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    optimiser: str = "sgd",
    augment: bool | str = False,
    seed: int = 0,
    device: str | torch.device | None = None,
    precision: str = "auto",
    compile: bool = False,  # noqa: A002
    checkpoint: str | PathLike[str] | None = None,
    save_every: int = 1,
    resume: bool = True,
    name: str = "",
    class_names: Sequence[str] = (),
    progress: bool = True,
) -> History:
    """Train a network in place. It ends in evaluation mode, on `device`.

    The optimiser is SGD with Nesterov's momentum, or AdamW. The learning rate rises linearly during the
    warm-up, and then falls to zero along a cosine. The same seed, network and data give the same weights,
    interrupted or not. On a GPU, weights may differ by the rounding of sums.

    Args:
        network: the network to train. The objective may replace its last layer.
        images: uint8, `(N, C, H, W)`.
        labels: whole numbers, `(N,)`.
        objective: the objective, such as `CrossEntropy()`.
        mean: the mean of each channel, for pixels in [0, 1]. Inputs are normalised by it.
        std: the standard deviation of each channel, likewise.
        outliers: uint8 images of the same size, for objectives that need outliers.
        test: images and labels on which accuracy is measured after every epoch.
        epochs: the number of epochs. The images of a last, incomplete batch are not used in that epoch.
        batch_size: the number of images in a step. Outliers are added to these.
        learning_rate: the highest learning rate.
        warmup: the number of epochs in which the learning rate rises.
        momentum: the momentum of SGD.
        weight_decay: the weight decay. SGD: of all parameters. AdamW: of parameters with two axes or more.
        optimiser: "sgd" or "adamw". With AdamW, gradients are clipped to length 1.
        augment: how images and outliers are changed at random. True: they are shifted by up to 4 pixels, and
            mirrored. "crops", for photographs: they are cropped, enlarged, and mirrored. False: not at all.
        seed: the seed of order, augmentation and dropout.
        device: the device to train on. By default the device of the network.
        precision: "bfloat16" or "float32" in the forward pass. "auto" is bfloat16 on a GPU, else float32.
        compile: use `torch.compile`: a slower start, faster steps.
        checkpoint: a file that is written after every epoch. After the last epoch it holds only the network.
        save_every: the number of epochs after which the file is written, for short epochs. It is also written
            after the last epoch.
        resume: whether to continue from that file if it exists. If False, the file must not exist.
        name: the name of the network, for that file.
        class_names: the names of the classes in the order of the labels, for that file.
        progress: show a progress bar for every epoch (on a terminal only).

    """
    if epochs < 1 or batch_size < 1 or not learning_rate > 0 or warmup < 0:
        raise TrainingError(
            "epochs and batch_size must be at least 1, learning_rate positive and warmup not negative: got "
            f"{epochs}, {batch_size}, {learning_rate}, {warmup}"
        )
    if precision not in PRECISIONS:
        raise TrainingError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    if optimiser not in OPTIMISERS:
        raise TrainingError(f"optimiser must be one of {', '.join(OPTIMISERS)}; got {optimiser!r}")
    if augment not in (True, False, CROPS):
        raise TrainingError(f"augment must be True, False or '{CROPS}'; got {augment!r}")
    if save_every < 1:
        raise TrainingError(f"save_every must be at least 1; got {save_every}")
    place = torch.device(device) if device is not None else next(network.parameters()).device
    data = _Data.of(objective, images, labels, outliers, test, mean, std, augment, place)
    plan = {
        "objective": objective.name,
        "settings": objective.settings(),
        "epochs": epochs,
        "batch_size": min(batch_size, len(images)),
        "learning_rate": learning_rate,
        "warmup": warmup,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "optimiser": optimiser,
        "augment": augment,
        "seed": seed,
        "images": len(images),
        "outliers": 0 if outliers is None else len(outliers),
    }
    with _seeded(seed, 0, place):
        objective.prepare(network)
    run = _Run(network, objective, data, plan, place, precision, compile)
    if class_names and len(class_names) != run.classes:
        raise TrainingError(f"{len(class_names)} classes are named, the network has {run.classes}")
    header = {"classes": run.classes, "mean": list(mean), "std": list(std), "shape": list(images.shape[1:])}
    header |= {"network": name} if name else {}
    header |= {"class_names": list(class_names)} if class_names else {}
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)  # if this fails, it fails before the first epoch
    done = run.resumed(path) if path is not None and _resumes(path, resume) else []
    for number in range(len(done) + 1, epochs + 1):
        done.append(run.epoch(number, progress))
        if path is not None and (number % save_every == 0 or number == epochs):
            run.save(path, header, done)
    network.eval()
    network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return History(tuple(done))


@dataclass(frozen=True)
class _Data:
    """The data of a training, on the device."""

    images: Images
    labels: Tensor
    outliers: Images | None
    test: tuple[Images, Tensor] | None

    @staticmethod
    def of(
        objective: Objective,
        images: Tensor,
        labels: Tensor,
        outliers: Tensor | None,
        test: tuple[Tensor, Tensor] | None,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool | str,
        place: torch.device,
    ) -> "_Data":
        """The data, checked. If the objective does not use outliers, outliers are refused."""
        if objective.needs_outliers and outliers is None:
            raise TrainingError(
                f"{objective.name} trains with outliers: give outliers=..., or --auxiliary in the shell"
            )
        if not objective.needs_outliers and outliers is not None:
            raise TrainingError(f"{objective.name} has no use for outliers: leave them out")
        kind: type[Images] = Crops if augment == CROPS else Images
        moved = augment is True
        inside = kind(images, mean, std, place, moved)
        outside = None if outliers is None else kind(outliers, mean, std, place, moved, "outliers")
        tested = None if test is None else Images(test[0], mean, std, place, what="test images")
        for other, what in ((outside, "outliers"), (tested, "test images")):
            if other is not None and other.shape != inside.shape:
                raise TrainingError(
                    f"images have shape {inside.shape}, {what} {other.shape}: give images of one shape"
                )
        return _Data(
            inside,
            _labels(labels, len(inside), "images").to(place),
            outside,
            None
            if test is None or tested is None
            else (tested, _labels(test[1], len(tested), "test").to(place)),
        )


def _labels(labels: Tensor, count: int, what: str) -> Tensor:
    if labels.shape != (count,) or labels.is_floating_point() or labels.is_complex():
        raise TrainingError(
            f"the labels of the {what} must be {count} whole numbers, not {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    return labels.long()


class _Run:
    """A running training: the network, its optimiser and its data."""

    def __init__(
        self,
        network: nn.Module,
        objective: Objective,
        data: _Data,
        plan: Mapping[str, Any],
        place: torch.device,
        precision: str,
        compiled: bool,
    ) -> None:
        self._objective, self._data, self._plan, self._place = objective, data, plan, place
        self._network = network.to(place)
        if place.type == "cuda":
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        half = precision == "bfloat16" or (precision == "auto" and place.type == "cuda")
        self._autocast = torch.autocast(place.type, torch.bfloat16, enabled=half)
        self._forward: Network = torch.compile(network) if compiled else network
        self._steps = len(data.images) // plan["batch_size"]
        self._optimiser = optimiser_of(network, plan, fused=place.type == "cuda")
        self._gradient_norm = objective.gradient_norm or (1.0 if plan["optimiser"] == "adamw" else None)
        self.classes = self._check_classes()

    def _check_classes(self) -> int:
        """The number of classes of the network. Every label must be one of them."""
        self._network.eval()
        with torch.no_grad():
            logits = self._network(next(self._data.images.in_order(2)))
        if logits.ndim != 2:
            raise TrainingError(
                f"the network returns shape {tuple(logits.shape)}: expected (images, classes)"
            )
        classes = int(logits.shape[1])
        for labels in (self._data.labels, *(self._data.test[1:] if self._data.test else ())):
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= classes:
                raise TrainingError(f"labels run from {low} to {high}, but the network has {classes} classes")
        return classes

    # --- an epoch ------------------------------------------------------------------------------------

    def epoch(self, number: int, progress: bool) -> Epoch:
        """Run one epoch. Its random numbers depend only on the seed and its number, not on earlier epochs."""
        from tqdm.auto import tqdm

        doing = f"epoch {number}/{self._plan['epochs']}"
        bar = tqdm(total=self._steps, desc=doing, unit="step", disable=None if progress else True)
        started = time.perf_counter()
        with bar, _seeded(self._plan["seed"], number, self._place), _tuned_convolutions(self._place):
            # Values are read once, at the end. Reading a value from a GPU makes the following steps wait.
            loss, accuracy = (self._steps_of(number, bar) / self._steps).tolist()
            test_accuracy = self._test()
            shown = {"loss": f"{loss:.4f}", "accuracy": f"{100 * accuracy:.2f} %"}
            if test_accuracy is not None:
                shown["test"] = f"{100 * test_accuracy:.2f} %"
            bar.set_postfix(shown)
        if not math.isfinite(loss):
            raise TrainingError(
                f"training diverged in epoch {number}: the loss is {loss}. Lower the learning rate "
                f"({self._plan['learning_rate']:g})"
            )
        return Epoch(number, loss, accuracy, test_accuracy, time.perf_counter() - started)

    def _steps_of(self, number: int, bar: Any) -> Tensor:
        """Run all steps of an epoch. Returns the sums of their losses and accuracies, on the device."""
        size = self._plan["batch_size"]
        self._network.train()
        totals = torch.zeros(2, device=self._place)
        beside: Iterator[tuple[Tensor | None, Any]] = repeat((None, None))
        if self._data.outliers is not None:
            beside = self._data.outliers.shuffled(self._steps, size * self._objective.outliers_per_image)
        batches = zip(self._data.images.shuffled(self._steps, size), beside, strict=False)
        for step, ((images, chosen), (outliers, _)) in enumerate(batches):
            self._set_rate((number - 1) * self._steps + step)
            totals += self._step(images, self._data.labels[chosen], outliers)
            bar.update()
        return totals

    def _step(self, images: Tensor, labels: Tensor, outliers: Tensor | None) -> Tensor:
        with self._autocast:
            loss, logits = self._objective.loss(self._forward, images, labels, outliers)
        self._optimiser.zero_grad()
        loss.backward()
        if self._gradient_norm is not None:
            nn.utils.clip_grad_norm_(self._network.parameters(), self._gradient_norm)
        self._optimiser.step()
        with torch.no_grad():
            return torch.stack([loss.detach().float(), (logits.argmax(1) == labels).float().mean()])

    def _set_rate(self, step: int) -> None:
        rate = learning_rate_at(
            step / self._steps, self._plan["epochs"], self._plan["learning_rate"], self._plan["warmup"]
        )
        for group in self._optimiser.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def _test(self) -> float | None:
        if self._data.test is None:
            return None
        self._network.eval()
        images, labels = self._data.test
        right = torch.zeros((), dtype=torch.int64, device=self._place)
        with self._autocast:
            for batch, classes in zip(images.in_order(TEST_BATCH), labels.split(TEST_BATCH), strict=True):
                right += (self._network(batch).argmax(1) == classes).sum()
        return int(right) / len(labels)

    # --- its file ------------------------------------------------------------------------------------

    def save(self, path: Path, header: Mapping[str, Any], done: Sequence[Epoch]) -> None:
        """Write the state of the training. After the last epoch, write only the network."""
        finished = len(done) == self._plan["epochs"]
        whole = {
            **header,
            "objective": self._plan["objective"],
            "settings": self._plan["settings"],
            "seed": self._plan["seed"],
            "epoch": len(done),
            "accuracy": done[-1].test_accuracy,
            "finished": finished,
            "plan": self._plan,
            "history": [asdict(epoch) for epoch in done],
        }
        files.write(path, whole, self._network, None if finished else self._optimiser)

    def resumed(self, path: Path) -> list[Epoch]:
        """Load the network and the optimiser from a file. Returns the finished epochs."""
        header, tensors = files.read(path)
        with artifact.reading(path):
            artifact.check_types(header, plan=dict[str, Any], history=list[dict[str, Any]])
            done = [Epoch(**epoch) for epoch in header["history"]]
        now = json.loads(json.dumps(self._plan))  # in the form that a file has
        then = {"optimiser": "sgd", **header["plan"]}  # earlier files do not name it
        if isinstance(then.get("settings"), dict):
            then["settings"] = {**type(self._objective)().settings(), **then["settings"]}
        other = [f"{key} was {then.get(key)}, is {now[key]}" for key in now if then.get(key) != now[key]]
        if other:
            raise TrainingError(
                f"{path} is of another training: {'; '.join(other)}. Remove it, name another file, or train "
                "with the settings it was begun with"
            )
        with artifact.reading(path):
            self._network.load_state_dict(weights_of(tensors))
            files.set_state(self._network, self._optimiser, tensors)
        return done


def _resumes(path: Path, wanted: bool) -> bool:
    if path.exists() and not wanted:
        raise TrainingError(f"{path} is already there: remove it, name another file, or resume from it")
    return path.exists()


def learning_rate_at(epoch: float, epochs: int, highest: float, warmup: float) -> float:
    """The learning rate after `epoch` epochs: it rises linearly, then falls to zero along half a cosine."""
    warmup = min(warmup, epochs / 2)
    if epoch < warmup:
        return highest * (epoch + 1e-2) / (warmup + 1e-2)
    return highest * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup))) / 2


@contextmanager
def _seeded(seed: int, number: int, place: torch.device) -> Iterator[None]:
    """Seed PyTorch's generators, which dropout also uses, and restore them at the end."""
    devices = (
        [torch.cuda.current_device() if place.index is None else place.index] if place.type == "cuda" else []
    )
    with torch.random.fork_rng(devices):
        torch.manual_seed(1_000_003 * seed + number)
        yield


@contextmanager
def _tuned_convolutions(place: torch.device) -> Iterator[None]:
    """Let cuDNN choose the fastest algorithm for the given shapes, by trying them."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = place.type == "cuda" or before
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
