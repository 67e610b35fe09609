"""ExportedGuard: a guard in an ONNX file, run by ONNX Runtime. Neither the network nor its code is needed."""

import base64
import binascii
import importlib
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gramwatch.deploy.export import INPUTS, KEY, OUTPUTS, PIXELS
from gramwatch.detect import probe
from gramwatch.detect.measurement import Calibration, Detection
from gramwatch.errors import ArtifactError, InputError, MissingExtraError, warn
from gramwatch.files import artifact
from gramwatch.inputs.preprocessing import Preprocessing

TAKES = (INPUTS, PIXELS)
RUNTIMES = 10
"""Tolerated difference between ONNX Runtime and PyTorch, in units of that between runs of PyTorch."""
PREFIX = "parts."
"""The prefix of the names of members' outputs."""


class ExportedGuard:
    """A guard that `Guard.export` wrote to an ONNX file. It judges batches as the guard does.

    Its detections have no deviations, and it explains nothing: the graph returns scores and p-values only.

    Example:
        >>> guard = ExportedGuard("guard.onnx")
        >>> guard(inputs).is_ood

    Args:
        path: the ONNX file.
        device: `"cpu"`, `"cuda"` or `"cuda:1"`. None: a GPU if ONNX Runtime can use one, else the CPU.
        check_probe: run the graph on the small made-up input that the file holds, and warn if its logits or
            its score differ from those that the guard had. It is checked on the kind of device of the export.

    """

    def __init__(
        self, path: str | PathLike[str], device: str | None = None, *, check_probe: bool = True
    ) -> None:
        self.path = Path(path)
        _check_suffix(self.path)
        runtime = _runtime()
        provider = _provider(runtime, device)
        with artifact.reading(self.path):
            self._session = _session(runtime, self.path, provider)
            self._facts = _facts_of(self._session)
            self._names = [output.name for output in self._session.get_outputs()]
            _check_graph(self._names, self._session.get_inputs(), self._facts)
            (given,) = self._session.get_inputs()
            self._input, self._shape = given.name, tuple(given.shape[1:])
            self.level = float(self._facts["level"])
            self.takes_pixels = self._facts["takes"] == PIXELS
            """Whether the graph takes uint8 pixels, N x height x width x channels, and normalises them."""
            self.classes = tuple(self._facts.get("classes") or ())
            """The names of the classes; empty if the file has none."""
            how = self._facts.get("preprocessing")
            self.preprocessing = None if how is None else Preprocessing.from_json(how)
            """How images become inputs; None if the file does not say it."""
            recorded = self._facts.get("probe")  # files of earlier versions have none
            if recorded is None:
                return
            then, probe_input = probe.Answer.from_json(recorded), probe.made(recorded["input"])
            if not isinstance(probe_input, Tensor) or (1, *self._shape) != tuple(probe_input.shape):
                raise ValueError("its probe is not an input of its graph")
        if check_probe and then.device == ("cpu" if provider == "CPUExecutionProvider" else "cuda"):
            self._compare(then, probe_input)

    def _compare(self, then: probe.Answer, inputs: Tensor) -> None:
        """Warn if the graph's answer to the probe differs from the guard's."""
        try:
            detection = self(inputs)
            now = probe.Answer.of(detection.logits, float(detection.score))
            differs = then.differences(now, RUNTIMES * now.rounding(now.logits.dtype))
        except Exception as error:  # whatever the runtime raises
            differs = f"it fails: {type(error).__name__}: {error!s:.200}"
        if differs:
            warn(
                f"{self.path} answers the probe otherwise here than its guard did: {differs}. The rate of "
                "false alarms does not hold: export the guard again, or use another version of ONNX Runtime. "
                "check_probe=False does not look"
            )

    def __call__(self, images: Tensor) -> Detection:
        """Judge a batch of inputs of the network, or of uint8 pixels, whichever the graph takes."""
        outputs = self._session.run(self._names, {self._input: images.contiguous().numpy()})
        values = {name: torch.from_numpy(output) for name, output in zip(self._names, outputs, strict=True)}
        parts = {name.removeprefix(PREFIX): t for name, t in values.items() if name.startswith(PREFIX)}
        logits, predicted, score, p_value, is_ood = (values[name] for name in OUTPUTS)
        return Detection(logits, predicted, score, p_value, is_ood, parts=parts)

    def check(self, preprocessing: Preprocessing) -> None:
        """Raise an error if the inputs of this preprocessing do not fit the graph."""
        (height, width), channels = preprocessing.size, len(preprocessing.mean)
        shape = (height, width, channels) if self.takes_pixels else (channels, height, width)
        if shape != self._shape:
            raise InputError(
                f"{self.path} takes images of shape {self._shape}, the preprocessing makes {shape}: "
                "an exported guard has one size"
            )

    def calibration(self) -> Calibration:
        """The scores that rank, for a monitor. The rule itself is in the graph."""
        facts = self._facts.get("calibration")
        if facts is None:
            raise ArtifactError(
                f"{self.path} does not hold the calibration scores that a monitor needs: an older version "
                "exported it. Export the guard again, or leave the monitor out"
            )
        with artifact.reading(self.path):
            return _calibration(facts, self.level)


