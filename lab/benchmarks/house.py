"""The numbers of the house: how many functions a batch passes, how many lines there are, and the like.

    python -m lab.benchmarks.house            # write the table of docs/architecture.md
    python -m lab.benchmarks.house --print    # print it

A row says what was aimed at and what is. Where an aim is missed, `REASONS` says why.
"""

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

import torch

from tests import way

ROOT = Path(__file__).parents[2]
LIBRARY, LAB = ROOT / "src" / "gramwatch", ROOT / "lab"
PAGE = ROOT / "docs" / "architecture.md"
MARKS = "<!-- numbers of the house, by python -m lab.benchmarks.house -->", "<!-- end of the numbers -->"
FOUR = ("gram", "profile", "class_ratio", "energy")
"""The members of a guard on 28fd005. There are three more now."""
REASONS = {
    "functions": "the three members that came since pass the difference between the first two rows",
    "modules": "every method is a file of its own, and seven members take part",
    "doors": "every member and every rule is called through one",
    "lines": "36,400 counted the lab, which has left. Since then came the member that sees the image, with "
    "kernels for CPU and GPU, rehearsal, recording, and what files, service and commands need to withstand "
    "attacks",
    "entries": "15 are packages; `__init__`, `__main__`, `errors`, `py.typed` and the moved names remain",
    "loaded": "a guard loads its seven methods, and what measures, joins and ranks. What fits, calibrates, "
    "saves, records and exports is loaded when it is used",
}


def lines_of(path: Path) -> int:
    """The number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def methods_of(file: str, name: str) -> list[str]:
    """The methods that a class defines itself, properties among them."""
    tree = ast.parse((LIBRARY / file).read_text(encoding="utf-8"))
    (kind,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return [node.name for node in kind.body if isinstance(node, ast.FunctionDef)]


def loaded() -> int:
    """The number of modules of the library that `from gramwatch import Guard` loads."""
    code = "import sys; from gramwatch import Guard; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return sum(module.partition(".")[0] == "gramwatch" for module in run.stdout.split())


def plain(text: str) -> str:
    """A text with one space between words."""
    return re.sub(r"\s+", " ", text)


def strings_of(path: Path) -> list[str]:
    """The strings in the code of a file, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in docstrings]
    return [plain(node.value).strip() for node in constants if isinstance(node.value, str)]


def quotes() -> list[str]:
    """Strings of five words or more that tests take from the prose of pages written by hand.

    Headings, code on pages, and what a program of ours says are no such quotes.
    """
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    by_hand = [page.read_text(encoding="utf-8") for page in pages if page.parent.name != "results"]
    code = re.compile(r"<!-- begin.*?<!-- end.*?-->|```.*?```|^( {4}|#).*?$", re.DOTALL | re.MULTILINE)
    prose = plain(" ".join(code.sub("", text) for text in by_hand))
    sources = [path for top in (LIBRARY, LAB, ROOT / "examples") for path in top.rglob("*.py")]
    says = [path.read_text(encoding="utf-8") for path in sources if "tests" not in path.parts]
    said = plain(" ".join(says))
    tests = [path for top in (ROOT / "tests", LAB / "tests") for path in sorted(top.rglob("test_*.py"))]
    texts = [text for path in tests for text in strings_of(path)]
    long = [text for text in texts if len(re.findall("[A-Za-z]+", text)) >= 5 and text[0] != "#"]
    return [text for text in long if text in prose and text not in said]


def rows() -> list[tuple[str, str, str, str, str]]:
    """Name, what it was, the aim, what it is, and the key of the reason where the aim is missed."""
    images = torch.randn(8, 3, 16, 16)
    seven, four = (way.way_of(way.ready(**options), images) for options in ({}, {"members": FOUR}))
    files = {path: lines_of(path) for path in LIBRARY.rglob("*.py")}
    largest = max(files, key=lambda path: files[path])
    entries = [path for path in LIBRARY.iterdir() if path.name != "__pycache__"]
    lab = sum(lines_of(path) for path in LAB.rglob("*.py") if "tests" not in path.parts)
    detector, contract = (methods_of(f"detect/{name.lower()}.py", name) for name in ("Detector", "Contract"))
    total, where = sum(files.values()), largest.relative_to(LIBRARY).as_posix()
    return [
        ("`guard(images)`: functions", "117", "60", str(len(seven.functions)), "functions"),
        ("the same with the four members of then", "117", "60", str(len(four.functions)), ""),
        ("`guard(images)`: modules", "22", "12", str(seven.modules), "modules"),
        ("the same with the four members of then", "22", "12", str(four.modules), ""),
        ("`guard(images)`: doors", "55", "30", str(seven.doors), "doors"),
        ("the same with the four members of then", "55", "30", str(four.doors), ""),
        (f"lines of the library (the lab has {lab:,})", "36,400", "22,000", f"{total:,}", "lines"),
        ("entries of `src/gramwatch`", "49", "16", str(len(entries)), "entries"),
        (
            f"methods of `Detector` (`Contract` has {len(contract)})",
            "80",
            "40",
            str(len(detector)),
            "methods",
        ),
        (f"lines of the largest file (`{where}`)", "1,035", "600", f"{files[largest]:,}", "largest"),
        ("modules loaded by `from gramwatch import Guard`", "67", "40", str(loaded()), "loaded"),
        ("quotes of five words or more from pages in tests", "26", "0", str(len(quotes())), "quotes"),
    ]


def table() -> str:
    """The rows in Markdown, with the reasons of missed aims below."""
    lines = ["| | on 28fd005 | aim | now |", "| --- | ---: | ---: | ---: |"]
    reasons = []
    for name, before, aim, now, key in rows():
        lines.append(f"| {name} | {before} | {aim} | {now} |")
        if key and int(now.replace(",", "")) > int(aim.replace(",", "")):
            reasons.append(f"- {name}: {REASONS.get(key, 'no reason is written down')}.")
    return "\n".join([*lines, *(["", "Missed aims:", "", *reasons] if reasons else [])])


def main() -> None:
    """Write or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--print", action="store_true", help="print the table, and write nothing")
    if parser.parse_args().print:
        print(table())
        return
    text, (begin, end) = PAGE.read_text(encoding="utf-8"), MARKS
    if begin not in text:
        raise SystemExit(f"{PAGE} has no line {begin}")
    block, marked = f"{begin}\n{table()}\n{end}", f"{re.escape(begin)}.*?{re.escape(end)}"
    PAGE.write_text(re.sub(marked, lambda _: block, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
