"""docs/architecture.md follows a batch: a call passes the functions that its steps link, in their order."""

import re
import sys

import pytest
import torch

from tests import way
from tests.pages import ROOT

PAGE = ROOT / "docs" / "architecture.md"


def steps() -> list[tuple[str, str]]:
    """The file and the name of every function that is linked in the numbered steps, in order."""
    text = PAGE.read_text(encoding="utf-8").split("## The way of a batch\n")[1].split("\n## ")[0]
    numbered = text[text.index("\n1. ") : text.index("\n**`guard.explain")]
    return [
        (file, name) for name, file in re.findall(r"\[`([\w.]+)`\]\(\.\./src/gramwatch/(.+?)\)", numbered)
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not tell the class of a function")
def test_a_batch_takes_the_steps_of_the_page_in_their_order():
    named, passed = steps(), way.way_of(way.ready(), torch.randn(8, 3, 16, 16)).functions
    assert len(named) > 12
    for step in named:
        assert step in passed, f"{step[1]} of {step[0]} is on the page, and no batch passes it"
    order = sorted(named, key=passed.index)
    assert named == order, "the page names them in another order"
