"""A stream of scenes in which the lens fogs up, and what a monitor says of it.

    python -m lab.benchmarks.fog --data sets --weights resnet18_scenes.safetensors

A guard of a ResNet-18 is fitted on the training photographs of scenes and calibrated on 1,000 test
photographs. The stream are the other 1,400. Fog grows from image 500 on: each photograph is mixed with a
share of even grey, from nothing to 60 % at the last image. Takes about ten minutes on two cores. Writes
docs/data/fog.json, its figures into docs/monitor.md, and docs/images/monitor.png and monitor_fog.png.

The network: gramwatch train torchvision:resnet18 --set scenes
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramwatch import Guard, Monitor
from gramwatch.explain.frame import INK, OUTSIDE, SMALL, Words, framed
from gramwatch.inputs import networks
from gramwatch_lab import datasets
from lab.benchmarks import document
from lab.benchmarks.cells import DOCS
from lab.benchmarks.measure import machine, save

CLEAR, MOST = 500, 0.6
"""Images before the fog, and its share at the end."""
GREY = 0.75
"""The brightness of fog, of at most one."""
BATCH = 50
LAST = 200
"""The images at the end on which the accuracy is measured."""


def fogged(images: Tensor, share: Tensor) -> Tensor:
    """Photographs of which a share `(N,)` is fog."""
    share = share.view(-1, 1, 1, 1).to(images)
    return (1 - share) * images + share * GREY


def fog_of(images: int) -> Tensor:
    """The share of fog in each image of a stream of this length."""
    return MOST * ((torch.arange(images) - CLEAR).clamp_min(0) / (images - 1 - CLEAR))


def watched(guard: Guard, stream: Tensor, prepare: Any) -> tuple[dict[str, Monitor], Tensor]:
    """Monitors of both kinds that have seen the stream as the fog grows, and the predicted classes."""
    monitors = {reference: Monitor(guard, reference=reference) for reference in ("online", "fixed")}
    predicted = []
    for batch, share in zip(stream.split(BATCH), fog_of(len(stream)).split(BATCH), strict=True):
        detection = guard(prepare(fogged(batch.float() / 255, share)))
        predicted.append(detection.predicted)
        for monitor in monitors.values():
            monitor.update(detection)
    return monitors, torch.cat(predicted)


def row(monitor: Monitor, fog: Tensor) -> dict[str, Any]:
    """What one monitor found."""
    at = monitor.alarm_at
    return {
        "form": monitor.reference,
        "alarm_at": at,
        "since": monitor.since,
        "fog": None if at is None else float(fog[at - 1]),
        "parts": [[part.name, part.images, part.flagged, part.expected] for part in monitor.parts],
    }


def page(result: dict[str, Any]) -> str:
    """The part of docs/monitor.md that stands between the markers."""
    lines = ["| | alarm at image | fog then | change, by its estimate, after | flags most since then |"]
    lines.append("| --- | ---: | ---: | ---: | --- |")
    for row in result["rows"]:
        name, images, flagged, expected = row["parts"][0]
        most = f"`{name}`: {flagged:,} of {images:,}, {expected:,.0f} expected"
        alarm = f"{row['alarm_at']:,} | {100 * row['fog']:.1f} %" if row["alarm_at"] else "none | -"
        lines.append(f'| `"{row["form"]}"` | {alarm} | {row["since"]:,} | {most} |')
    clear, last = (f"{100 * result[name]:.1f} %" for name in ("accuracy_clear", "accuracy_last"))
    share = f"{100 * result['fog_last']:.0f} %"
    note = f"The network is right on {clear} of the images before the fog, and on {last} of the last {LAST},"
    return "\n".join([*lines, "", f"{note} when the fog is at {share} on average."])


def moments(result: dict[str, Any]) -> dict[int, str]:
    """The images of the picture, by number, and which monitor raises its alarm there."""
    alarms = {row["alarm_at"]: f'alarm, "{row["form"]}"' for row in result["rows"] if row["alarm_at"]}
    others = [*range(CLEAR, result["images"], 150), result["images"]]
    apart = [number for number in others if all(abs(number - alarm) > 50 for alarm in alarms)]
    return {number: alarms.get(number, "") for number in sorted([*apart, *alarms])}


def draw_frames(path: Path, stream: Tensor, fog: Tensor, result: dict[str, Any]) -> None:
    """Photographs of the stream as they came, and below one of them with the fog of each moment."""
    words = Words(
        "What the camera saw",
        "",
        "Above: the photographs of the stream at these moments. Below: the first of them with their fog.",
    )
    shown = moments(result)
    frame = framed(words, 2.3, 2, len(shown))
    for column, (number, alarm) in enumerate(shown.items()):
        share = fog[number - 1 : number]
        for axes, which in zip(frame.axes[:, column], (number, min(shown)), strict=True):
            image = fogged(stream[which - 1 : which].float() / 255, share)[0]
            axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="bilinear")
            axes.set_axis_off()
        title = f"{alarm}\nimage {number:,}\nfog {100 * float(share):.0f} %"
        frame.axes[0, column].set_title(title, fontsize=SMALL, color=OUTSIDE if alarm else INK)
    frame.write(path)


def main() -> None:
    """Watch and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of the expanded sets")
    parser.add_argument("--weights", required=True, help="the ResNet-18's checkpoint")
    parser.add_argument("--train", type=int, default=7_200)
    parser.add_argument("--calibration", type=int, default=1_000)
    parser.add_argument("--stream", type=int, default=1_400)
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    loaded = networks.load("torchvision:resnet18", args.weights)
    train = datasets.load("scenes", args.data, split="train", count=args.train).images
    test = datasets.load("scenes", args.data, split="test", count=args.calibration + args.stream)
    held, stream = test.images[: args.calibration], test.images[args.calibration :]
    guard = Guard(loaded.network)
    guard.fit(map(loaded.prepare, train.split(BATCH)), progress=False)
    guard.calibrate(map(loaded.prepare, held.split(BATCH)), progress=False)
    monitors, predicted = watched(guard, stream, loaded.prepare)
    assert test.labels is not None
    right = (predicted == test.labels[args.calibration :]).float()
    fog = fog_of(len(stream))
    result = {"kind": "fog", **machine(torch.device("cpu")), "ranking": len(guard.calibration_scores_)}
    result |= {"accuracy_clear": float(right[:CLEAR].mean()), "accuracy_last": float(right[-LAST:].mean())}
    result |= {"fog_last": float(fog[-LAST:].mean()), "images": len(stream)}
    result["rows"] = [row(monitor, fog) for monitor in monitors.values()]
    save(args.docs / "data" / "fog.json", result)
    monitors["online"].plot(args.docs / "images" / "monitor.png")
    draw_frames(args.docs / "images" / "monitor_fog.png", stream, fog, result)
    document.write()
    print(page(json.loads((args.docs / "data" / "fog.json").read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
