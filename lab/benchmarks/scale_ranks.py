"""What each process does for `lab.benchmarks.scale`. torchrun starts it: it is not a command for people."""

import argparse
import json
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gramwatch
from gramwatch import GramDetector, Guard
from gramwatch.detect.detector import Detector
from gramwatch.detect.distributed import Shard, rank_and_size
from gramwatch.inputs.demo import digits, small_convnet
from gramwatch.methods import FDBD
from lab.benchmarks.measure import peak_on_cpu
from lab.benchmarks.networks import build, images

BATCH = 32
LOADERS = ("dealt out", "uneven parts", "DistributedSampler")


# --- exactness ---------------------------------------------------------------------------------------


def network(weights: Path) -> nn.Module:
    model = small_convnet()
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


def parts_of(train: Tensor, loader: str, ranks: int) -> list[list[Tensor]]:
    """The batches of each rank. Of three uneven parts or more, the last is empty."""
    if loader == "DistributedSampler":
        return [list(train[rank::ranks].split(BATCH)) for rank in range(ranks)]
    batches = list(train.split(BATCH))
    if loader == "dealt out":
        return [batches[rank::ranks] for rank in range(ranks)]
    dice = torch.Generator().manual_seed(5)
    owners = (torch.rand(len(batches), generator=dice).square() * max(1, ranks - (ranks > 2))).long().tolist()
    return [[batch for batch, own in zip(batches, owners, strict=True) if own == r] for r in range(ranks)]


def loader_of(train: Tensor, loader: str) -> Iterable[Any]:
    """What the program of this rank gives to `fit`."""
    rank, ranks = rank_and_size()
    if loader == "dealt out":
        return train.split(BATCH)  # the same on all ranks
    if loader == "uneven parts":
        return Shard(parts_of(train, loader, ranks)[rank])
    dataset = TensorDataset(train)
    sampler = DistributedSampler(dataset, ranks, rank, shuffle=False)
    return DataLoader(dataset, batch_size=BATCH, sampler=sampler)


def detectors(model: nn.Module) -> dict[str, Detector]:
    """Every kind of state there is."""
    return {
        "guard": Guard(model),
        "float16": GramDetector(model, storage="float16"),
        "mean_variance": GramDetector(model, bounds="mean_variance"),
        "fdbd": FDBD(model),
    }


def results(model: nn.Module, loader: Iterable[Any]) -> dict[str, Tensor]:
    """All states after a fit, and what the guard makes of test images."""
    data = digits()
    fitted = detectors(model)
    gramwatch.fit_together(fitted, loader, progress=False)
    tensors = {
        f"{name} {key}": t for name, detector in fitted.items() for key, t in detector.contents()[1].items()
    }
    guard = fitted["guard"].calibrate(data.validation.split(BATCH), progress=False)
    verdict = guard(torch.cat([data.test, data.held_out]))
    return tensors | {"score": verdict.score, "p_value": verdict.p_value}


def exactness(weights: Path, output: Path) -> None:
    rank, ranks = rank_and_size()
    train = digits().train
    for loader in LOADERS:
        tensors = results(network(weights), loader_of(train, loader))
        torch.save(tensors, output / f"{loader}-{rank}of{ranks}.pt")


# --- time, memory and traffic ------------------------------------------------------------------------


def speed(name: str, count: int, batch: int, output: Path) -> None:
    """Seconds of a fit, and CPU seconds of this process. What comes before a fit is not counted."""
    torch.set_num_threads(1)
    model, train = build(name, torch.device("cpu")), images(count, 32, seed=1)
    Guard(model, taps="paper").fit(train[: 4 * batch].split(batch), progress=False)
    guard, start, cpu = Guard(model, taps="paper"), time.perf_counter(), time.process_time()
    guard.fit(train.split(batch), progress=False)
    _write(output, {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu})


class Wide(nn.Module):
    """A network whose state is large: it has many classes and channels."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, channels, 3, 2, 1), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)).mean((2, 3)))


def memory(classes: int, channels: int, output: Path) -> None:
    """The peak memory of a fit over the size of its state, and the seconds of the exchange."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Wide(classes, channels).eval()
    detector = GramDetector(model)
    parts = images(64, 16, seed=rank_and_size()[0]).split(32)
    spent: list[float] = []

    def timed() -> Iterator[Tensor]:
        yield from parts
        spent.append(time.perf_counter())

    peak = peak_on_cpu(lambda: detector.fit(Shard(timed()), progress=False))
    seconds = time.perf_counter() - spent[0]
    state = sum(t.numel() * t.element_size() for t in detector.contents()[1].values())
    _write(output, {"state": state, "peak": peak, "seconds": seconds})


def endless(output: Path) -> None:
    """A fit that never ends by itself."""
    rank, _ = rank_and_size()

    def batches() -> Iterator[Tensor]:
        for number in range(10**9):
            time.sleep(0.05)
            yield torch.randn(8, 3, 16, 16)
            if number == 5:
                (output / f"ready-{rank}").write_text(str(os.getpid()))

    torch.manual_seed(rank)
    GramDetector(Wide(10, 8).eval()).fit(Shard(batches()), progress=False)


def _write(output: Path, result: dict[str, float]) -> None:
    rank, _ = rank_and_size()
    (output / f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role")
    parser.add_argument("output", type=Path)
    parser.add_argument("more", nargs="*")
    args = parser.parse_args()
    warnings.simplefilter("ignore", gramwatch.GramwatchWarning)
    if args.role == "exactness":
        exactness(Path(args.more[0]), args.output)
    elif args.role == "speed":
        speed(args.more[0], int(args.more[1]), int(args.more[2]), args.output)
    elif args.role == "memory":
        memory(int(args.more[0]), int(args.more[1]), args.output)
    else:
        endless(args.output)


if __name__ == "__main__":
    main()