def _check_suffix(path: Path) -> None:
    if path.suffix == ".pt2":
        raise ArtifactError(
            f"{path}: to load a .pt2 file, PyTorch may run code that is in it. Export the guard to .onnx"
        )
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}")


def _runtime() -> Any:
    """ONNX Runtime. From version 1.29 on, it reports about models to its makers unless it is told not to."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        runtime = importlib.import_module("onnxruntime")
    except ModuleNotFoundError:
        raise MissingExtraError(
            "an ONNX file is run with the package onnxruntime: install it with pip install "
            "'gramwatch[export]', or by itself"
        ) from None
    runtime.disable_telemetry_events()
    return runtime


def _provider(runtime: Any, device: str | None) -> Any:
    kind, _, number = (device or "").partition(":")
    can = "CUDAExecutionProvider" in runtime.get_available_providers()
    if kind == "cuda" and not can:
        raise InputError("ONNX Runtime cannot use a GPU here: install onnxruntime-gpu, or use the device cpu")
    if kind not in ("", "cpu", "cuda") or (number and not number.isdecimal()):
        raise InputError(f"ONNX Runtime has no device '{device}' here: use cpu or cuda")
    if kind == "cpu" or not can:
        return "CPUExecutionProvider"
    return "CUDAExecutionProvider", {"device_id": int(number or 0)}


def _session(runtime: Any, path: Path, provider: Any) -> Any:
    """ONNX Runtime with the graph, on as many threads as PyTorch would use."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return runtime.InferenceSession(str(path), options, providers=[provider])


def _facts_of(session: Any) -> dict[str, Any]:
    """The facts about the guard in the file."""
    text = session.get_modelmeta().custom_metadata_map.get(KEY)
    if text is None:
        raise ArtifactError("it holds no guard: write one with `gramwatch export`")
    facts = artifact.parsed(text)
    artifact.check_types(facts, level=float, members=list[str], takes=Literal[TAKES])
    if not 0 < facts["level"] < 1:
        raise ValueError(f"its level is {facts['level']!r:.60}, which does not lie between 0 and 1")
    if facts.get("classes") is not None:
        artifact.check_types(facts, classes=list[str])
    return facts


def _check_graph(names: Sequence[str], inputs: Sequence[Any], facts: Mapping[str, Any]) -> None:
    """Make sure that the inputs and outputs of the graph are those of a guard with these facts."""
    wanted = [*OUTPUTS, *(f"{PREFIX}{name}" for name in facts["members"])]
    if missing := [name for name in wanted if name not in names]:
        raise ArtifactError(f"its graph has no output '{missing[0]}'")
    if sorted(names) != sorted(wanted):
        raise ArtifactError(f"its graph has other outputs than a guard: {', '.join(names)}")
    if len(inputs) != 1 or len(inputs[0].shape) < 2:
        raise ArtifactError(f"its graph takes {len(inputs)} inputs, not one with a batch axis")


class _InTheGraph:
    """The rule of an exported guard."""

    standardises = True


def _calibration(facts: Mapping[str, Any], level: float) -> Calibration:
    artifact.check_types(facts, split=bool, scores=str)
    scores = _unpacked(facts["scores"], "<f8")
    predicted, groups = torch.zeros(len(scores), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    if "groups" in facts:
        artifact.check_types(facts, predicted=str, groups=list[int])
        predicted, groups = _unpacked(facts["predicted"], "<i4").long(), torch.tensor(facts["groups"])
    if len(predicted) != len(scores) or not bool(scores.isfinite().all()) or int(predicted.min()) < 0:
        raise ValueError("its calibration has no class for a score, or a score that is not finite")
    if not 0 <= int(groups.min()) <= int(groups.max()) < len(groups):
        raise ValueError("its calibration has groups of classes without a class")
    how = {name: facts[name] for name in ("split", "tolerance") if name in facts}
    return Calibration.restored(_InTheGraph(), scores[:, None], level, how, predicted, groups)


def _unpacked(text: str, kind: str) -> Tensor:
    """The numbers behind base64."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"its calibration is not base64: {error}") from None
    return torch.from_numpy(np.frombuffer(data, kind).astype(np.dtype(kind).newbyteorder("=")))
