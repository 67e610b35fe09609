"""What the image member costs, in parts of a pass of ResNet-50.

    python -m lab.benchmarks.image                    # on the CPU, one thread and two
    python -m lab.benchmarks.image --device cuda      # float32, and bfloat16 with channels last

Images of 3 x 224 x 224 pixels: the pass of the network, and the numbers of the images with the distances of
their groups. On the CPU both are timed in turns, by the clock; on a GPU it is the time that the GPU itself is
busy. Writes docs/data/image-cpu.json or image-cuda.json, and the table of docs/methods/image.md.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from gramwatch.inputs import image_numbers
from gramwatch.inputs.foreign import import_torchvision
from gramwatch.methods import Image
from gramwatch.methods.base import Observation
from lab.benchmarks import document
from lab.benchmarks.breakdown import kernel_seconds
from lab.benchmarks.cells import DOCS, data
from lab.benchmarks.measure import Clock, machine

ROUNDS = 15
CASES = {
    "cpu": (("one thread", 8, 1), ("two threads", 8, 2)),
    "cuda": (("float32", 128, torch.float32), ("bfloat16, channels last", 128, torch.bfloat16)),
}
"""What a row is called, how many images are judged at once, and the threads or the type of numbers."""


def fitted(model: torch.nn.Module, images: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """What the member does with a batch: the numbers, and the distances of the groups."""
    member = Image(model)
    logits = torch.zeros(len(images), 2, device=images.device)

    def seen(batch: torch.Tensor) -> Observation:
        return Observation(logits, image=image_numbers.look(batch))

    member.fit([images], progress=False)
    return lambda batch: member.measured(seen(batch))


@torch.inference_mode()
def rows(device: str) -> list[dict[str, Any]]:
    """The times of the pass and of the member."""
    table = []
    for title, count, how in CASES[device]:
        torch.manual_seed(0)
        model = import_torchvision().models.resnet50().eval().to(device)
        images = torch.rand(count, 3, 224, 224, device=device)
        if isinstance(how, torch.dtype):
            images = images.to(how)
            if how == torch.bfloat16:
                model = model.to(how).to(memory_format=torch.channels_last)
                images = images.to(memory_format=torch.channels_last)
        else:
            torch.set_num_threads(how)
        member = fitted(model, images)
        works = {"network": lambda m=model, x=images: m(x), "member": lambda w=member, x=images: w(x)}
        if device == "cuda":
            seconds = {name: sum(kernel_seconds(work).values()) for name, work in works.items()}
        else:
            times = Clock(torch.device(device)).in_turns(works, ROUNDS)
            seconds = {name: statistics.median(taken) for name, taken in times.items()}
        table.append({"run as": title, "images": count, **seconds})
        print(table[-1], flush=True)
    return table


def table() -> str:
    """The rows of both devices."""
    lines = ["| on | images | ResNet-50, ms | image member, ms | part of the pass |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for device in CASES:
        result = data(f"data/image-{device}.json")
        for row in result["rows"]:
            network, member = 1000 * row["network"], 1000 * row["member"]
            where = f"{result['machine']['device_name']}, {row['run as']}"
            cells = [f"{row['images']}", f"{network:.2f}", f"{member:.3f}", f"{member / network:.3f}"]
            lines.append(f"| {where} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=list(CASES), default="cpu")
    args = parser.parse_args()
    result = {"machine": machine(torch.device(args.device)), "rows": rows(args.device)}
    path = DOCS / "data" / f"image-{args.device}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    document.write()


if __name__ == "__main__":
    main()
