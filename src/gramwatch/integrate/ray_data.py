"""Ray Data: a fit over the blocks of a data set, and scores as further columns.

`fit` gives every worker a part of the blocks. Each worker sends back the states of its fit, in the form that
files have, and they are merged. `score` is one `map_batches`. docs/scale.md has an example.
"""

import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor

from gramwatch.detect.detector import Detector
from gramwatch.detect.fitting import packed, unpacked
from gramwatch.errors import GramwatchWarning, InputError, MissingExtraError

_D = TypeVar("_D", bound=Detector)
_State = tuple[Any, dict[str, Tensor]]


def fit(
    detector: _D,
    dataset: Any,
    *,
    workers: int,
    batch_size: int = 256,
    num_cpus: float = 1,
    num_gpus: float = 0,
) -> _D:
    """Fit a detector on a `ray.data.Dataset`. A further fit adds to the first.

    Args:
        detector: a detector whose fits can be merged.
        dataset: its batches are mappings of arrays, as `detector.fit` takes them: docs/inputs.md.
        workers: the number of tasks that fit at the same time. The cluster needs further CPUs, which read.
        batch_size: the number of examples in one pass.
        num_cpus: the CPUs of a worker.
        num_gpus: the GPUs of a worker. If there are any, the network runs there.

    """
    ray = _ray()
    for leaf in detector.leaves:
        if leaf.why_not_merged:
            raise ValueError(f"several workers cannot fit '{leaf.name}'. {leaf.why_not_merged}")
    _check_room(ray, workers, num_cpus)
    task = ray.remote(_fitted).options(num_cpus=num_cpus, num_gpus=num_gpus)
    shared = ray.put(detector)
    parts = dataset.streaming_split(workers)
    states = ray.get([task.remote(shared, part, batch_size, bool(num_gpus)) for part in parts])
    fitted = [unpacked(detector, *state) for state in states if state is not None]
    if not fitted:
        raise InputError("the data set has no example: there is nothing to fit")
    first, *others = fitted
    for other in others:
        first.merge(other)
    if detector.is_fitted and detector.learns:
        detector.merge(first)
    else:
        detector.adopt(first)
    for leaf in detector.leaves:
        leaf.finish()  # it warns of classes with few examples
    detector.check_useful()
    return detector


def score(
    detector: Detector,
    dataset: Any,
    *,
    workers: int,
    keep: Iterable[str] = (),
    batch_size: int = 256,
    num_gpus: float = 0,
) -> Any:
    """A data set of verdicts: predicted, score, p_value, is_ood, and p_NAME for each member of a guard.

    Args:
        detector: a calibrated detector.
        dataset: a `ray.data.Dataset`, as for `fit`.
        workers: the number of actors that score at the same time.
        keep: the columns of the data set to keep, such as a path.
        batch_size: the number of examples in one pass.
        num_gpus: the GPUs of a worker. If there are any, the network runs there.

    """
    ray = _ray()
    detector.calibration()  # raises the error that says what is missing
    return dataset.map_batches(
        _Scoring,
        fn_constructor_args=(ray.put(detector), tuple(keep), bool(num_gpus)),
        batch_size=batch_size,
        batch_format="numpy",
        concurrency=workers,
        num_gpus=num_gpus,
    )


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtraError(
            "Ray Data is not installed: install it with pip install 'gramwatch[ray]'"
        ) from error
    return ray


def _check_room(ray: Any, workers: int, num_cpus: float) -> None:
    """Refuse a fit that would wait for ever: workers wait for batches, which need a CPU to be read."""
    if not ray.is_initialized():
        ray.init()
    there = ray.cluster_resources().get("CPU", 0)
    if there <= workers * num_cpus:
        raise ValueError(
            f"{workers} worker(s) with {num_cpus:g} CPU(s) each leave none of {there:g} CPU(s) to read data: "
            "use fewer workers, or fewer CPUs for each (num_cpus=0.5)"
        )


def _fitted(detector: Detector, part: Any, batch_size: int, gpu: bool) -> _State | None:
    """The states of a fit on one part, in a process of Ray. None if the part is empty."""
    batches = iter(part.iter_batches(batch_size=batch_size, batch_format="numpy"))
    first = next(batches, None)
    if first is None:
        return None
    detector.reset()
    if gpu:
        detector.to("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)  # about few examples of a class, in this part
        detector.fit(map(_writable, chain([first], batches)), progress=False)
    header, tensors = packed(detector)
    return header, {name: tensor.cpu() for name, tensor in tensors.items()}


def _writable(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a batch: Ray's arrays lie in shared memory and cannot be written."""
    return {name: array.copy() for name, array in batch.items()}


class _Scoring:
    """Scores batches, in a process of Ray."""

    def __init__(self, shared: Any, keep: tuple[str, ...], gpu: bool) -> None:
        self._detector: Detector = _ray().get(shared)
        self._keep = keep
        if gpu:
            self._detector.to("cuda")

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        detection = self._detector(_writable(batch))
        columns = {name: getattr(detection, name) for name in ("predicted", "score", "p_value", "is_ood")}
        columns |= {f"p_{name}": part for name, part in (detection.parts or {}).items()}
        kept = {name: batch[name] for name in self._keep}
        return kept | {name: tensor.cpu().numpy() for name, tensor in columns.items()}
