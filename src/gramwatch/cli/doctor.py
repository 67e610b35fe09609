"""`gramwatch doctor`: versions, devices, kernels, and a self-test."""

import importlib.metadata
import platform
import warnings
from collections.abc import Iterator
from contextlib import suppress
from textwrap import shorten

import typer

from gramwatch.cli.checks import chosen_device
from gramwatch.cli.options import Device, Json, show_facts

PACKAGES = {
    "torch": "",
    "numpy": "",
    "scipy": "",
    "safetensors": "",
    "scikit-learn": "",
    "numba": "",
    "typer": "gramwatch[cli]",
    "rich": "gramwatch[cli]",
    "matplotlib": "gramwatch[plot]",
    "pillow": "gramwatch[plot]",
    "torchvision": "gramwatch[networks]",  # before timm, which imports it
    "timm": "gramwatch[networks]",
    "transformers": "gramwatch[hf]",
    "lightning": "gramwatch[lightning]",
    "pyarrow": "gramwatch[parquet]",
    "altair": "gramwatch[report]",
    "fastapi": "gramwatch[serve]",
    "onnxruntime": "gramwatch[export]",
}
"""The packages, and what to install for each. Empty: it comes with gramwatch."""
MODULES = {"scikit-learn": "sklearn", "pillow": "PIL"}
"""The modules of packages that are imported by another name than their own."""


def doctor(
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Show versions, devices and kernels, and test that a guard works here. Exit code 1 if it does not.

    Every package is imported, too. A package that is there and cannot be imported is a problem.

    Example: gramwatch doctor
    """
    place = chosen_device(device)
    packages, broken = {}, False
    for package, text, works in versions():
        packages[package], broken = text, broken or not works
    facts = {
        "gramwatch": importlib.import_module("gramwatch").__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **packages,
        **devices(place),
    }
    facts["kernels"] = kernels(place)
    with warnings.catch_warnings():
        problem = self_test(place)
    facts["self-test"] = problem or "passed"
    show_facts(facts, as_json)
    if problem or broken:
        raise typer.Exit(1)


def versions() -> Iterator[tuple[str, str, bool]]:
    """Each package with its version or how to install it, and whether it works if it is there."""
    for package, extra in PACKAGES.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, f"not installed: pip install '{extra or package}'", bool(extra)
            continue
        reason, usable = why_not_imported(MODULES.get(package, package))
        yield package, version + reason, usable


def why_not_imported(module: str) -> tuple[str, bool]:
    """The fault of a module in words, empty if there is none, and whether gramwatch can use the module."""
    from gramwatch.inputs.foreign import import_torchvision

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(module)
        except Exception as error:  # a package can fail in any way
            reason = f", cannot be imported: {shorten(f'{type(error).__name__}: {error}', 150)}"
        else:
            return "", True
        if module == "torchvision":
            with suppress(Exception):
                import_torchvision()
                return f"{reason}. Classifiers work nevertheless", True
    return f"{reason}. Install it anew", False


def devices(place: str) -> dict[str, str]:
    """The device that is used, and the GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"device": place, "GPUs": ", ".join(gpus) or "none", "threads": str(torch.get_num_threads())}


def kernels(place: str) -> str:
    """Whether the fast kernels are compiled and agree with the readable definition, or why not."""
    import torch

    from gramwatch.numerics import kernels
    from gramwatch.numerics.statistics import STATISTICS

    maps = torch.randn(4, 8, 25, generator=torch.Generator().manual_seed(0)).to(place)
    expected = STATISTICS["row_sums"](maps.double(), (1, 2, 3), 1)
    out = torch.empty(expected.shape, device=place)
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        kernels.compute("row_sums", maps, (1, 2, 3), out)
    difference = float(((out.double() - expected).abs() / expected.abs().clamp_min(1)).max())
    if reasons:
        return f"not used: {reasons[0].message}"
    if torch.device(place).type not in ("cpu", "cuda"):
        return f"none for {place}: PyTorch's form is used"
    return f"compiled, within {difference:.1e} of the definition"


def self_test(place: str) -> str:
    """Guard a small network on synthetic images. Return the reason of a failure, or an empty text."""
    import torch

    from gramwatch.guard.guard import Guard
    from gramwatch.inputs.demo import small_convnet

    generator = torch.Generator().manual_seed(0)
    try:
        warnings.simplefilter("ignore")  # a warning says that the network is not trained
        torch.manual_seed(0)
        guard = Guard(small_convnet().to(place))
        usual = torch.rand(600, 1, 8, 8, generator=generator)
        guard.fit(usual[:300].split(100), progress=False)
        guard.calibrate(usual[300:500].split(100), progress=False)
        kept, flagged = guard(usual[500:]).is_ood, guard(10 * usual[500:] + 5).is_ood
        if int(kept.sum()) > 25 or not bool(flagged.all()):
            return f"{int(kept.sum())} of 100 usual and {int(flagged.sum())} of 100 strange images flagged"
    except Exception as error:  # whatever it is, the doctor reports it
        return f"{type(error).__name__}: {error}"
    return ""
