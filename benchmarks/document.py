"""Write measured figures into docs/performance.md, docs/guard.md and docs/guard-study.md.

    python -m benchmarks.document overhead-cpu.json growth-cpu.json overhead-cuda.json
    python -m benchmarks.document                       # again, from what docs/data holds

Results given are first copied to docs/data under the name of what they are (`overhead-cpu.json`), in place of
older ones. Then everything between the markers of these pages is written anew from docs/data, and the
pictures in docs/images are drawn. No figure between the markers is written by hand.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks import plots, tables
from benchmarks.measure import save

DOCS = Path(__file__).parents[1] / "docs"
NOT_YET = "*Not measured yet: see [Repeat it](#repeat-it).*"
KINDS = ("ways", "overhead", "growth", "guard")
"""The benchmarks whose results are kept in docs/data."""
_ORDER = ["cpu", "cuda", "cuda-strict"]


def place_of(result: dict[str, Any]) -> str:
    """Which kind of run this is: `cpu`, `cuda` or `cuda-strict`."""
    return result["device"] + ("-strict" if result["strict"] else "")


def adopt(path: Path, docs: Path) -> Path:
    """Copy a result to docs/data."""
    result = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(result, dict) or result.get("kind") not in KINDS:
        named = ", ".join(f"benchmarks.{kind}" for kind in KINDS)
        raise SystemExit(f"{path} is no result of one of {named}")
    kept = docs / "data" / f"{result['kind']}-{place_of(result)}.json"
    save(kept, result)
    return kept


def held(kind: str, docs: Path) -> list[dict[str, Any]]:
    """The results of one kind in docs/data, CPU first."""
    found = [
        json.loads(p.read_text(encoding="utf-8")) for p in sorted((docs / "data").glob(f"{kind}-*.json"))
    ]
    return sorted(found, key=lambda r: _ORDER.index(place_of(r)) if place_of(r) in _ORDER else len(_ORDER))


def blocks(docs: Path) -> dict[str, str]:
    """The generated parts of the page by name; pictures are drawn on the way."""
    runs, growths = held("overhead", docs), held("growth", docs)
    parts: dict[str, list[str]] = {
        "ways": [],
        "targets": [],
        "overhead": [],
        "breakdown": [],
        "kernels": [],
        "growth": [],
    }
    ways = held("ways", docs)
    if ways:
        parts["ways"] += [tables.ways_table(ways), "\n".join(f"- {tables.where(each)}" for each in ways)]
    if runs:
        parts["targets"].append(tables.targets(runs))
        parts["targets"] += _by_default(runs, held("guard", docs))
        picture = docs / "images" / "performance_overhead.png"
        plots.overhead(runs, picture)
        parts["overhead"].append(f"![Extra cost of scoring](images/{picture.name})")
    for result in runs:
        read = f"reads {result['read_bytes_per_second'] / 1e9:,.0f} GB/s"
        caption = f"**{tables.where(result)}**; {read}"
        if result["kernels_given_up"]:
            caption += "; the kernels could not be used: *ours* is PyTorch's form"
        parts["overhead"].append(f"{caption}:\n\n{tables.overhead(result)}")
        if tables.breakdown(result):
            parts["breakdown"].append(f"{caption}:\n\n{tables.breakdown(result)}")
        if result["kernels"]:
            parts["kernels"].append(f"{caption}:\n\n{tables.kernels(result)}")
    for result in growths:
        picture = docs / "images" / f"performance_growth_{result['device']}.png"
        plots.growth(result, picture)
        parts["growth"].append(
            f"**{tables.where(result)}**:\n\n![Growth of the cost](images/{picture.name})\n\n"
            + tables.growth(result)
        )
    return {name: "\n\n".join(part) or NOT_YET for name, part in parts.items()}


BY_DEFAULT = """\
The plain pass takes longer without TF32, so the extra looks smaller. PyTorch's default is TF32 for
convolutions (`python -m benchmarks.guard --device cuda --rounds 40`). The two runs were not made together,
and hosts differ in speed. The GPU's own time does not depend on the host:"""


def _by_default(runs: list[dict[str, Any]], guards: list[dict[str, Any]]) -> list[str]:
    """Scoring with and without TF32, as long as `benchmarks.overhead` has been run without it only."""
    by_place = {place_of(result): result for result in runs}
    default = [result for result in guards if result["device"] == "cuda"]
    if "cuda-strict" not in by_place or "cuda" in by_place or not default:
        return []
    return [BY_DEFAULT, tables.by_default(by_place["cuda-strict"], default[0])]


def guard_blocks(docs: Path) -> dict[str, dict[str, str]]:
    """The generated parts of Guard's two pages, by page and name."""
    results = held("guard", docs)
    study = "\n\n".join(f"**{_where(each)}**:\n\n{tables.guard_costs(each)}" for each in results)
    return {
        "guard.md": {"costs": tables.guard_medians(results) if results else NOT_YET},
        "guard-study.md": {"costs": study or NOT_YET},
    }


def _where(result: dict[str, Any]) -> str:
    rounds = max(row["gram"]["rounds"] for row in result["rows"])
    return f"{tables.where(result)}, {rounds} rounds"


def filled(page: str, generated: dict[str, str]) -> str:
    """The page with each block between its markers replaced."""
    for name, text in generated.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise SystemExit(f"the page must hold '{begin}' ... '{end}' once")
        page = pattern.sub(lambda _, t=text, b=begin, e=end: f"{b}\n{t}\n{e}", page)
    return page


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.document",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="*", type=Path, help="JSON files that other benchmarks wrote")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the pages")
    args = parser.parse_args(given)
    for path in args.results:
        print(f"kept as {adopt(path, args.docs)}", flush=True)
    for name, generated in {"performance.md": blocks(args.docs), **guard_blocks(args.docs)}.items():
        page = args.docs / name
        if page.is_file():
            page.write_text(filled(page.read_text(encoding="utf-8"), generated), encoding="utf-8")
            print(f"wrote {page}")


if __name__ == "__main__":
    main()
