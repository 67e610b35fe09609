"""Write everything in README.md and docs/ that comes from results.

    python -m lab.benchmarks.document                    # from the files that docs/data and docs/results hold
    python -m lab.benchmarks.document --check            # change nothing; name what would change, exit with 1
    python -m lab.benchmarks.document overhead-cpu.json  # first copy new results to docs/data

A block stands between `<!-- begin NAME -->` and `<!-- end NAME -->`, a figure inside a sentence between
`<!--=NAME-->` and `<!--/-->`. `blocks.py` says what a block is made of, `figures.py` what a figure is.
Pictures are drawn by `make pictures`.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lab.benchmarks.cells import DOCS, MissingCellError
from lab.benchmarks.measure import save

ROOT = DOCS.parent
KINDS = ("ways", "overhead", "growth", "guard")
"""The benchmarks whose results are copied to docs/data."""
_BLOCK = re.compile(r"<!-- begin (.+?) -->\n.*?<!-- end \1 -->", re.DOTALL)
_FIGURE = re.compile(r"<!--=(.+?)-->.*?<!--/-->", re.DOTALL)


def adopt(path: Path, docs: Path = DOCS) -> Path:
    """Copy a result to docs/data."""
    result = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(result, dict) or result.get("kind") not in KINDS:
        named = ", ".join(f"benchmarks.{kind}" for kind in KINDS)
        raise SystemExit(f"{path} is no result of one of {named}")
    place = result["device"] + ("-strict" if result["strict"] else "")
    kept = docs / "data" / f"{result['kind']}-{place}.json"
    save(kept, result)
    return kept


def filled(page: str, blocks: Mapping[str, str], figures: Mapping[str, Callable[[], str]]) -> str:
    """The page with every block and every figure written anew."""
    names = _BLOCK.findall(page)
    if sorted(names) != sorted(blocks):
        raise MissingCellError(f"blocks on the page: {sorted(names)}; blocks of results: {sorted(blocks)}")

    def figure(place: re.Match[str]) -> str:
        if place[1] not in figures:
            raise MissingCellError(f"there is no figure '{place[1]}'")
        if not page[page.rfind("\n", 0, place.start()) + 1 : place.start()].strip(" >-"):
            raise MissingCellError(f"the figure '{place[1]}' begins a line, and Markdown takes that for HTML")
        return f"<!--={place[1]}-->{figures[place[1]]()}<!--/-->"

    page = _FIGURE.sub(figure, page)
    return _BLOCK.sub(lambda at: f"<!-- begin {at[1]} -->\n{blocks[at[1]]}\n<!-- end {at[1]} -->", page)


def written() -> Iterator[tuple[Path, str, str]]:
    """Every page with something from results: its path, its text, and what its text should be."""
    from lab.benchmarks.blocks import BLOCKS, WHOLE
    from lab.benchmarks.figures import FIGURES

    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        try:
            if name in WHOLE:
                yield path, text, WHOLE[name]()
            elif name in BLOCKS or _BLOCK.search(text) or _FIGURE.search(text):
                parts = [part() for part in BLOCKS.get(name, ())]
                blocks = {key: value for part in parts for key, value in part.items()}
                yield path, text, filled(text, blocks, FIGURES)
        except (LookupError, OSError) as error:
            raise SystemExit(f"{name}: {error}") from error


def changed(before: str, after: str) -> list[str]:
    """The names of the blocks and figures that differ."""
    old, new = ([*_BLOCK.finditer(text), *_FIGURE.finditer(text)] for text in (before, after))
    return [one[1] for one, other in zip(old, new, strict=True) if one[0] != other[0]] or ["the page"]


def write(check: bool = False) -> list[str]:
    """Write the pages, or only say what would change. Returns a line for each page that differs."""
    told = []
    for path, before, after in written():
        if before != after:
            names = ", ".join(dict.fromkeys(changed(before, after)))
            told.append(f"{path.relative_to(ROOT).as_posix()}: {names}")
            if not check:
                path.write_text(after, encoding="utf-8")
    return told


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.document",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="*", type=Path, help="JSON files that other benchmarks wrote")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if pages differ")
    args = parser.parse_args(given)
    for path in args.results:
        print(f"kept as {adopt(path)}", flush=True)
    told = write(args.check)
    for line in told or ["no page"]:
        print("would change" if args.check else "wrote", line, flush=True)
    if args.check and told:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
