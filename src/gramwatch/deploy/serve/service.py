"""Admission, reading, decoding and batching: from a request to its verdicts."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from io import BytesIO
from typing import Any, NamedTuple, TypeVar

from async_batcher.batcher import AsyncBatcher
from fastapi import HTTPException, Request
from torch import Tensor

from gramwatch.deploy.serve.judge import Asked, Judge, Verdict
from gramwatch.deploy.serve.metrics import Metrics
from gramwatch.errors import DataError, InputError
from gramwatch.inputs import decoding

Result = TypeVar("Result")


class Wish(NamedTuple):
    """The images of a request, and whether reasons are wanted."""

    images: list[bytes]
    """Image files."""
    reasons: bool = False
    """Whether to say why images are flagged."""


Parse = Callable[[bytes], Wish]
"""Reads the body of a request."""
PLACES_WITH_REASONS = 2
"""The places in the queue of an image with reasons: it may take a second pass."""
PIXELS_OF_A_PLACE = 4 * 2**20
"""An image takes one more place in the queue for so many pixels that are to be decoded."""
WORTH_A_THREAD = 32 * 2**10
"""A body of at most so many bytes is read without a thread. To hand it to one would take longer."""
WORTH_A_JOB = 256 * 2**10
"""Bytes of image files that are decoded by one job. Threads that decode small images wait for each other."""
LARGE = 16 * 2**20
"""Images of more pixels are decoded one after the other, so that smaller ones need not wait for them."""
MOST_DECODERS = 8
"""The most threads that decode. They bound the memory for it."""
MOST_READS = 10_000
"""The most pieces of the header of an image file. Reading millions of small ones takes seconds."""


@dataclass(frozen=True)
class Limits:
    """The most that a request may ask for, and the most that wait at once."""

    body_bytes: int = 16 * 2**20
    """Bytes of a request."""
    pixels: int = 50_000_000
    """Pixels of an image."""
    request_pixels: int | None = None
    """Pixels of all images of a request. An image that is slow to decode counts as more: see
    `decoding.work`. None: twice the pixels of an image."""
    images: int = 32
    """Images of a request."""
    queue: int = 128
    """Places for images that are accepted and not yet judged. An image takes one, with reasons two, and one
    more for every 4 megapixels until it is decoded. A request whose body is being read takes one."""
    batch_size: int = 32
    """Images in one pass."""
    batch_seconds: float = 0.005
    """How long an image waits for others to join its batch."""
    read_seconds: float = 10.0
    """How long a client may take to send its headers, and again to send its body."""
    judge_seconds: float = 30.0
    """How long a request may wait for its verdicts, after its body came. Decoding counts."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value <= 0:
                raise InputError(f"{limit.name} must be positive, got {value}")
        if self.batch_size < 2:
            raise InputError(f"batch_size must be at least 2, got {self.batch_size}")
        if self.images > self.queue:
            raise InputError(
                f"a request may have {self.images} images, but only {self.queue} may wait: raise queue"
            )

    @property
    def work(self) -> int:
        """How long the images of a request may take to decode, in pixels of a common image."""
        return self.request_pixels or 2 * self.pixels


