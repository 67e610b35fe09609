"""Old paths of modules: one table. It goes before 1.0.0.

`import gramwatch.detector` imports `gramwatch.detect.detector`, the same module object, and warns of the new
path. A module below an old package is found by the longest old path: `gramwatch.serve.app` lies in
`gramwatch.deploy.serve`. An old path into the lab needs `gramwatch-lab`.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_SAME_NAME = {
    "gramwatch.files": "writing sheets artifact",
    "gramwatch.numerics": "statistics bounds deviation metrics kernels",
    "gramwatch.inputs": """
        batches preprocessing readers models image_numbers demo datasets.decoding datasets.files
        datasets.synthetic networks.foreign
    """,
    "gramwatch.observe": "observation replay places compiled",
    "gramwatch.detect": "detector distributed measurement threshold split joint probe",
    "gramwatch.methods": "gram",
    "gramwatch.guard": "rehearsal loading pretrained",
    "gramwatch.explain": "report.frame report.thumbnails report.reasons explained_set",
    "gramwatch.evaluation": "evaluate paper.compare report.comparison",
    "gramwatch.stream": "monitor select sequential",
    "gramwatch.deploy": "export exported serve live",
    "gramwatch.integrate": "lightning ray_data",
    "gramwatch_lab": "paper training datasets inputs.datasets",
    "gramwatch_lab.methods": """
        methods.dirichlet methods.outlier_exposure methods.prior_network methods.semantic
        methods.variational_dirichlet
    """,
    "gramwatch_lab.networks": """
        networks.cifar_resnet networks.convnet networks.densenet networks.mlp networks.resnet
        networks.wide_resnet
    """,
    "gramwatch_lab.datasets": """
        datasets.arrays datasets.cifar datasets.download datasets.faults datasets.folder datasets.idx
        datasets.images datasets.miniplaces datasets.odin datasets.pickles datasets.scenes datasets.svhn
        datasets.textures datasets.tiny_imagenet inputs.faults
    """,
    "gramwatch_lab.figures": """
        report.across report.calibration report.curves report.dots report.results report.schematic
        report.table report.why
    """,
    "gramwatch_lab.commands": "cli.paper cli.study cli.train cli.data",
}
"""Old modules by their new package, with the name that they keep."""
_OTHER_NAME = {
    "counted": "gramwatch.detect.progress",
    "datasets.digits": "gramwatch.inputs.demo",
    "datasets.resize": "gramwatch_lab.datasets.images",
    "datasets.source": "gramwatch.inputs.sets",
    "experiments": "gramwatch_lab.paper",
    "experiments.compare": "gramwatch.evaluation.compare",
    "experiments.demo": "gramwatch.cli.quickstart",
    "experiments.paper": "gramwatch_lab.paper.experiment",
    "networks": "gramwatch.inputs.networks",
    "networks.loading": "gramwatch.inputs.networks",
    "paper.demo": "gramwatch.cli.quickstart",
    "report.palette": "gramwatch_lab.figures.looks",
    "report.stream": "gramwatch.stream.picture",
    "rivals": "gramwatch.methods",
    "serve.limits": "gramwatch.deploy.serve.service",
    "serve.own_site": "gramwatch.deploy.serve.server",
    "taps": "gramwatch.watch",
    "taps.observe": "gramwatch.watch.running",
    "version": "gramwatch.files",
}
"""Old modules with another name than before."""
MODULES = {
    old: f"{package}.{old.rpartition('.')[2]}"
    for package, names in _SAME_NAME.items()
    for old in names.split()
} | _OTHER_NAME
"""Old paths without the leading `gramwatch.`, and the new ones in full."""
NAMES = {
    "gramwatch.guard": {"": "gramwatch.guard.guard"},
    "gramwatch.explain": {
        **dict.fromkeys(("Contribution", "Part", "Shares"), "gramwatch.detect.parts"),
        "": "gramwatch.explain.explained",
    },
    "gramwatch.explain.frame": dict.fromkeys(("key", "keys"), "gramwatch_lab.figures.looks"),
    "gramwatch.report": {"": "gramwatch.explain.frame"},
    "gramwatch.methods": {
        "RIVALS": "gramwatch.methods:METHODS",
        "Rival": "gramwatch.methods.base:Method",
        "OutlierExposureScore": "gramwatch_lab.methods.outlier_exposure",
        "PriorNetworkScore": "gramwatch_lab.methods.prior_network",
        "SemanticScore": "gramwatch_lab.methods.semantic",
        "VariationalDirichletScore": "gramwatch_lab.methods.variational_dirichlet",
        "methods_table": "gramwatch_lab.methods.table",
    },
    "gramwatch.inputs.networks": {
        "": "gramwatch_lab.networks",
        **dict.fromkeys(("CIFAR", "IMAGENET"), "gramwatch_lab.networks.records"),
        "OUTLIER_EXPOSURE": "gramwatch.inputs.synthetic",
    },
    "gramwatch.detect.detector": dict.fromkeys(("packed", "unpacked"), "gramwatch.detect.fitting")
    | {"leaves_of": "gramwatch.detect.passes"},
    "gramwatch.files.artifact": dict.fromkeys(("taps_from_json", "taps_to_json"), "gramwatch.watch.tap"),
    "gramwatch.observe.observation": {
        "Plan": "gramwatch.observe.plan",
        **dict.fromkeys(("Needs", "Statistics", "StatisticsAtTap"), "gramwatch.observe.needs"),
        **dict.fromkeys(("GramTable", "Read"), "gramwatch.observe.uses"),
    },
    "gramwatch.watch.running": dict.fromkeys(
        ("InputsAdapter", "LogitsAdapter", "MaskAdapter", "adapted", "wrappers"), "gramwatch.inputs.adapters"
    ),
    "gramwatch.watch.tap": dict.fromkeys(("Sample", "TOGETHER", "WHOLE"), "gramwatch.numerics.samples"),
}
"""Modules whose old names are elsewhere. Under the empty name: where all others are."""


def new_path(old: str) -> str | None:
    """The new path of a module, from its old one; None if it did not move."""
    package, _, rest = old.partition(".")
    parts = rest.split(".")
    if package == "gramwatch":
        for count in range(len(parts), 0, -1):
            head = ".".join(parts[:count])
            if head in MODULES:
                return ".".join([MODULES[head], *parts[count:]])
    return None


def _imported(path: str, old: str) -> ModuleType:
    """A module by its new path. One of the lab may be missing."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != "gramwatch_lab":
            raise
        raise ImportError(f"{old} is now {path}: pip install gramwatch-lab") from None


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is now {new}: import it from there", DeprecationWarning, stacklevel + 1)


