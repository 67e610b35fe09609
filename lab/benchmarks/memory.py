"""Peak memory of each variant on the CPU, in a process of its own (`lab.benchmarks.overhead` starts it).

    python -m lab.benchmarks.memory "WRN-40-2" --batch 16

Prints one line of JSON for each variant: bytes at the worst moment of scoring a batch, over what was resident
before. The fitted detector, its bounds and its compiled kernels are there before, for the plain forward pass
too.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from lab.benchmarks.measure import EVERY_TENSOR_ITS_OWN, peak_on_cpu
from lab.benchmarks.networks import NETWORKS
from lab.benchmarks.subject import MEASURE, Fitted


def in_own_process(name: str, batch: int, threads: int, slow: bool) -> Iterator[tuple[str, int]]:
    """Each variant and its peak, as the process finds them; nothing where the system does not tell."""
    command = [
        sys.executable,
        "-m",
        "lab.benchmarks.memory",
        name,
        f"--batch={batch}",
        f"--threads={threads}",
    ]
    environment = {**os.environ, **EVERY_TENSOR_ITS_OWN}
    with subprocess.Popen(
        command + ["--slow"] * slow, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            report: dict[str, Any] = json.loads(line)
            yield report["variant"], report["bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", choices=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=0, help="instead of the network's own")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--slow", action="store_true", help="the other implementations as well")
    args = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in EVERY_TENSOR_ITS_OWN.items()):
        os.environ.update(EVERY_TENSOR_ITS_OWN)  # read by the allocator as a process starts
        os.execv(sys.executable, [sys.executable, "-m", "lab.benchmarks.memory", *sys.argv[1:]])
    torch.set_num_threads(args.threads)
    subject = Fitted(args.network, torch.device("cpu"), args.batch)
    functions = subject.scoring(args.slow)
    del functions[MEASURE]
    for function in list(functions.values())[:2]:
        function()
    for name, function in functions.items():
        print(json.dumps({"variant": name, "bytes": peak_on_cpu(function)}), flush=True)


if __name__ == "__main__":
    main()
