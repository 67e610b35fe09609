"""The order of the packages, as the table of CONTRIBUTING.md has it, and the tests in the same places."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY, LAB = ROOT / "src" / "gramwatch", ROOT / "lab" / "gramwatch_lab"
ENTRANCES = {"gramwatch", "gramwatch.__main__", "gramwatch._moved"}
"""What users import, `python -m gramwatch`, and the table of old paths. The order is not for them."""
DOWNWARDS = {
    ("gramwatch.detect.detector", "gramwatch.explain.explained"),  # Detector.explain
    ("gramwatch.guard.guard", "gramwatch.deploy.export"),  # Guard.export
}
"""The only imports of a later package. They are inside a function, or for types."""
OF_THE_WHOLE = """
    architecture architectures contract cuda docs examples fuzz imports limits moved package pages real
    reference stress
""".split()
"""Tests that are named after no module: they are about all of the library, or about the repository."""


def order() -> list[str]:
    """The packages in the order of the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Where things are")[1].split("\n## ")[0]
    return [f"gramwatch.{name}" for name in re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)]


def name_of(path: Path) -> str:
    """The full name of a module."""
    source = LIBRARY if path.is_relative_to(LIBRARY) else LAB
    return ".".join(path.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted([*LIBRARY.rglob("*.py"), *LAB.rglob("*.py")])}
CHECKED = sorted(MODULES.keys() - ENTRANCES)


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules of this repository that a file imports, and whether at once: when it is imported itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in inner]
        for name in names:
            if name.partition(".")[0] in ("gramwatch", "gramwatch_lab"):
                yield name, node not in later


def test_the_table_names_every_package_once():
    known = order()
    assert len(known) == len(set(known))
    assert set(known) == {package_of(name) for name in CHECKED if name.startswith("gramwatch.")}


def test_a_newcomer_sees_few_entries():
    assert len([path for path in LIBRARY.iterdir() if not path.name.startswith("_")]) <= 18


@pytest.mark.parametrize("module", CHECKED)
def test_a_package_imports_only_those_before_it(module):
    known = order()
    for other, at_once in imported(MODULES[module]):  # inside functions, too
        if other == "gramwatch._moved":
            continue
        if module.startswith("gramwatch_lab"):
            assert not other.startswith("gramwatch.cli.app"), f"{module} imports the commands"
            continue
        assert other not in ENTRANCES, f"{module} imports gramwatch itself"
        assert other.startswith("gramwatch."), f"{module} imports the lab"
        if (module, other) in DOWNWARDS:
            assert not at_once, f"{module} imports {other}, which comes after it, outside of a function"
            continue
        place, here = known.index(package_of(other)), known.index(package_of(module))
        assert place <= here, f"{module} imports {other}, which comes after it"


def test_no_exception_is_out_of_date():
    for module, other in DOWNWARDS:
        assert other in {name for name, _ in imported(MODULES[module])}


@pytest.mark.parametrize("package", [*order(), "gramwatch_lab"])
def test_modules_of_one_package_do_not_import_in_a_circle(package):
    inside = {name for name in CHECKED if name == package or name.startswith(f"{package}.")}
    within = {
        module: {other for other, _ in imported(MODULES[module]) if other != module and other in inside}
        for module in inside
    }
    while ready := {module for module in inside if not within[module] & inside}:
        inside -= ready
    assert not inside, f"these import each other: {sorted(inside)}"


def test_modules_of_watch_are_in_order():
    """What a tap is comes first, finding taps last."""
    parts = "tap padding operations running find".split()
    for number, part in enumerate(parts):
        others = {other.rpartition(".")[2] for other, _ in imported(MODULES[f"gramwatch.watch.{part}"])}
        assert not others & set(parts[number:]), part


def test_the_reading_of_the_paper_knows_no_network():
    for name, known in {
        "statistics": set(),
        "bounds": {"kernels"},
        "deviation": {"bounds", "kernels"},
    }.items():
        others = {other for other, _ in imported(MODULES[f"gramwatch.numerics.{name}"])}
        assert others <= {f"gramwatch.numerics.{other}" for other in known}


PLACES = [(ROOT / "tests", LIBRARY), (ROOT / "lab" / "tests", LAB)]
"""Where tests lie, and of which package they are."""


@pytest.mark.parametrize(("tests", "source"), PLACES)
def test_every_folder_of_tests_is_a_package(tests, source):
    folders = {path.parent.relative_to(tests) for path in tests.rglob("*.py")} - {Path(), Path("data")}
    assert len(folders) > 4
    for folder in folders:
        assert (source / folder / "__init__.py").is_file(), f"{tests / folder} has no counterpart"
        assert (tests / folder / "__init__.py").is_file(), f"{tests / folder} is not a package"


def modules_of(folder: Path) -> set[str]:
    """The names of the modules of a package, its own among them."""
    packages = folder.glob("*/__init__.py")
    return (
        {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in packages} | {folder.name}
    )


@pytest.mark.parametrize(("tests", "source"), PLACES)
def test_every_test_file_is_named_after_a_module(tests, source):
    """A further word says which part of it is tested: `test_guard_settle.py` is a test of `guard`."""
    whole = {tests / f"test_{name}.py" for name in (*OF_THE_WHOLE, "benchmarks")}
    for path in set(tests.rglob("test_*.py")) - whole:
        words = path.stem.removeprefix("test_").split("_")
        names = {"_".join(words[:n]) for n in range(1, len(words) + 1)}
        folder = source / path.parent.relative_to(tests)
        assert names & modules_of(folder), f"{path.relative_to(ROOT)} is of no module"
