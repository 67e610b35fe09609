"""`gramwatch export`: a network and its guard as one graph."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from gramwatch.cli.checks import about, interruptible, writable_file
from gramwatch.cli.common import opened_guard
from gramwatch.cli.options import GuardFile, NetworkOptions, Voice
from gramwatch.errors import ArtifactError, InputError


def export(
    guard: GuardFile,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The graph: .onnx, or .pt2 for torch.export.load.")
    ],
    network: NetworkOptions,
    preprocessing: Annotated[
        bool,
        typer.Option(
            "--pixels/--inputs",
            help="Take uint8 pixels, N x height x width x channels, or normalised inputs of the network.",
        ),
    ] = True,
    voice: Voice,
) -> None:
    """Write a network and its guard as one graph, from images to verdicts, for ONNX Runtime or PyTorch.

    The graph has everything inside. Images must be resized and cropped before, as the file says.

    Example: gramwatch export guard.safetensors -o guard.onnx
    """
    import torch

    from gramwatch.deploy.export import SUFFIXES
    from gramwatch.guard.guard import Guard

    if output.suffix not in SUFFIXES:
        raise typer.BadParameter(f"{output} must end in {' or '.join(SUFFIXES)}", param_hint="--output")
    writable_file(output, reads=(guard, network.weights))
    opened = opened_guard(guard, network, "cpu")
    if not isinstance(opened.detector, Guard):
        raise ArtifactError(f"{guard} holds a {opened.detector.name}: only guards are exported")
    prepared = opened.recorded or opened.model.preprocessing
    if prepared is None:
        raise InputError(f"{guard} does not say how large images are: export in Python, guard.export(...)")
    opened.detector.metadata["preprocessing"] = prepared.to_json()
    images = torch.randn(1, len(prepared.mean), *prepared.size, generator=torch.Generator().manual_seed(0))
    with interruptible(lambda: "Nothing was written."), about("GUARD"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch, about its own exporter
        opened.detector.export(output, images, preprocessing=preprocessing)
    voice.say(f"written: {output}, for {'uint8 pixels' if preprocessing else 'inputs'} after: {prepared}")
    voice.summary({"output": str(output), "pixels": preprocessing, "bytes": output.stat().st_size})
