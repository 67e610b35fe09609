"""Follow the commands of docs/tutorial.md, and make its figures and pictures anew.

    python -m lab.benchmarks.tutorial FOLDER --accuracy 0.890

FOLDER is where the block of Python on the page was run. It holds `photos`, `truth.txt` and `net.safetensors`.
The accuracy is what `gramwatch train` printed. The three commands are taken from the page as they stand. The
report gets `--json` besides, so that it says which images are in its groups. Needs Chromium and selenium
(make test-browser installs it).

Writes docs/data/tutorial.json, docs/images/tutorial_terminal.png, report.png and report_groups.png. In FOLDER
it leaves screenshots in the dark theme and at the width of a phone, to be looked at.
"""

import argparse
import csv
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from lab.benchmarks.measure import machine, save

DOCS = Path(__file__).parents[2] / "docs"
WIDTH, COLUMNS = 1100, 106
KINDS = ("clean", "blurred", "normalised", "foreign")


def commands(page: str) -> list[str]:
    """The three commands of the page: the lines of the shell block that begins with the fit."""
    (block,) = re.findall(r"```sh\n(gramwatch fit .*?)```", page, re.DOTALL)
    return str(block).splitlines()


def done(line: str, folder: Path) -> dict[str, Any]:
    """Run a command. What it printed, and how long it took."""
    words = [sys.executable, "-m", *shlex.split(line)]
    if words[3] == "report":
        words.append("--json")
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    told = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(f"{line}: {told.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "line": line,
        "said": told.stderr.strip(),
        "summary": json.loads(told.stdout) if told.stdout else {},
        "processor_seconds": round(used),
        "seconds": round(time.monotonic() - start),
    }


def figures(folder: Path, ran: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the page says: how many of each kind are flagged, and what the groups of the report hold."""
    truth = (folder / "truth.txt").read_text(encoding="utf-8").split()
    with (folder / "scores.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kind_of = {row["path"]: kind for kind, row in zip(truth, rows, strict=True)}
    flagged = Counter(kind_of[row["path"]] for row in rows if row["is_ood"] == "true")
    total = Counter(truth)
    return {
        "flagged": {kind: {"flagged": flagged[kind], "images": total[kind]} for kind in KINDS},
        "processor_seconds": {name: command["processor_seconds"] for name, command in ran.items()},
        "seconds": {name: command["seconds"] for name, command in ran.items()},
        "groups": [
            {
                "title": group["title"],
                "about": group["about"],
                "images": len(group["images"]),
                **Counter(kind_of[path] for path in group["images"]),
            }
            for group in ran["report"]["summary"]["groups"]
        ],
    }


# --- pictures ----------------------------------------------------------------------------------------


def terminal(ran: dict[str, dict[str, Any]]) -> str:
    """The commands and what they printed, as SVG of a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=StringIO(), color_system="truecolor")
    for command in ran.values():
        console.print(Text(f"$ {command['line']}", style="bold green"))
        console.print(Text(command["said"]))
    svg = console.export_svg(title="gramwatch")
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)  # fonts of a server


def small(path: Path) -> None:
    """Reduce a screenshot to the colours that a page needs."""
    from PIL import Image

    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def shoot(browser: Any, path: Path, width: int, height: int, at: str = "", theme: str = "light") -> None:
    """A screenshot of the page as it is, at a section."""
    from tests.browser import size

    size(browser, width, height, mobile=width < 500)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    browser.execute_script(f"document.getElementById('{at}').scrollIntoView()" if at else "scrollTo(0, 0)")
    time.sleep(2)  # charts are drawn anew in the new size
    browser.save_screenshot(str(path))


def pictures(folder: Path, images: Path, ran: dict[str, dict[str, Any]]) -> None:
    """The pictures of the page, and others to look at."""
    from tests.browser import chromium, errors, size

    (folder / "terminal.svg").write_text(terminal(ran), encoding="utf-8")
    with chromium() as browser:
        browser.get((folder / "terminal.svg").absolute().as_uri())
        box = browser.execute_script(
            "const b = document.documentElement.viewBox.baseVal; return [b.width, b.height]"
        )
        size(browser, WIDTH, round(WIDTH * box[1] / box[0]))
        time.sleep(1)
        browser.save_screenshot(str(images / "tutorial_terminal.png"))
        browser.get((folder / "report.html").absolute().as_uri())
        shoot(browser, images / "report.png", WIDTH, 860)
        shoot(browser, images / "report_groups.png", WIDTH, 1010, "groups")
        for theme in ("light", "dark"):
            for name, width in (("wide", WIDTH), ("phone", 390)):
                size(browser, width, 900, mobile=width < 500)
                browser.refresh()
                for at in ("summary", "groups", "suspicious", "where", "all", "fitted"):
                    shoot(browser, folder / f"look_{theme}_{name}_{at}.png", width, 900, at, theme)
        if messages := errors(browser):
            raise SystemExit(f"the browser reports: {messages}")
    for name in ("tutorial_terminal", "report", "report_groups"):
        small(images / f"{name}.png")


def main(given: list[str] | None = None) -> None:
    """Run, write and draw."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.tutorial",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the block of Python on the page was run")
    parser.add_argument(
        "--accuracy", type=float, required=True, help="what 'gramwatch train' printed, 0 to 1"
    )
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--draw", action="store_true", help="only the pictures, from what the last run left")
    args = parser.parse_args(given)
    kept, data = args.folder / "ran.json", args.docs / "data" / "tutorial.json"
    if not args.draw:
        lines = commands((args.docs / "tutorial.md").read_text(encoding="utf-8"))
        ran = {line.split()[1]: done(line, args.folder) for line in lines}
        kept.write_text(json.dumps(ran), encoding="utf-8")
        before = json.loads(data.read_text(encoding="utf-8"))
        about = (
            "the commands of docs/tutorial.md, with timm:efficientnet_b0 trained for 120 epochs with seed 0"
        )
        others = {name: before[name] for name in ("earlier", "milder")}  # figures of other runs
        facts = {"accuracy": args.accuracy, **figures(args.folder, ran), **others}
        load = {"load_average": os.getloadavg()[1]}
        save(data, {"command": about, **machine(torch.device("cpu")), **load, **facts})
    pictures(args.folder, args.docs / "images", json.loads(kept.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