class ImageFile(BytesIO):
    """An image file that takes neither too many reads for its header nor too long to decode."""

    reads: float = MOST_READS
    until: float = math.inf

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes."""
        self.reads -= 1
        if self.reads < 0:
            raise DataError("its header has too many parts")
        if time.monotonic() > self.until:
            raise DataError("too late")
        return super().read(size)


class Begun(NamedTuple):
    """An image that is not decoded yet."""

    file: ImageFile
    size: int
    """Its bytes."""
    image: Any
    """The image that `decoding.begun` opened."""
    work: int
    """How long it takes to decode, in pixels of a common image."""


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
        self._reading = ThreadPoolExecutor(1, "read")
        self._decoding = ThreadPoolExecutor(min(MOST_DECODERS, os.cpu_count() or 1), "decode")
        self._decoding_large = ThreadPoolExecutor(1, "decode-large")
        self._batches = Batches(self.judge, self.limits, self.metrics, self._judging)
        await self.in_judges_thread(self.judge.warm_up)
        self.ready = True

    async def stop(self) -> None:
        """End, after what was accepted is judged and the state of the monitor is saved."""
        self.ready = False
        await self._batches.stop()
        await self.save()
        for threads in (self._judging, self._reading, self._decoding, self._decoding_large):
            threads.shutdown()

    async def save(self) -> None:
        """Keep the state of the monitor."""
        if not await self.in_judges_thread(self.judge.save):
            self.metrics.failed_saves.inc()

    async def save_regularly(self, seconds: float) -> None:
        """Save the state of the monitor at regular intervals."""
        while True:
            await asyncio.sleep(seconds)
            await self.save()

    async def in_judges_thread(self, work: Callable[[], Result]) -> Result:
        """Run a function between two batches, when the monitor is idle."""
        return await asyncio.get_running_loop().run_in_executor(self._judging, work)

    # --- one request ---------------------------------------------------------------------------------

    async def verdicts(self, request: Request, parse: Parse) -> list[Verdict]:
        """The verdicts for the images of a request. Raises an `HTTPException`."""
        places = self._enter(1)  # before the body is read: bodies take memory, too
        try:
            most, seconds = self.limits.body_bytes, self.limits.read_seconds
            too_large = f"the body is too large: it may have {most:,} bytes"
            body = await received(
                request, most, seconds, too_large, f"the body did not come within {seconds:g} seconds"
            )
            until = time.monotonic() + self.limits.judge_seconds
            images, reasons = await self._begun(parse, body)
            of_each = PLACES_WITH_REASONS if reasons else 1
            places += self._enter(of_each * len(images) - 1)
            inputs = await self._decoded(images, until, self.limits.queue - places)
            judged = [
                asyncio.ensure_future(self._batches.process(Asked(tensor, reasons))) for tensor in inputs
            ]
            for job in judged:
                job.add_done_callback(lambda _: self._leave(of_each))
            places = 0
        finally:
            self._leave(places)
        # What is in the queue stays there if the client or its time is gone: a cancelled item would spoil
        # the batch of the others.
        _, late = await asyncio.wait(judged, timeout=until - time.monotonic())
        if late:
            raise too_late()
        return [job.result() for job in judged]

    def _enter(self, images: int) -> int:
        if not self.ready:
            raise HTTPException(503, "the service is not ready", {"Retry-After": "1"})
        if self.waiting + images > self.limits.queue:
            raise busy()
        self.waiting += images
        return images

    def _leave(self, images: int) -> None:
        self.waiting -= images

    async def _begun(self, parse: Parse, body: bytes) -> tuple[list[Begun], bool]:
        """The images of a request, not decoded yet, and whether reasons are asked for."""
        if len(body) <= WORTH_A_THREAD:
            return self._within_limits(parse(body))
        return await asyncio.get_running_loop().run_in_executor(
            self._reading, lambda: self._within_limits(parse(body))
        )

    def _within_limits(self, wish: Wish) -> tuple[list[Begun], bool]:
        count = len(wish.images)
        if not count:
            raise HTTPException(400, "there is no image")
        if count > self.limits.images:
            raise HTTPException(413, f"there are {count} images: a request may have {self.limits.images}")
        if wish.reasons and not self.judge.explains:
            raise HTTPException(
                400, "this guard gives no reasons: an exported guard returns scores and p-values only"
            )
        most = self.limits.queue // PLACES_WITH_REASONS
        if wish.reasons and count > most:
            raise HTTPException(413, f"there are {count} images: with reasons, a request may have {most}")
        begun: list[Begun] = []
        work = 0
        for data in wish.images:
            begun.append(self._opened(data, len(begun)))
            work += begun[-1].work
            if work > self.limits.work:
                raise HTTPException(
                    413,
                    f"the images take as long to decode as {work:,} pixels: a request may have "
                    f"{self.limits.work:,}",
                )
        return begun, wish.reasons

    def _opened(self, data: bytes, number: int) -> Begun:
        file = ImageFile(data)
        try:
            image = decoding.begun(file, self.limits.pixels)
            work = decoding.work(image)
        except DataError as error:
            raise HTTPException(400, f"image {number}: {error}") from None
        file.reads = math.inf
        return Begun(file, len(data), image, work)

    async def _decoded(self, images: Sequence[Begun], until: float, places: int) -> list[Tensor]:
        """The inputs made from images. Raises an `HTTPException` for the first that cannot be read.

        Until they are decoded, they take up to so many `places` more.
        """
        taken = self._enter(min(places, sum(image.work for image in images) // PIXELS_OF_A_PLACE))
        loop = asyncio.get_running_loop()
        jobs = asyncio.gather(
            *[
                loop.run_in_executor(
                    self._decoding_large if group[0].work > LARGE else self._decoding,
                    self._read,
                    group,
                    until,
                )
                for group in _groups(images)
            ]
        )

        def ended(jobs: "asyncio.Future[Any]") -> None:
            self._leave(taken)
            jobs.exception()  # marks the error as seen, also if nobody waits any more

        jobs.add_done_callback(ended)
        done, _ = await asyncio.wait([jobs], timeout=until - time.monotonic())
        if not done:  # the threads notice it, too
            raise too_late()
        inputs: list[Tensor] = []
        for outcome in [outcome for group in jobs.result() for outcome in group]:
            if isinstance(outcome, DataError):
                raise HTTPException(400, f"image {len(inputs)}: {outcome}")
            inputs.append(outcome)
        return inputs

    def _read(self, images: Sequence[Begun], until: float) -> list[Tensor | DataError]:
        return [self._read_one(image, until) for image in images]

    def _read_one(self, image: Begun, until: float) -> Tensor | DataError:
        image.file.until = until
        try:
            if time.monotonic() > until:
                raise too_late()
            return self.judge.prepared(image.image)
        except DataError as error:
            if time.monotonic() > until:
                raise too_late() from None
            return error


async def received(request: Request, most: int, seconds: float, too_large: str, too_slow: str) -> bytes:
    """The body of a request, at most so many bytes of it. It is refused in these words otherwise."""

    async def body() -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise HTTPException(413, too_large)
        pieces = bytearray()
        async for piece in request.stream():
            pieces += piece
            if len(pieces) > most:
                raise HTTPException(413, too_large)
        return bytes(pieces)

    try:
        return await asyncio.wait_for(body(), seconds)
    except asyncio.TimeoutError:
        raise HTTPException(408, too_slow) from None


def busy() -> HTTPException:
    """The refusal if the queue is full."""
    return HTTPException(429, "too many images wait: try again later", {"Retry-After": "1"})


def too_late() -> HTTPException:
    """The refusal of a request whose time is over."""
    return HTTPException(503, "the verdict takes too long", {"Retry-After": "1"})


def _groups(images: Sequence[Begun]) -> list[list[Begun]]:
    """Images in groups that are worth a thread: several small images, or one large image."""
    groups: list[list[Begun]] = []
    for image in images:
        if not groups or _is_full(groups[-1]) or image.work > LARGE:
            groups.append([])
        groups[-1].append(image)
    return groups


def _is_full(group: Sequence[Begun]) -> bool:
    return (
        sum(image.size for image in group) > WORTH_A_JOB
        or sum(image.work for image in group) > PIXELS_OF_A_PLACE
    )
