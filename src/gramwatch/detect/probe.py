"""The probe: a small made-up input, with the logits and the score that it had when a file was written.

The fingerprint of a network covers its tensors. It does not cover its code: another activation, another
pooling, another epsilon, a buffer that is not saved. The probe shows such a change when the file is loaded.

The input has the form of the first example that a detector saw: shapes, types, and the range of the numbers.
It has none of its values. A recipe makes it, the same on every machine, in plain values for a file.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gramwatch.errors import InputError
from gramwatch.files.artifact import check_types
from gramwatch.inputs.batches import Inputs, count_examples, device_of
from gramwatch.watch import Network, judging
from gramwatch.watch.running import call

MOST_NUMBERS = 2**24
"""The most numbers in an input. A larger one has no probe, and a file with a larger one is refused."""
MOST_LOGITS = 4096
"""The number of logits that are kept and compared."""
MOST_NESTED = 20
"""How deep tuples and mappings may lie in each other."""
ROUNDING = 3e-5
"""How much logits may differ, as a share of their spread. Networks in float32 differ by some 1e-7, by the
order of sums. Another epsilon of a batch normalisation differs by 5e-5 and more."""
OTHER_DEVICES = 5e-3
"""How much logits may differ on a GPU, as a share of their spread: TF32 rounds to a thousandth."""
OF_SCORE = 100
"""How much more a score may differ than logits: it is made of many numbers, and of small differences."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True)
class Answer:
    """What a network, and a detector of it, say of the probe."""

    logits: Tensor
    """`(classes,)`, on the CPU, at most `MOST_LOGITS`."""
    score: float | None
    """None if the detector is not calibrated, or if rounding decides it."""
    device: str
    """The kind of the device: `"cpu"`, `"cuda"`."""

    @staticmethod
    def of(logits: Tensor, score: float | None) -> "Answer":
        """The answer from logits `(1, classes)`."""
        return Answer(logits[0].detach().cpu()[:MOST_LOGITS], score, logits.device.type)

    @property
    def is_finite(self) -> bool:
        """Whether the answer can be compared."""
        return bool(self.logits.isfinite().all()) and (self.score is None or math.isfinite(self.score))

    def rounding(self, dtype: torch.dtype) -> float:
        """How much logits may differ by rounding in a network of this type, as a share of their spread."""
        eps = max(torch.finfo(kind).eps for kind in (dtype, self.logits.dtype))
        share = max(ROUNDING, 8 * eps)
        return share if self.device == "cpu" else max(share, OTHER_DEVICES)

    def differences(self, now: "Answer", share: float) -> str:
        """What differs in an answer of today, in words; empty if nothing does."""
        if len(now.logits) != len(self.logits):
            return f"it has {len(now.logits)} logits, and had {len(self.logits)}"
        then = self.logits.double()
        most = float((now.logits.double() - then).abs().max())
        spread = float(then.max() - then.min())
        if not most <= share * max(spread, float(then.abs().max()) * share, 1e-30):
            return f"its logits differ by up to {most:.3g}. They lie within {spread:.3g}"
        if self.score is None or now.score is None:
            return ""
        if not abs(now.score - self.score) <= OF_SCORE * share * max(1.0, abs(self.score)):
            return f"its logits are the same, but its score was {self.score:.6g} and is {now.score:.6g}"
        return ""

    def to_json(self, recipe: Any) -> dict[str, Any]:
        """Plain values for a file: the recipe of the input, and the answer."""
        logits = [float(f"{value:.9g}") for value in self.logits.tolist()]
        return {"input": recipe, "device": self.device, "logits": logits, "score": self.score}

    @staticmethod
    def from_json(stored: Any) -> "Answer":
        """The answer in a file, checked."""
        if not isinstance(stored, dict):
            raise ValueError(f"its probe cannot be {stored!r:.60}")
        check_types(stored, device=str, logits=list[float], score=float | None)
        if not 0 < len(stored["logits"]) <= MOST_LOGITS:
            raise ValueError(f"its probe has {len(stored['logits']):,} logits")
        logits = torch.tensor(stored["logits"], dtype=torch.float64)
        return Answer(logits, stored["score"], stored["device"])


@contextmanager
def plainly(network: Network) -> Iterator[None]:
    """Run a network as it is: in evaluation mode, without gradients, uncompiled, in its own precision."""
    device = device_of(network.model)
    with judging(network.module), torch.autocast("cpu" if device is None else device.type, enabled=False):
        yield


def logits_of(network: Network, inputs: Inputs) -> Tensor:
    """The logits of a network without hooks, `(1, classes)`."""
    with plainly(network):
        return network.logits_of(call(network.module, inputs))


def repeatable(answer: Answer, network: Network, inputs: Inputs) -> Answer | None:
    """The answer as far as it can be compared. None if the network is random, or if it is not finite.

    If two classes are nearly equal, rounding decides which bounds hold. So there is no score.
    """
    share = answer.rounding(network.dtype)
    if not answer.is_finite or answer.differences(Answer.of(logits_of(network, inputs), None), share):
        return None
    best = answer.logits.double().topk(2).values
    near = float(best[0] - best[1]) <= 10 * share * float(answer.logits.max() - answer.logits.min())
    return replace(answer, score=None) if near else answer


