"""Processes of one run. They are forked from a server that has imported and compiled everything already."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.warmed"])


class Run:
    """Processes with the ranks 0 to size - 1, each of which calls `job(rank, size, *args)`.

    By default this process keeps their store, as torchrun does. Otherwise rank 0 does.
    """

    def __init__(
        self, folder: Path, size: int, job: Callable[..., Any], *args: Any, rank_0_is_host: bool = False
    ):
        self._folder, self._begun = folder, time.monotonic()
        self._folder.mkdir(parents=True)
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = self._store.port
        if rank_0_is_host:
            del self._store
        self.processes = [
            CONTEXT.Process(target=_process, args=(folder, rank, size, port, rank_0_is_host, job, args))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def results(self, seconds: float = 60) -> list[Any]:
        """What the jobs returned: their result, or the exception they raised, or None if they were killed."""
        for process in self.processes:
            process.join(max(0.0, seconds - (time.monotonic() - self._begun)))
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in hanging:
            self.processes[rank].kill()
        assert not hanging, f"ranks {hanging} still ran after {seconds} seconds"
        files = [self._folder / f"{rank}.pt" for rank in range(len(self.processes))]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _process(
    folder: Path, rank: int, size: int, port: int, rank_0_is_host: bool, job: Callable[..., Any], args: Any
) -> None:
    multiprocessing.set_start_method("fork", force=True)  # of the workers of loaders
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank_0_is_host and rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        result = job(rank, size, *args)
    except BaseException as error:  # it is what the test looks at
        result = error
    torch.save(result, folder / f"{rank}.tmp")
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.pt")
    os._exit(0)  # without the clean-up of a normal end, as after a failure
