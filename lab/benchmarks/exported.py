"""Whether an exported guard says what the guard says, on 10,000 images.

    python -m lab.benchmarks.exported --data sets --weights resnet20_cifar10.pth

A guard of ResNet-20 is fitted on CIFAR-10 training images and calibrated on test images. The guard, ONNX
Runtime and PyTorch's exported program judge other test images, CIFAR-100 and SVHN. Verdicts that differ are
counted. A score within `NEAR` of the threshold is a tie: rounding decides it. Writes docs/data/exported.json.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor

from gramwatch import Detection, Guard
from gramwatch.inputs import networks
from gramwatch_lab import datasets
from lab.benchmarks.measure import machine, save

MEMBERS = ("gram", "profile", "class_ratio", "energy")
CALIBRATION, SETS = 2_000, {"cifar10": 5_000, "cifar100_subset": 4_000, "svhn_subset": 1_000}
BATCH = 100
NEAR = 1e-4
"""Of a score, absolute or relative."""


def by_onnx(path: Path) -> Callable[[Tensor], dict[str, Tensor]]:
    """The graph as ONNX Runtime runs it."""
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]

    def run(x: Tensor) -> dict[str, Tensor]:
        values = map(torch.from_numpy, session.run(None, {"images": x.numpy()}))
        return dict(zip(names, values, strict=True))

    return run


def by_torch(path: Path) -> Callable[[Tensor], dict[str, Tensor]]:
    """The graph as PyTorch runs it."""
    module: Callable[[Tensor], dict[str, Tensor]] = torch.export.load(path).module()
    return torch.inference_mode()(module)  # the parameters would keep all tensors for gradients


def apart(values: Tensor, want: Tensor) -> Tensor:
    """How far scores lie apart, absolute or relative, whichever is less."""
    return (values - want).abs() / want.abs().clamp_min(1)


def compared(values: dict[str, Tensor], want: Detection, threshold: float) -> dict[str, Any]:
    """In what the graph differs from the guard."""
    difference = apart(values["score"], want.score)
    other = values["is_ood"] != want.is_ood
    tie = apart(want.score, torch.full_like(want.score, threshold)) <= NEAR
    return {
        "images": len(want),
        "flagged": int(want.is_ood.sum()),
        "largest difference of a score": float(difference.max()),
        "scores beyond 1e-4": int((difference > NEAR).sum()),
        "other classes": int((values["predicted"] != want.predicted).sum()),
        "ties at the threshold": int(tie.sum()),
        "other verdicts, ties": int((other & tie).sum()),
        "other verdicts": int((other & ~tie).sum()),
    }


def page(result: dict[str, Any]) -> str:
    """The figures as docs/howto/export.md shows them."""
    names = [name for name in result["onnx"] if name != "bytes"]
    rows = [["", "ONNX Runtime", "`torch.export`"], ["---", "---:", "---:"]]
    rows += [
        [
            name,
            *(
                f"{result[kind][name]:,.2g}"
                if isinstance(result[kind][name], float)
                else f"{result[kind][name]:,}"
                for kind in ("onnx", "pt2")
            ),
        ]
        for name in names
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def judged(guard: Guard, x: Tensor) -> Detection:
    """The verdicts of the guard on all images."""
    detections = [guard(batch) for batch in x.split(BATCH)]
    fields = ("logits", "predicted", "score", "p_value", "is_ood")
    return Detection(
        **{name: torch.cat([getattr(detection, name) for detection in detections]) for name in fields}
    )


def main() -> None:
    """Compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of the expanded sets")
    parser.add_argument("--weights", required=True, help="the ResNet-20's checkpoint")
    parser.add_argument("--train", type=int, default=5_000)
    parser.add_argument("--orders", type=int, nargs="+", default=[1, 2, 4, 8], help="of Gram")
    parser.add_argument("--output", type=Path, default=Path("docs/data/exported.json"))
    args = parser.parse_args()
    loaded = networks.load("resnet20", args.weights)

    def images(name: str, count: int, start: int = 0, **where: Any) -> Tensor:
        image_set = datasets.load(name, args.data, count=start + count, **where).images[start:]
        return loaded.prepare(image_set)

    guard = Guard(loaded.network, members=MEMBERS, orders=args.orders)
    guard.fit(images("cifar10", args.train, split="train").split(BATCH), progress=False)
    guard.calibrate(images("cifar10", CALIBRATION, split="test").split(BATCH), progress=False)
    start = {"cifar10": {"start": CALIBRATION, "split": "test"}}
    x = torch.cat([images(name, count, **start.get(name, {})) for name, count in SETS.items()])
    want, result = judged(guard, x), {"kind": "exported", **machine(torch.device("cpu"))}
    result |= {"onnxruntime": onnxruntime.__version__, "members": list(guard.members), "sets": SETS}
    result |= {"orders": list(guard.members["gram"].orders), "taps": len(guard.members["gram"].taps)}
    with tempfile.TemporaryDirectory() as folder:
        for suffix, run in (("onnx", by_onnx), ("pt2", by_torch)):
            path = Path(folder) / f"guard.{suffix}"
            guard.export(path, x[:2])
            graph = run(path)
            values = joined([graph(batch) for batch in x.split(BATCH)])
            result[suffix] = {"bytes": path.stat().st_size, **compared(values, want, guard.threshold_)}
            print(json.dumps(result[suffix], indent=1), flush=True)
            save(args.output, result)


if __name__ == "__main__":
    main()
