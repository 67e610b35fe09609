"""Several processes of one command that share its work."""

import os
import signal
import sys
import time
from subprocess import Popen
from typing import Any

import typer

PATIENCE = 10.0
"""Seconds that processes have to end by themselves after one of them has failed."""


def first() -> bool:
    """Whether this process writes the command's messages: the only process, or rank 0."""
    return not _launched() or os.environ.get("RANK") == "0"


def processes() -> int:
    """The number of processes of this command on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if _launched() else 1


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_of_rank(device: str) -> str:
    """The device of this process: every process on a machine has a GPU of its own, if there are enough."""
    if device != "cuda" or processes() == 1:
        return device
    import torch

    return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"


def _launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def share(count: int) -> None:
    """Run this command in several processes on this machine, and end. Each of these goes on from here."""
    if count == 1 or processes() > 1:
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # This process keeps the store of the ranks, as torchrun does.
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    command = [sys.executable, "-m", "gramwatch", *sys.argv[1:]]
    ranks = [Popen(command, env=_environment(rank, count, store.port)) for rank in range(count)]
    try:
        raise typer.Exit(_wait(ranks))
    except KeyboardInterrupt:
        _wait_after_failure(ranks)
        raise typer.Exit(130) from None
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets for its processes."""
    values: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "gramwatch",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // count))}
    return {**threads, **os.environ, **{name: str(value) for name, value in values.items()}}


def _wait(ranks: "list[Popen[bytes]]") -> int:
    """Wait for all processes. The exit code is that of the first one that failed."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            rank, code = failed[0]
            if code < 0:
                name = signal.Signals(-code).name
                why = " It may have been short of memory." if name == "SIGKILL" else ""
                typer.echo(f"gramwatch: rank {rank} was ended by {name}.{why}", err=True)
                return 1
            _wait_after_failure(ranks)
            return code
        if not any(code is None for code in codes):
            return 0
        time.sleep(0.1)


def _wait_after_failure(ranks: "list[Popen[bytes]]") -> None:
    end = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in ranks) and time.monotonic() < end:
        time.sleep(0.1)
