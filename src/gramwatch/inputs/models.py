"""A network by its name: `timm:NAME`, `torchvision:NAME`, `hf:FOLDER`, `package.module:function`.

No code of a folder or of a hub is run. Only `hf+code:FOLDER` runs it, and only a person can name it: see
`runs_code`. While a network loads, libraries have no standard input: a line of a list that is piped to a
command must not answer their questions.

`resolve` returns the network with its preprocessing and the names of its classes, as far as they are known.
`networks` builds the networks of timm and torchvision and reads checkpoints.
"""

import importlib
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gramwatch.errors import InputError, MissingExtraError
from gramwatch.inputs import networks
from gramwatch.inputs.foreign import import_torchvision, imported, is_foreign
from gramwatch.inputs.networks import restore
from gramwatch.inputs.preprocessing import Preprocessing

WITH_CODE = "hf+code"
"""`hf+code:FOLDER` is `hf:FOLDER`, and the Python files in that folder are run."""
KINDS = "timm:NAME, torchvision:NAME, hf:FOLDER, package.module:function"


@dataclass(frozen=True)
class Model:
    """A network in evaluation mode, and what is known of it."""

    name: str
    network: nn.Module
    preprocessing: Preprocessing | None = None
    """None if it is unknown."""
    classes: tuple[str, ...] = ()
    """The names of the classes, in the order of the logits. Empty if they are unknown."""


def runs_code(name: str) -> bool:
    """Whether a name may stand for code that is not installed with a library. A person must give it.

    That is a function of the user, `hf+code:FOLDER`, and what timm fetches from a hub or a folder: its old
    versions unpickle the weights found there.
    """
    package, colon, rest = name.partition(":")
    return bool(colon) and (package not in ("timm", "torchvision", "hf") or (package != "hf" and ":" in rest))


@contextmanager
def without_input() -> Iterator[None]:
    """Close standard input inside this block, for Python and for programs that it starts."""
    before, kept = sys.stdin, None
    with Path(os.devnull).open() as nothing:
        with suppress(OSError):  # it is closed already
            kept = os.dup(0)
            os.dup2(nothing.fileno(), 0)
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before
            if kept is not None:
                os.dup2(kept, 0)
                os.close(kept)


@without_input()
def resolve(
    name: str,
    weights: str | os.PathLike[str] | None = None,
    *,
    pretrained: bool = False,
    untrained: bool = False,
    size: int | None = None,
) -> Model:
    """The network of a name.

    Args:
        name: `timm:NAME`, `torchvision:NAME`, `hf:FOLDER_OR_NAME`, `package.module:function`, or one of
            `networks.NETWORKS`. The function is called without arguments and returns the network.
            `hf+code:FOLDER_OR_NAME` runs the Python code that comes with the network.
        weights: a safetensors file, or a checkpoint of PyTorch that holds parameters alone.
        pretrained: let timm or torchvision load the weights that they publish.
        untrained: accept random weights.
        size: height and width of the images, for networks that are built for one size.

    """
    kind, colon, rest = name.partition(":")
    if weights is not None and pretrained:
        raise InputError("the weights are either those of a file or the published ones, not both")
    if pretrained and not is_foreign(name):
        raise InputError(f"published weights belong to timm:NAME or torchvision:NAME, not to '{name}'")
    if is_foreign(name) or name in networks.NETWORKS:
        if weights is None and not pretrained and not untrained:
            networks.record_of(name)  # an unknown name is said first
            published = ", or --pretrained for the published ones" if colon else ""
            raise InputError(f"'{name}' has no weights: give --weights FILE{published}")
        model = _published(kind, rest) if pretrained else _with_weights(name, weights, size)
    elif kind in ("hf", WITH_CODE) and colon:
        model = _hugging_face(rest, weights, kind == WITH_CODE)
    elif colon:
        model = _called(name, weights)
    else:
        others = f"one of {', '.join(networks.NETWORKS)}" if networks.NETWORKS else "one of gramwatch-lab"
        raise InputError(f"there is no network '{name}': give {KINDS}, or {others}")
    return Model(name, model.network.eval(), model.preprocessing, model.classes)


# --- timm, torchvision and the networks of this library ----------------------------------------------


def _with_weights(name: str, weights: str | os.PathLike[str] | None, size: int | None) -> Model:
    loaded = networks.load(name, weights, size=size)
    preprocessing = usual_preprocessing(name, loaded.network)
    if preprocessing is None:  # one of this library's networks, which take images of one size
        _, height, width = loaded.record.shape
        preprocessing = Preprocessing((height, width), height, "bicubic", loaded.mean, loaded.std)
    preprocessing = preprocessing.changed(size=loaded.size, mean=loaded.mean, std=loaded.std)
    return Model(name, loaded.network, preprocessing, loaded.class_names)


def _published(package: str, name: str) -> Model:
    library = imported(package)
    try:
        if package == "timm":
            network = library.create_model(name, pretrained=True)
        else:
            chosen = library.models.get_model_weights(name).DEFAULT
            network = library.models.get_model(name, weights=chosen)
    except Exception as error:  # no such name, no published weights, no connection
        raise InputError(f"{package}:{name} cannot be had with published weights: {error}") from None
    if package == "timm":
        subset = importlib.import_module("timm.data").infer_imagenet_subset(network)
        names = (
            importlib.import_module("timm.data").ImageNetInfo(subset).label_descriptions() if subset else ()
        )
    else:
        names = chosen.meta["categories"]
    return Model(name, network, usual_preprocessing(f"{package}:{name}", network), tuple(names))