# --- the input ---------------------------------------------------------------------------------------


def recipe_of(inputs: Inputs) -> Any:
    """How to make an input of the form of a batch's first example, in plain values. None if it cannot be."""
    try:
        recipe = _recipe(inputs, count_examples(inputs), 0)
        _check(recipe)
    except (InputError, ValueError, TypeError):
        return None
    return recipe


def _recipe(value: Any, total: int, depth: int) -> dict[str, Any]:
    if depth > MOST_NESTED:
        raise ValueError("it is nested too deeply")
    if isinstance(value, Tensor):
        return {"tensor": _of_tensor(value[:1] if value.ndim and value.shape[0] == total else value)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("its keys are not text")
        return {"mapping": {key: _recipe(item, total, depth + 1) for key, item in value.items()}}
    if isinstance(value, tuple | list):
        return {"tuple": [_recipe(item, total, depth + 1) for item in value]}
    return {"value": value}


def _of_tensor(t: Tensor) -> dict[str, Any]:
    """Shape and type, and the range of the made-up numbers: of measurements two deviations, else all."""
    kind = str(t.dtype).removeprefix("torch.")
    if kind not in _DTYPES or t.layout != torch.strided:
        raise TypeError(f"{t.dtype} is not made up")
    low, high = 0.0, 0.0
    if t.is_floating_point():
        usual = t.detach().double().nan_to_num(0.0, 0.0, 0.0)
        mean, half = (float(usual.mean()), 1.75 * float(usual.std(correction=0))) if t.numel() else (0.0, 0.0)
        low, high = (float(f"{end:.3g}") for end in (mean - half, mean + half))
    elif t.numel():
        low, high = int(t.min()), int(t.max())
    return {"shape": list(t.shape), "dtype": kind, "low": low, "high": high}


def made(recipe: Any) -> Inputs:
    """The input of a recipe, one example on the CPU. The recipe is checked before memory is taken."""
    _check(recipe)
    return _made(recipe)


def _check(recipe: Any) -> None:
    if sum(_numbers(recipe, 0)) > MOST_NUMBERS:
        raise ValueError(f"its probe has more than {MOST_NUMBERS:,} numbers")


def _numbers(recipe: Any, depth: int) -> Sequence[int]:
    """How many numbers the tensors of a recipe have, with everything else about it checked."""
    if not isinstance(recipe, dict) or len(recipe) != 1 or depth > MOST_NESTED:
        raise ValueError(f"its probe cannot be made as {recipe!r:.60}")
    ((kind, value),) = recipe.items()
    if kind == "tensor" and isinstance(value, dict):
        check_types(value, shape=list[int], dtype=str, low=float, high=float)
        shape, low, high = value["shape"], value["low"], value["high"]
        if value["dtype"] not in _DTYPES or min(shape, default=0) < 0 or len(shape) > 16 or low > high:
            raise ValueError(f"its probe cannot be made as {value!r:.60}")
        dtype = _DTYPES[value["dtype"]]
        if not _lowest(dtype) <= low <= high <= _highest(dtype):
            raise ValueError(f"its probe has numbers from {low} to {high}, which are not {value['dtype']}")
        return [math.prod(shape)]
    if kind == "mapping" and isinstance(value, dict):
        return [n for item in value.values() for n in _numbers(item, depth + 1)]
    if kind == "tuple" and isinstance(value, list):
        return [n for item in value for n in _numbers(item, depth + 1)]
    if kind == "value" and isinstance(value, str | int | float | bool | None):
        return []
    raise ValueError(f"its probe cannot be made as {recipe!r:.60}")


def _lowest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return 0
    return torch.finfo(dtype).min if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return 1
    return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max


def _made(recipe: Any) -> Any:
    ((kind, value),) = recipe.items()
    if kind == "tensor":
        return _tensor(**value)
    if kind == "mapping":
        return {key: _made(item) for key, item in value.items()}
    return tuple(map(_made, value)) if kind == "tuple" else value


def _tensor(shape: list[int], dtype: str, low: float, high: float) -> Tensor:
    """Numbers from `low` to `high` that look random. Of two whole numbers, the larger: a mask is full."""
    kind = _DTYPES[dtype]
    if not kind.is_floating_point and high - low <= 1:
        return torch.full(shape, high, dtype=kind)
    bits = torch.arange(math.prod(shape))
    for factor in (2654435761, 2246822519):  # a hash of the place: exact in whole numbers on every machine
        bits = (bits + 1) * factor & 0xFFFFFFFF
        bits ^= bits >> 15
    if kind.is_floating_point:
        return (low + bits.double() * ((high - low) / 2**32)).to(kind).reshape(shape)
    return (int(low) + bits % (int(high) - int(low) + 1)).to(kind).reshape(shape)
