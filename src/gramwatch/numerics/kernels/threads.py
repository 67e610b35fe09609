"""Work on as many threads as PyTorch uses."""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
from threadpoolctl import threadpool_info

from gramwatch.numerics.kernels.compiling import cache_errors, say_uncached

_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def in_parts(function: Callable[..., None], count: int, *arguments: object) -> None:
    """Call `function(*arguments, start, stop)` over `range(count)`, on as many threads as PyTorch uses."""
    threads = min(torch.get_num_threads(), count)
    if threads > 1:
        _on_threads(threads, function, count, arguments)
    elif count:
        function(*arguments, 0, count)
    if cache_errors:
        say_uncached()


def _on_threads(threads: int, function: Callable[..., None], count: int, arguments: Sequence[object]) -> None:
    """`in_parts` on several threads. They are PyTorch's own threads, if these can be used.

    After an operation, PyTorch's threads wait actively for the next one for a while. Meanwhile they keep
    other threads from the cores.
    """
    pieces = 4 * threads  # the other threads take over the pieces of a slow thread
    edges = [count * i // pieces for i in range(pieces + 1)]
    parts = [(start, stop) for start, stop in pairwise(edges) if stop > start]
    errors: list[BaseException] = []

    def work(_: object = None) -> None:
        try:
            while parts and not errors:
                try:
                    part = parts.pop()
                except IndexError:  # another thread took the last piece
                    break
                function(*arguments, *part)
        except BaseException as error:
            errors.append(error)

    parallel = _openmp()
    if parallel is not None:
        parallel(_Work(work), None, threads, 0)
    else:
        others = [_pool().submit(work) for _ in range(threads - 1)]
        work()
        for other in others:
            other.result()
    if errors:
        raise errors[0]


@lru_cache(1)
def _openmp() -> Callable[..., None] | None:
    """The function of PyTorch's OpenMP library that starts work on its threads. None if there is none."""
    beside = str(Path(torch.__file__).resolve().parent)
    for library in threadpool_info():
        if library["user_api"] == "openmp" and library["filepath"].startswith(beside):
            try:
                parallel = ctypes.CDLL(library["filepath"]).GOMP_parallel
            except (OSError, AttributeError):
                continue
            parallel.argtypes = [_Work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            return cast("Callable[..., None]", parallel)
    return None


@lru_cache(1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "gramwatch")
