"""Old paths of modules: the same module comes out, with a warning that names the new path."""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

import gramwatch
from gramwatch._moved import MODULES, NAMES, new_path

WHOLE = {"taps", "serve", "live", "training", "paper"}
"""Packages that moved with all their modules."""
PARTS = ("kernels.cpu", "kernels.images")
"""Modules of `kernels` that need no GPU's compiler."""


def below(old: str) -> Iterator[str]:
    """An old path, and those of the modules below it if a whole package moved."""
    yield old
    if old in WHOLE:
        package = importlib.import_module(MODULES[old])
        for module in pkgutil.iter_modules(package.__path__):
            yield f"{old}.{module.name}"


OLD = sorted({path for old in MODULES for path in below(old)} | {*PARTS})
NEEDS = {"gramwatch.integrate.lightning": "lightning", "gramwatch.integrate.ray_data": "ray"}


@pytest.mark.parametrize("old", OLD)
def test_an_old_path_is_the_module_of_the_new_one(old):
    full = f"gramwatch.{old}"
    new = new_path(full)
    if new in NEEDS:
        pytest.importorskip(NEEDS[new])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(full.rpartition(".")[0])
    sys.modules.pop(full, None)
    with pytest.warns(DeprecationWarning, match=f"{full} is now {new}"):
        module = importlib.import_module(full)
    assert module is importlib.import_module(new)
    assert module.__name__ == module.__spec__.name == new


def test_only_the_import_that_names_an_old_path_warns():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        code = compile(
            "from gramwatch.numerics import bounds\nfrom gramwatch.sheets import *", "user.py", "exec"
        )
        sys.modules.pop("gramwatch.sheets", None)
        exec(code, {})
    (one,) = said
    assert (one.filename, one.lineno) == ("user.py", 2)


def test_old_attributes_are_the_modules():
    for name in ("artifact", "bounds", "detector", "joint", "metrics", "observation", "threshold"):
        vars(gramwatch).pop(name, None)
        with pytest.warns(DeprecationWarning, match=f"gramwatch.{name} is now"):
            assert getattr(gramwatch, name) is importlib.import_module(new_path(f"gramwatch.{name}"))


def test_names_of_modules_that_are_packages_now_still_work():
    with pytest.warns(DeprecationWarning, match="gramwatch.guard.Guard is now gramwatch.guard.guard.Guard"):
        from gramwatch.guard import Guard
    with pytest.warns(DeprecationWarning, match=" is now "):
        from gramwatch.explain import Contribution, Explained
    with pytest.warns(DeprecationWarning, match=" is now "):
        from gramwatch.report import pyplot
    with pytest.warns(DeprecationWarning, match=" is now "):
        from gramwatch.rivals import KNN, RIVALS, Rival
    with pytest.warns(DeprecationWarning, match=" is now "):
        from gramwatch.networks import load, resnet34
    assert Guard is gramwatch.Guard
    assert Explained is gramwatch.Explained
    assert (Contribution.__module__, pyplot.__module__) == (
        "gramwatch.detect.parts",
        "gramwatch.explain.frame",
    )
    assert RIVALS is gramwatch.methods.METHODS
    assert issubclass(KNN, Rival)
    assert (load.__module__, resnet34.__module__) == (
        "gramwatch.inputs.networks",
        "gramwatch_lab.networks.resnet",
    )
    with pytest.warns(DeprecationWarning, match=" is now "):
        from gramwatch.taps.tap import Sample
    assert Sample.__module__ == "gramwatch.numerics.samples"
    for module in NAMES:
        with pytest.raises(AttributeError, match="nothing_of_the_kind"):
            importlib.import_module(module).nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize("module", NAMES)
def test_the_table_of_names_is_right(module):
    for name, place in NAMES[module].items():
        path, _, other = place.partition(":")
        if name:
            assert hasattr(importlib.import_module(path), other or name)


def test_functions_with_the_name_of_an_old_module_stay_functions():
    sys.modules.pop("gramwatch.evaluate", None)
    with pytest.warns(DeprecationWarning, match=" is now "):
        import gramwatch.evaluate
    sys.modules.pop("gramwatch.select", None)
    with pytest.warns(DeprecationWarning, match=" is now "):
        import gramwatch.select
    assert gramwatch.evaluate.__name__ == "evaluate"
    assert gramwatch.select.__name__ == "select"


def test_a_function_with_the_name_of_a_module_stays_below_an_old_package():
    sys.modules.pop("gramwatch.taps.observe", None)
    with pytest.warns(DeprecationWarning, match=" is now "):
        import gramwatch.taps.observe
    assert callable(gramwatch.watch.observe)


def test_without_the_lab_an_old_path_says_what_to_install():
    code = (
        "import sys\n"
        "class NoLab:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'gramwatch_lab': raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, NoLab())\n"
        "try: import gramwatch.training\n"
        "except ImportError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        result.stdout.strip() == "gramwatch.training is now gramwatch_lab.training: pip install gramwatch-lab"
    )
