"""One network with everything that is measured on it: what each variant does to a batch."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gramwatch
from gramwatch.methods.gram import GramDetector
from lab.benchmarks import others, released
from lab.benchmarks.measure import without_kernels
from lab.benchmarks.networks import NETWORKS, ORDERS, build, images

PLAIN, OURS, MEASURE = "plain", "ours", "ours, no verdict"
EAGER, POOD, RELEASED = "eager", "pytorch-ood", "released"
VARIANTS = {
    PLAIN: "the network alone",
    OURS: "gramwatch, as a user calls it",
    MEASURE: "gramwatch up to the deviations: no score, p-value or verdict",
    EAGER: "gramwatch without its kernels: PyTorch's form",
    POOD: f"pytorch-ood {others.VERSION}'s Gram detector on the same tensors",
    RELEASED: "the released algorithm, written anew",
}
SLOW = (EAGER, POOD, RELEASED)


class Fitted:
    """A network on a device, fitted and calibrated, with a batch."""

    def __init__(self, name: str, device: torch.device, batch: int = 0) -> None:
        # Random images of a random network: too few of a class, and taps that never deviate, are no news.
        # That kernels cannot be used would be.
        for expected in (".*fewer than 20", ".*never deviate"):
            warnings.filterwarnings("ignore", expected, gramwatch.GramwatchWarning)
        self.name, self.device, self.spec = name, device, NETWORKS[name]
        self.batch = batch or self.spec.batch[device.type]
        self.model = build(name, device)
        self.x = images(self.batch, self.spec.size, seed=1).to(device)
        # What scoring costs does not depend on the level, but how many images are needed to calibrate does.
        self.detector = self.new_detector(level=0.95 if self.batch >= 38 else 0.5)
        self.detector.fit([self.x], progress=False)
        self.detector.calibrate([images(max(self.batch, 2), self.spec.size, seed=2)], progress=False)
        self.taps = self.detector.taps
        with torch.inference_mode():
            self.classes = self.model(self.x[:1]).shape[1]

    def new_detector(self, **options: Any) -> GramDetector:
        return GramDetector(self.model, taps=self.spec.taps, orders=ORDERS, **options)

    @property
    def activations(self) -> int:
        """Watched values of one image."""
        return sum(torch.Size(tap.shape).numel() for tap in self.taps)

    @property
    def statistics_bytes(self) -> int:
        """One batch of statistics."""
        statistics = self.detector.needs.statistics
        return 4 * self.batch * sum(statistics.at(tap).size for tap in self.taps)

    def plain(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model(x)

    def scoring(self, slow: bool) -> dict[str, Callable[[], Any]]:
        """What is timed on the batch. `POOD` is missing where pytorch-ood is not installed.

        The others get bounds of ones: what they do does not depend on the values.
        """
        x, model, taps = self.x, self.model, self.taps
        functions: dict[str, Callable[[], Any]] = {
            PLAIN: lambda: self.plain(x),
            OURS: lambda: self.detector(x),
            MEASURE: lambda: self.detector.measure(x),
            EAGER: without_kernels(lambda: self.detector(x)),
        }
        if not slow:
            return functions
        try:
            other = others.gram(model, taps, self.classes, ORDERS)
        except others.NotInstalledError:
            pass
        else:
            ones = [[torch.ones(self.classes, tap.channels) for _ in ORDERS] for tap in taps]
            other.feature_min, other.feature_max, other.layer_norm = ones, ones, torch.ones(len(taps))
            other.to(self.device)
            functions[POOD] = lambda: other.predict(x)
        shapes = [(len(ORDERS), tap.channels) for tap in taps]
        bounds = [dict.fromkeys(range(self.classes), (torch.ones(s), torch.ones(s))) for s in shapes]
        functions[RELEASED] = lambda: released.score(model, taps, x, ORDERS, bounds)
        return functions

    def fitting(self, slow: bool) -> dict[str, Callable[[list[Tensor]], Any]]:
        """What is timed on a list of batches that lie on the CPU."""
        detector = self.new_detector()

        def plain(batches: list[Tensor]) -> None:
            for batch in batches:
                self.plain(batch.to(self.device, non_blocking=True))

        def fit(batches: list[Tensor]) -> None:
            detector.fit(batches, progress=False)

        def eager(batches: list[Tensor]) -> None:
            # The same detector, so that a second set of bounds need not fit in memory.
            without_kernels(lambda: fit(batches))()

        functions: dict[str, Callable[[list[Tensor]], Any]] = {PLAIN: plain, OURS: fit, EAGER: eager}
        if not slow:
            return functions
        if others.version():

            def other(batches: list[Tensor]) -> None:
                gram = others.gram(self.model, self.taps, self.classes, ORDERS)
                gram.fit(others.Labelled(batches, self.classes))

            functions[POOD] = other
        functions[RELEASED] = lambda batches: released.fit(self.model, self.taps, batches, ORDERS)
        return functions