def usual_preprocessing(name: str, network: nn.Module) -> Preprocessing | None:
    """The preprocessing of timm or torchvision for this network; None for other networks."""
    package, _, short = name.partition(":")
    if package == "torchvision":
        return _of_torchvision(imported("torchvision").models.get_model_weights(short).DEFAULT.transforms())
    if hasattr(network, "pretrained_cfg"):  # a network of timm, whoever built it
        imported("timm")
        return _of_timm(importlib.import_module("timm.data").resolve_model_data_config(network))
    return None


def _of_timm(config: Mapping[str, Any]) -> Preprocessing:
    _, height, width = config["input_size"]
    if config["crop_mode"] == "squash":
        shorter = None
    elif config["crop_mode"] == "center" and height == width:
        shorter = math.floor(height / config["crop_pct"])
    else:
        raise InputError(
            f"timm's crop mode '{config['crop_mode']}' is not known here: give the size of images"
        )
    return Preprocessing(
        (height, width), shorter, config["interpolation"], tuple(config["mean"]), tuple(config["std"])
    )


def _of_torchvision(transforms: Any) -> Preprocessing:
    side = transforms.crop_size[0]
    return Preprocessing(
        (side, side),
        transforms.resize_size[0],
        transforms.interpolation.value,
        tuple(transforms.mean),
        tuple(transforms.std),
    )


# --- Hugging Face ------------------------------------------------------------------------------------


def _hugging_face(place: str, weights: str | os.PathLike[str] | None, code: bool) -> Model:
    try:
        import_torchvision()  # transformers imports it, too
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"hf:NAME needs the package {error.name}: install it with pip install 'gramwatch[hf,networks]'"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    kind = transformers.AutoModelForImageClassification
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=code)
        _check_attention(config, code)
        if weights is None:
            network = kind.from_pretrained(place, config=config, trust_remote_code=code)
        else:
            network = kind.from_config(config, trust_remote_code=code)
    except Exception as error:  # no such folder, no image classifier, no connection
        remedy = ""
        if "trust_remote_code" in str(error):
            remedy = f". It comes with Python code. If you trust that code, name {WITH_CODE}:{place}"
        raise InputError(
            f"hf:{place} is no image classifier that can be had here: {_line(error)}{remedy}"
        ) from None
    if weights is not None:
        restore(network, weights, f"hf:{place}")
    return Model(place, network, _of_processor(transformers, place, code), _labels(network.config))


def _check_attention(config: Any, code: bool) -> None:
    """Refuse attention from a hub, `attn_implementation` with the name of a repository: it is code, too."""
    chosen = getattr(config, "_attn_implementation", None)
    if not code and "/" in str(chosen):
        raise InputError(f"its configuration names the code {chosen} (trust_remote_code)")


def _labels(config: Any) -> tuple[str, ...]:
    """The names of the classes, unless they are the placeholders LABEL_0, LABEL_1, ..."""
    names = [str(name) for _, name in sorted(config.id2label.items())]
    return () if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else tuple(names)


def _of_processor(transformers: Any, place: str, code: bool) -> Preprocessing | None:
    try:
        settings = transformers.AutoImageProcessor.from_pretrained(place, trust_remote_code=code).to_dict()
    except Exception:  # a folder without preprocessor_config.json
        return None
    size, crop = dict(settings.get("size") or {}), dict(settings.get("crop_size") or {})
    target = crop if settings.get("do_center_crop") else size
    shorter = size.get("shortest_edge")
    height = target.get("height", shorter)
    if (
        not settings.get("do_resize", True)
        or not math.isclose(settings.get("rescale_factor", 1 / 255), 1 / 255)
        or height is None
        or (crop and not shorter and settings.get("do_center_crop"))
    ):
        return None
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if settings.get("do_normalize", True):
        mean, std = settings["image_mean"], settings["image_std"]
    from PIL import Image

    resize = Image.Resampling(int(settings.get("resample", 2))).name.lower()
    width = int(target.get("width") or height)
    return Preprocessing((int(height), width), shorter, resize, tuple(mean), tuple(std))


# --- a function of the user --------------------------------------------------------------------------


def _called(name: str, weights: str | os.PathLike[str] | None) -> Model:
    module_name, _, function_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(
                f"'{module_name}' needs the module {error.name}, which is not installed"
            ) from None
        raise InputError(
            f"there is no module '{module_name}' here or among the installed ones ({KINDS})"
        ) from None
    except ValueError as error:
        raise InputError(f"'{name}' names no network: {error} ({KINDS})") from None
    except Exception as error:  # whatever the user's code raises
        raise InputError(f"the module '{module_name}' cannot be imported. {_where(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"the module '{module_name}' has no function '{function_name}'")
    try:
        network = function()
    except Exception as error:  # whatever the user's code raises
        raise InputError(f"{name} failed, called without arguments. {_where(error)}") from error
    if not isinstance(network, nn.Module):
        raise InputError(f"{name} returned {type(network).__name__}: it must return a torch.nn.Module")
    if weights is not None:
        restore(network, weights, name)
    return Model(name, network, usual_preprocessing("", network))


def _where(error: BaseException) -> str:
    """An error of the user's code, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {_line(error)} ({last.filename}, line {last.lineno})"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# --- in the metadata of a guard ----------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """Where a guard's network comes from, as the guard's file records it."""

    name: str
    weights: str | None = None
    """The path of the weights, relative to the folder of the guard's file."""
    pretrained: bool = False
    size: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> "Origin | None":
        """The origin in the metadata of a guard, if there is one."""
        recorded = metadata.get("model")
        if not isinstance(recorded, dict) or not isinstance(recorded.get("name"), str):
            return None
        weights, size = recorded.get("weights"), recorded.get("size")
        return Origin(
            recorded["name"],
            weights if isinstance(weights, str) else None,
            recorded.get("pretrained") is True,
            size if type(size) is int else None,
        )
