"""What the service accepts, and how it refuses the rest."""

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
    images: int = 32
    """Images of a request."""
    queue: int = 128
    """Places for images that are accepted and not yet judged. An image takes one, with reasons two. A request
    whose body is being read takes one."""
    batch_size: int = 32
    """Images in one pass."""
    batch_seconds: float = 0.005
    """How long an image waits for others to join its batch."""
    read_seconds: float = 10.0
    """How long a client may take to send its headers, and again to send its body."""
    judge_seconds: float = 30.0
    """How long a request may wait for its verdicts."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) <= 0:
                raise InputError(f"{each.name} must be positive, got {getattr(self, each.name)}")
        if self.batch_size < 2:
            raise InputError(f"batch_size must be at least 2, got {self.batch_size}")
        if self.images > self.queue:
            raise InputError(
                f"a request may have {self.images} images, but only {self.queue} may wait: raise queue"
            )


@dataclass(eq=False)
class RefusalError(Exception):
    """A request that is not answered: the status, the reason in words, and headers."""

    status: int
    reason: str
    headers: Mapping[str, str] = field(default_factory=dict)


def busy() -> RefusalError:
    """Too much waits already."""
    return RefusalError(429, "too many images wait: try again later", {"Retry-After": "1"})
