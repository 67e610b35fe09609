"""The code on Markdown pages: blocks that run, and commands.

A block of `python` is a part of a complete program: the blocks of a page, one after the other. A block of
`py` is a fragment that takes a network, loaders and a guard as given. A block of `sh` holds commands. A
comment before a block says why it is not run: `<!-- not run: it needs a GPU -->`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:^<!-- not run: (.+?) -->\n+)?^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    why_not: str = ""
    """Why it is not run. Empty if it is."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def run(self, names: dict[str, Any]) -> None:
        """Run Python code. A traceback shows the line on the page."""
        exec(compile("\n" * self.line + self.code, str(self), "exec"), names)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, result.start(2)) + 1, result[2], result[3], result[1] or "")
        for result in _BLOCK.finditer(text)
    ]


def code_of(page: Path, language: str) -> str:
    """The blocks of one language that run, together."""
    return "\n".join(block.code for block in blocks(page) if block.language == language and not block.why_not)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command of ours: in lines of indented code, and in blocks of `sh`."""
    text = page.read_text(encoding="utf-8")
    shell = [line for block in blocks(page) if block.language == "sh" for line in block.code.splitlines()]
    unfenced = re.sub(r"\s*\\\n\s*", " ", _BLOCK.sub("", text))
    for line in [*shell, *re.findall(r"^ {4}(\S.*)", unfenced, re.MULTILINE)]:
        for command in line.split(" | "):
            if re.match(r"(gramwatch|make|python -m) ", command):
                yield shlex.split(command, comments=True)
