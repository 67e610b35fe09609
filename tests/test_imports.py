"""The order of the modules, as the table of CONTRIBUTING.md has it, and the tests in the same places."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gramwatch"
OLD_NAMES = {"rivals", "experiments"}
"""They hand on to where things are now."""
ENTRANCES = {"", "__main__"}
"""`gramwatch/__init__.py`, which no module of the library imports, and `python -m gramwatch`."""
TESTS = ROOT / "tests"
OF_THE_WHOLE = """
    architectures benchmarks contract cuda docs examples fuzz imports limits package pages real
    reference stress
""".split()
"""Tests that are named after no module: they are about all of the library, or about the repository."""


def order() -> list[str]:
    """The modules in the order of the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Where things are")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".")


MODULES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
CHECKED = sorted(MODULES.keys() - OLD_NAMES - ENTRANCES)


def imported(path: Path) -> Iterator[str]:
    """The modules of this library that a file imports, without the leading `gramwatch.`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "gramwatch":
                    yield alias.name.removeprefix("gramwatch").removeprefix(".")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            if (node.module or "").partition(".")[0] == "gramwatch":
                module = (node.module or "").removeprefix("gramwatch").removeprefix(".")
                for alias in node.names:
                    inner = f"{module}.{alias.name}".removeprefix(".")
                    yield inner if inner in MODULES else module


def place(module: str, known: list[str]) -> int:
    """Where a module stands in the table: by its own name, or by that of its package."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    found = next((name for name in names if name in known), None)
    assert found is not None, f"{module} is missing in CONTRIBUTING.md, 'Where things are'"
    return known.index(found)


def test_the_table_names_every_module_once():
    known = order()
    assert len(known) == len(set(known))
    assert set(known) <= MODULES.keys()
    top = {name.partition(".")[0] for name in MODULES} - OLD_NAMES - ENTRANCES
    assert {name.partition(".")[0] for name in known} == top
    assert known.index("errors") < known.index("detector") < known.index("cli")


@pytest.mark.parametrize("module", CHECKED)
def test_a_module_imports_only_those_before_it(module):
    known = order()
    here = place(module, known)
    for other in imported(MODULES[module]):  # inside functions, too
        assert other not in ENTRANCES | OLD_NAMES, f"{module} imports gramwatch itself, or an old name"
        same_package = other.partition(".")[0] == module.partition(".")[0]
        assert place(other, known) < here or same_package, f"{module} imports {other}, which comes after it"


def test_modules_of_one_package_do_not_import_in_a_circle():
    within = {
        module: {
            other
            for other in imported(MODULES[module])  # inside functions, too
            if other != module and other.partition(".")[0] == module.partition(".")[0]
        }
        for module in CHECKED
    }
    left = set(CHECKED)
    while ready := {module for module in left if not within[module] & left}:
        left -= ready
    assert not left, f"these import each other: {sorted(left)}"


def test_taps_are_in_order_too():
    parts = [name for name in order() if name.startswith("taps.")]
    assert sorted(parts) == sorted(name for name in MODULES if name.startswith("taps."))
    for number, module in enumerate(parts):
        within = {other for other in imported(MODULES[module]) if other.startswith("taps")}
        assert within <= set(parts[:number]), module


def test_only_the_command_line_knows_the_paper():
    for module in CHECKED:
        if module.partition(".")[0] not in ("cli", "paper"):
            known = {other.partition(".")[0] for other in imported(MODULES[module])}
            assert not known & {"cli", "paper"}, module


def test_every_folder_of_tests_is_a_package_of_the_library():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("*.py")} - {Path(), Path("data")}
    assert len(folders) > 5
    for folder in folders:
        assert (SOURCE / folder / "__init__.py").is_file(), f"tests/{folder} has no counterpart"
        assert (TESTS / folder / "__init__.py").is_file(), f"tests/{folder} is not a package"


def modules_of(folder: Path) -> set[str]:
    """The names of the modules of a package, its own among them."""
    files = (SOURCE / folder).glob("*.py")
    packages = (SOURCE / folder).glob("*/__init__.py")
    return {path.stem for path in files} | {path.parent.name for path in packages} | {folder.name}


def test_every_test_file_is_named_after_a_module():
    """A further word says which part of it is tested: `test_guard_settle.py` is a test of `guard`."""
    whole = {TESTS / f"test_{name}.py" for name in OF_THE_WHOLE}
    files = set(TESTS.rglob("test_*.py"))
    assert whole < files
    for path in files - whole:
        words = path.stem.removeprefix("test_").split("_")
        names = {"_".join(words[:n]) for n in range(1, len(words) + 1)}
        assert names & modules_of(path.parent.relative_to(TESTS)), f"{path.relative_to(ROOT)} is of no module"
