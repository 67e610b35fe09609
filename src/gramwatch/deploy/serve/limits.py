"""The limits of the service, and its refusals."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from gramwatch.errors import InputError


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


@dataclass(eq=False)
class RefusalError(Exception):
    """A request that is not answered: the status, the reason in words, and headers."""

    status: int
    reason: str
    headers: Mapping[str, str] = field(default_factory=dict)


def busy() -> RefusalError:
    """The refusal if the queue is full."""
    return RefusalError(429, "too many images wait: try again later", {"Retry-After": "1"})
