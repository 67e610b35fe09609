"""Long runs: hundreds of thousands of batches in constant memory, and eight threads with one guard."""

import threading
from collections.abc import Iterator

import numpy as np
import torch

import gramwatch
from gramwatch.inputs.demo import digits
from tests.stress_common import Row, batches_of, resident, same, tiny_guard

BATCHES = 200_000
ALLOWED = 4 * 2**20
"""How much the memory may grow after the first tenth of the batches, in bytes."""
THREADS = 8


def rows(batches: int = BATCHES) -> Iterator[Row]:
    yield memory(batches)
    yield threads()


def memory(count: int) -> Row:
    """Judge batches of one to eight images. The memory is looked at a hundred times."""
    torch.set_num_threads(1)
    guard, rng = tiny_guard(), np.random.default_rng(0)
    batches = batches_of(digits().test, rng, 256)
    first = [guard(batch) for batch in batches]
    seen, wrong = [], 0
    for number in range(count):
        detection = guard(batches[number % 256])
        wrong += not torch.equal(detection.score, first[number % 256].score)
        if (number + 1) % (count // 100) == 0:
            seen.append(resident())
    growth = max(seen[10:]) - max(seen[:10])
    survived = count if growth <= ALLOWED and not wrong else count - max(wrong, 1)
    return Row(
        "batches scored in one process",
        count,
        survived,
        f"memory after the first tenth grew by {max(growth, 0) / 2**20:.1f} MiB of "
        f"{max(seen[:10]) / 2**20:.0f} MiB; {wrong} other scores",
    )


def threads(times: int = 500) -> Row:
    """Eight threads call one guard at once. Each result is compared with that of one thread."""
    guard, rng = tiny_guard(), np.random.default_rng(1)
    batches = batches_of(digits().test, rng, 64)
    alone = [guard(batch) for batch in batches]
    right = [0] * THREADS

    def judge(thread: int) -> None:
        for number in range(times):
            which = (number * 7 + thread) % len(batches)
            detection: gramwatch.Detection = guard(batches[which])
            right[thread] += same(detection, alone[which])

    workers = [threading.Thread(target=judge, args=(number,)) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return Row("batches scored by eight threads at once", THREADS * times, sum(right), "equal to one thread")
