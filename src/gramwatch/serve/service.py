"""Admission, reading, decoding and batching: from a request to its verdicts."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from async_batcher.batcher import AsyncBatcher
from starlette.requests import Request
from torch import Tensor

from gramwatch.errors import DataError
from gramwatch.serve.judge import Asked, Judge, Verdict
from gramwatch.serve.limits import Limits, RefusalError, busy
from gramwatch.serve.metrics import Metrics

Result = TypeVar("Result")


class Wish(NamedTuple):
    """What a request asks for."""

    images: list[bytes]
    """Image files."""
    reasons: bool = False
    """Whether to say why images are flagged."""


Parse = Callable[[bytes], Wish]
"""Reads the body of a request."""
PLACES_WITH_REASONS = 2
"""The places in the queue of an image with reasons: it may take a second pass."""
WORTH_A_THREAD = 256 * 2**10
"""Bytes of image files that are decoded by one job. Threads that decode small images wait for each other. A
body of at most so many bytes is parsed without a thread."""


class Batches(AsyncBatcher):  # type: ignore[misc]
    """Joins the images of all requests into batches, in the order in which they come."""

    def __init__(self, judge: Judge, limits: Limits, metrics: Metrics, thread: ThreadPoolExecutor) -> None:
        super().__init__(
            max_batch_size=limits.batch_size, max_queue_time=limits.batch_seconds, executor=thread
        )
        self.judge, self.metrics = judge, metrics

    def process_batch(self, batch: list[Asked]) -> list[Verdict]:
        """The verdicts of a batch."""
        verdicts = self.judge(batch)
        self.metrics.count(verdicts)
        return verdicts


class Service:
    """Takes requests in, up to the limits, and answers them. It lives on one event loop."""

    def __init__(self, judge: Judge, limits: Limits, metrics: Metrics) -> None:
        self.judge, self.limits, self.metrics = judge, limits, metrics
        self.ready = False
        self.waiting = 0
        """Images that are accepted and not yet judged."""
        metrics.waiting.set_function(lambda: self.waiting)

    async def start(self) -> None:
        """Begin to accept."""
        self._judging = ThreadPoolExecutor(1, "judge")
        self._decoding = ThreadPoolExecutor(os.cpu_count() or 1, "decode")
        self._batches = Batches(self.judge, self.limits, self.metrics, self._judging)
        await self.in_judges_thread(self.judge.warm_up)
        self.ready = True

    async def stop(self) -> None:
        """End, after what was accepted is judged and the state of the monitor is saved."""
        self.ready = False
        await self._batches.stop()
        await self.save()
        self._judging.shutdown()
        self._decoding.shutdown()

    async def save(self) -> None:
        """Keep the state of the monitor."""
        if not await self.in_judges_thread(self.judge.save):
            self.metrics.failed_saves.inc()

    async def save_regularly(self, seconds: float) -> None:
        """Keep the state of the monitor again and again."""
        while True:
            await asyncio.sleep(seconds)
            await self.save()

    async def in_judges_thread(self, work: Callable[[], Result]) -> Result:
        """Run something between two batches, when the monitor is not at work."""
        return await asyncio.get_running_loop().run_in_executor(self._judging, work)

    # --- one request ---------------------------------------------------------------------------------

    async def verdicts(self, request: Request, parse: Parse) -> list[Verdict]:
        """The verdicts for the images of a request. Raises a `RefusalError`."""
        places = self._enter(1)  # before the body is read: bodies take memory, too
        try:
            images, reasons = await self._wish(request, parse)
            of_each = PLACES_WITH_REASONS if reasons else 1
            places += self._enter(of_each * len(images) - 1)
            inputs = await self._decoded(images)
            judged = [asyncio.ensure_future(self._batches.process(Asked(each, reasons))) for each in inputs]
            for each in judged:
                each.add_done_callback(lambda _: self._leave(of_each))
            places = 0
        finally:
            self._leave(places)
        # What is in the queue stays there if the client or its time is gone: a cancelled item would spoil
        # the batch of the others.
        _, late = await asyncio.wait(judged, timeout=self.limits.judge_seconds)
        if late:
            raise RefusalError(503, "the verdict takes too long", {"Retry-After": "1"})
        return [each.result() for each in judged]

    def _enter(self, images: int) -> int:
        if not self.ready:
            raise RefusalError(503, "the service is not ready", {"Retry-After": "1"})
        if self.waiting + images > self.limits.queue:
            raise busy()
        self.waiting += images
        return images

    def _leave(self, images: int) -> None:
        self.waiting -= images

    async def _wish(self, request: Request, parse: Parse) -> Wish:
        """What a request asks for, within the limits."""
        try:
            body = await asyncio.wait_for(self._body(request), self.limits.read_seconds)
        except asyncio.TimeoutError:
            raise RefusalError(
                408, f"the body did not come within {self.limits.read_seconds:g} seconds"
            ) from None
        wish = await self._parsed(parse, body)
        count = len(wish.images)
        if not count:
            raise RefusalError(400, "there is no image")
        if count > self.limits.images:
            raise RefusalError(413, f"there are {count} images: a request may have {self.limits.images}")
        if wish.reasons and not self.judge.explains:
            raise RefusalError(
                400, "this guard gives no reasons: an exported guard returns scores and p-values only"
            )
        most = self.limits.queue // PLACES_WITH_REASONS
        if wish.reasons and count > most:
            raise RefusalError(413, f"there are {count} images: with reasons, a request may have {most}")
        return wish

    async def _parsed(self, parse: Parse, body: bytes) -> Wish:
        """A small body is read at once: to hand it to a thread would take longer."""
        if len(body) <= WORTH_A_THREAD:
            return parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._decoding, parse, body)

    async def _body(self, request: Request) -> bytes:
        most = self.limits.body_bytes
        too_large = RefusalError(413, f"the body is too large: it may have {most:,} bytes")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise too_large
        return bytes(body)

    async def _decoded(self, images: Sequence[bytes]) -> list[Tensor]:
        """The inputs made from image files. Raises a `RefusalError` for the first that cannot be read."""
        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(self._decoding, self._read, group) for group in _groups(images)]
        inputs: list[Tensor] = []
        for each in [each for group in await asyncio.gather(*jobs) for each in group]:
            if isinstance(each, DataError):
                raise RefusalError(400, f"image {len(inputs)}: {each}")
            inputs.append(each)
        return inputs

    def _read(self, images: Sequence[bytes]) -> list[Tensor | DataError]:
        return [self._read_one(image) for image in images]

    def _read_one(self, image: bytes) -> Tensor | DataError:
        try:
            return self.judge.read(image, self.limits.pixels)
        except DataError as error:
            return error


def _groups(images: Sequence[bytes]) -> list[list[bytes]]:
    """Images in groups that are worth a thread: several small images, or one large image."""
    groups: list[list[bytes]] = [[]]
    for image in images:
        if sum(map(len, groups[-1])) > WORTH_A_THREAD:
            groups.append([])
        groups[-1].append(image)
    return groups