class _Package(ModuleType):
    """A package below whose old path a module is imported. A function with that module's name stays."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and callable(vars(self).get(name))):
            super().__setattr__(name, value)


class _Finder(MetaPathFinder, Loader):
    """Finds old paths. The module is the one of the new path: no file is imported twice."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        new = new_path(name)
        if new is None:
            return None
        _warn(name, new, 2)
        module = _imported(new, name)
        if not hasattr(module, "__path__") and any(
            f"gramwatch.{old}".startswith(f"{name}.") for old in MODULES
        ):
            module.__path__ = []  # it was a package: let the import system look for modules below it
        parent = sys.modules[name.rpartition(".")[0]]
        if type(parent) is ModuleType:
            parent.__class__ = _Package
        spec = ModuleSpec(name, self, origin=new, is_package=hasattr(module, "__path__"))
        spec.loader_state = module.__spec__
        if new in NAMES and not hasattr(module, "__getattr__"):
            vars(module)["__getattr__"] = old_names(new)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[str(spec.origin)]

    def exec_module(self, module: ModuleType) -> None:
        """The module has been executed. The import system has set the spec of the old path: take it back."""
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


def install() -> None:
    """Let the import system know the old paths."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def module_of(name: str) -> ModuleType | None:
    """The module that `gramwatch.NAME` was; None if there was none."""
    if name not in MODULES:
        return None
    _warn(f"gramwatch.{name}", MODULES[name], 3)
    return _imported(MODULES[name], f"gramwatch.{name}")


def old_names(module: str) -> Callable[[str], Any]:
    """The function `__getattr__` of a module whose old names are elsewhere: see `NAMES`."""
    table = NAMES[module]

    def find(name: str) -> Any:
        place = table.get(name) or table.get("")
        if place is None or name.startswith("__"):
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        path, _, other = place.partition(":")
        found = getattr(_imported(path, f"{module}.{name}"), other or name, None)
        if found is None:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        _warn(f"{module}.{name}", f"{path}.{other or name}", 2)
        return found

    return find
