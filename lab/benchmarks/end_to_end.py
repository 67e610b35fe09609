"""`gramwatch score` from photographs to a table, beside what decoding and the network alone allow.

    python -m lab.benchmarks.end_to_end            # about four minutes on two cores

In each round three processes take the same photographs, in turns: one decodes and resizes them, as the
command does; one also runs the network; one is `gramwatch score`. All have as many decoding workers. Their
time is that of the loop over the images, without the start of Python. Weights are random.

Writes docs/data/end_to_end.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gramwatch.cli.common import default_workers, opened_guard
from gramwatch.cli.options import NetworkOptions
from gramwatch.inputs.foreign import imported
from gramwatch.inputs.readers import Images
from lab.benchmarks.measure import machine, ratios, save, summary
from lab.benchmarks.stream import linked, photographs, told

DATA = Path("docs/data/end_to_end.json")
NETWORKS = {"ResNet-50": "timm:resnet50", "EfficientNet-B0": "timm:efficientnet_b0"}
SIDE, BATCH = 640, 64
"""The pixels along a side of the photographs, and how many are judged at once."""
ALONE = "decoding", "decoding and the network"


def alone(what: str, guard: Path, network: str, weights: Path, folder: Path) -> None:
    """Decode the photographs of a folder, and perhaps run the network. Print the seconds."""
    opened = opened_guard(guard, NetworkOptions(network, weights), "cpu")
    assert opened.recorded is not None
    keys = [str(path) for path in sorted(folder.iterdir())]
    start = time.monotonic()
    for batch in Images(keys, opened.recorded, batch_size=BATCH, workers=default_workers()):
        if what == ALONE[1]:
            with torch.inference_mode():
                opened.detector.model(batch.inputs).argmax(1)
    print(time.monotonic() - start)


def seconds_alone(what: str, guard: Path, network: str, weights: Path, folder: Path) -> float:
    """`alone` in a process of its own. Waiting threads leave the cores to the workers, as in the command."""
    asked = [
        sys.executable,
        "-m",
        "lab.benchmarks.end_to_end",
        "--alone",
        what,
        guard,
        network,
        weights,
        folder,
    ]
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    run = subprocess.run(list(map(str, asked)), capture_output=True, text=True, check=True, env=environment)
    return float(run.stdout.split()[-1])


def measured(network: str, folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """The rounds of one network."""
    folder.mkdir()
    torch.manual_seed(0)
    model = imported("timm").create_model(network.removeprefix("timm:"), pretrained=False)
    weights, guard = folder / "net.safetensors", folder / "guard.safetensors"
    save_file(model.state_dict(), weights)
    files = photographs(SIDE, folder / "files")
    told(
        "fit", network, linked(files, folder / "fit", 200), "--weights", weights, "--no-rehearse", "-o", guard
    )
    images = linked(files, folder / "images", count)
    times: dict[str, list[float]] = {what: [] for what in (*ALONE, "gramwatch score")}
    for turn in range(rounds):
        for what in list(times)[:: -1 if turn % 2 else 1]:
            if what in ALONE:
                seconds = seconds_alone(what, guard, network, weights, images)
            else:
                answer = told("score", guard, images, "--model", network, "--weights", weights, "--overwrite",
                              "--batch-size", BATCH, "-o", folder / "scores.csv")  # fmt: skip
                seconds = answer["seconds"]
            times[what].append(seconds)
            print(f"{network}, {what}: {count / seconds:.1f} images each second", flush=True)
    return {
        "images": count,
        "per_second": {what: summary([count / s for s in seconds]) for what, seconds in times.items()},
        "of_what_the_network_allows": summary(ratios(times[ALONE[1]], times["gramwatch score"])),
        "share": {
            "decoding": summary(ratios(times[ALONE[0]], times["gramwatch score"])),
            "beside_the_network": summary([1 - r for r in ratios(times[ALONE[1]], times["gramwatch score"])]),
        },
    }


def page() -> dict[str, str]:
    """The block of docs/howto/large_data.md."""
    kept = json.loads(DATA.read_text(encoding="utf-8"))
    lines = [
        "| images each second | decoding | with the network | `gramwatch score` | share of that |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, row in kept["networks"].items():
        rates = [f"{row['per_second'][what]['median']:.1f}" for what in (*ALONE, "gramwatch score")]
        share = row["of_what_the_network_allows"]
        cells = [name, *rates, f"{share['median']:.2f} ({share['low']:.2f} to {share['high']:.2f})"]
        lines.append(f"| {' | '.join(cells)} |")
    return {"end to end": "\n".join(lines)}


def main(given: list[str] | None = None) -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.end_to_end",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=DATA)
    parser.add_argument("--alone", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.alone:
        what, guard, network, weights, folder = args.alone
        alone(what, Path(guard), network, Path(weights), Path(folder))
        return
    result: dict[str, Any] = {"kind": "end_to_end", **machine(torch.device("cpu")), "networks": {}}
    result["workers"] = default_workers()
    with tempfile.TemporaryDirectory() as place:
        for name, network in NETWORKS.items():
            result["networks"][name] = measured(network, Path(place) / name, args.images, args.rounds)
            save(args.output, result)


if __name__ == "__main__":
    main()
