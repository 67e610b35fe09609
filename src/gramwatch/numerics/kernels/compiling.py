"""Compiling functions for the CPU, by numba, and keeping what was compiled on disk."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from functools import lru_cache
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

from gramwatch.errors import warn

cache_errors: list[Exception] = []
"""Errors while reading compiled code from disk, or writing it."""


class _Cache(FunctionCache):
    """numba's cache on disk. If a file cannot be read or written, the kernels still work and start slower."""

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except OSError as error:
            cache_errors.append(error)
            return None  # numba compiles the function

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError as error:
            cache_errors.append(error)


def compiled(function):
    """Compile at the first call. Sums may be reordered, and multiplications fused with additions."""
    fastmath = {"reassoc", "contract", "nsz", "arcp"}
    dispatcher: Any = njit(fastmath=fastmath, error_model="numpy", nogil=True)(function)
    try:
        dispatcher._cache = _Cache(function)
    except RuntimeError as error:  # numba found no folder that it can write to
        cache_errors.append(error)
    return dispatcher


@lru_cache(1)
def say_uncached() -> None:
    """Warn once that compiled code cannot be kept on disk."""
    warn(
        "the compiled kernels cannot be kept on disk, so every process compiles them anew, in about half a "
        f"minute: set NUMBA_CACHE_DIR to a folder that can be written to ({cache_errors[0]})"
    )
