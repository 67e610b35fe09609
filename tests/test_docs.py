"""The pages of the documentation: programs run, commands exist, links and figures are right."""

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gramwatch
from tests import pages
from tests.pages import PAGES, ROOT, Block

DOCS = ROOT / "docs"
pytestmark = pytest.mark.usefixtures("whole_rehearsals")
ELSEWHERE = {ROOT / "README.md": "tests/test_examples.py", DOCS / "cli.md": "tests/cli/test_app_page.py"}
"""Pages whose programs another test runs, because it compares what they print."""
NEEDS = {name: name for name in ("timm", "torchvision", "lightning")}
NEEDS |= {"hugging_face": "transformers", "text": "transformers", "report": "altair", "live": "fastapi"}
"""The package that the program of a page needs."""
EVERY_BLOCK = [block for page in PAGES for block in pages.blocks(page)]


def with_blocks(language: str) -> list[Path]:
    """The pages with blocks of a language that run here."""
    pages = {block.page for block in EVERY_BLOCK if block.language == language and not block.why_not}
    return sorted(pages)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


PROGRAMS = [page for page in with_blocks("python") if page not in ELSEWHERE]
SHOWN = {
    *("start", "howto/timm", "howto/torchvision", "howto/hugging_face"),
    *("howto/own_network", "howto/lightning"),
}
"""Pages whose program prints the verdicts for five photographs last; most before it for five digits."""
_added = operator.attrgetter("contribution")
HOLDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "start": lambda names: names["guard"].metadata["classes"] == list("01234567"),
    "large_data": lambda names: float(names["difference"].abs().max()) < 0.01,
    "level": lambda names: names["shares"][0] < names["shares"][1],
    "calibration": lambda names: names["low"] < 1 - names["level"] < names["high"],
    "share": lambda names: Path("digits-guard/guard.safetensors").is_file(),
    "serve": lambda names: sum(verdict["is_ood"] for verdict in names["verdicts"]) >= 4,
    "tutorial": lambda names: len(list(Path("photos").rglob("*.*"))) == 13,
    "report": lambda names: (
        len(names["reasons"].groups) >= 2 and Path("report.html").stat().st_size > 900_000
    ),
    "live": lambda names: names["answer"]["is_ood"] and names["answer"]["map"].startswith("data:image/webp"),
    "text": lambda names: (
        names["flagged"].all() and max(names["explained"].tokens(0)[1:], key=_added).place == 8
    ),
    "gpus": lambda names: int(names["detection"].is_ood.sum()) >= 4,
    "lightning": lambda names: names["guard"].metadata["checkpoint"] == "epoch=5-step=72.ckpt",
}
"""What is so after the program of a page."""


def made_up_photographs() -> None:
    """The folders of the tutorial, with a few small images of noise."""
    draw = np.random.default_rng(0)
    names = [
        f"scenes/{split}/{kind}/{i:04d}.webp"
        for split in ("train", "test")
        for kind in "ab"
        for i in range(3)
    ]
    for name in [*names, "miniplaces/val/0001.jpg"]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(name)


GIVEN = {"tutorial": made_up_photographs}
"""What the program of a page finds in its folder."""


@pytest.mark.filterwarnings("ignore:::lightning")
@pytest.mark.parametrize("page", PROGRAMS, ids=name)
def test_the_program_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem], reason=f"{NEEDS[page.stem]} is not installed")
    monkeypatch.chdir(tmp_path)
    GIVEN.get(page.stem, lambda: None)()
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in pages.blocks(page):
        if block.language == "python" and not block.why_not:
            block.run(names)
    said = capsys.readouterr().out
    if str(page.relative_to(DOCS).with_suffix("")) in SHOWN:
        *digits, photographs = map(int, re.findall(r"Detection: (\d) of 5 out-of-distribution", said))
        assert photographs >= 4
        assert all(flagged <= 2 for flagged in digits)
    if page.stem in HOLDS:
        assert HOLDS[page.stem](names)


def test_pages_that_show_verdicts_are_run():
    assert {DOCS / f"{page}.md" for page in SHOWN} <= set(PROGRAMS)
    how_to = set((DOCS / "howto").glob("*.md")) - {DOCS / "howto" / "README.md"}
    assert how_to <= set(PROGRAMS)


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    """What fragments take as given."""
    from gramwatch.inputs.demo import digits, photograph_patches, small_mlp, train

    torch.manual_seed(0)
    data, model = digits(), small_mlp()
    train(model, data.train, data.train_labels, epochs=20)
    loaders = {name: getattr(data, name).split(128) for name in ("train", "validation", "test")}
    guard = gramwatch.Guard(model).fit(loaders["train"]).calibrate(loaders["validation"])
    return {f"{name}_loader": loader for name, loader in loaders.items()} | {
        "gramwatch": gramwatch,
        "model": model,
        "guard": guard,
        "images": data.test[:8],
        "image": data.test[0],
        "detection": guard(photograph_patches(8)),
        "stream": [*loaders["test"], *[photograph_patches(100)] * 3],
        "textures_loader": [photograph_patches(64)],
        "noise_loader": [torch.rand(64, 1, 8, 8)],
    }


@pytest.mark.parametrize("page", with_blocks("py"), ids=name)
def test_the_fragments_of_a_page_run(page, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = dict(given)
    for block in pages.blocks(page):
        if block.language == "py" and not block.why_not:
            block.run(names)
    assert names.keys() >= given.keys()


@pytest.mark.parametrize("block", [block for block in EVERY_BLOCK if block.why_not], ids=str)
def test_a_block_that_is_not_run_says_why(block: Block):
    if block.language in ("python", "py"):
        compile(block.code, str(block), "exec")
    pytest.skip(f"{block}: {block.why_not}")


def test_every_block_has_a_language_that_is_known():
    assert len(EVERY_BLOCK) > 50
    for block in EVERY_BLOCK:
        known = {"python", "py", "sh", "{eval-rst}"} if block.page.stem == "api" else {"python", "py", "sh"}
        assert block.language in known, block
    shell = {block.page for block in EVERY_BLOCK if block.language == "sh" and not block.why_not}
    assert shell == {DOCS / "cli.md"}  # tests/cli/test_app_page.py runs them
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(pages.blocks(page)), page


# --- commands ----------------------------------------------------------------------------------------


def options_of(words: list[str]) -> set[str]:
    """The options of a command of `gramwatch`."""
    typer = pytest.importorskip("typer")
    from gramwatch.cli.app import app

    command = typer.main.get_command(app)
    for word in words[1:]:
        if word.startswith("-") or word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    return {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}


@pytest.mark.parametrize("page", [page for page in PAGES if list(pages.commands(page))], ids=name)
def test_every_command_on_a_page_exists(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for words in pages.commands(page):
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0] == "gramwatch":
            given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert given <= options_of(words), words
        else:
            place = Path(*words[2].split("."))
            result = [folder / place for folder in (ROOT, ROOT / "src", ROOT / "lab")]
            assert any(p.with_suffix(".py").is_file() or (p / "__main__.py").is_file() for p in result), words


# --- links -------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as code hosts and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*?)\s*$", text, re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_links_lead_to_headings_that_exist():
    checked = 0
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
            if "://" not in target:
                where = (page.parent / target).resolve() if target else page
                assert anchor in anchors(where), f"{name(page)}: {target}#{anchor}"
                checked += 1
    assert checked > 40


def test_every_page_is_in_the_contents_of_the_site():
    conf = (DOCS / "conf.py").read_text(encoding="utf-8")
    listed = set(re.findall(r'"([\w/-]+)"', conf.split("HOW_TO = [")[1].split("\n}\n")[0]))
    for page in DOCS.rglob("*.md"):
        if page.parent.name in ("methods", "results") and page.stem != "README":
            continue  # these are listed as they are found
        relative = str(page.relative_to(DOCS).with_suffix(""))
        short = relative.removeprefix("howto/") if page.stem != "README" else relative
        assert short == "README" or short in listed, f"{relative} is in no group of docs/conf.py"


# --- figures -----------------------------------------------------------------------------------------


def test_the_reference_has_every_public_name():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for public in gramwatch.__all__:
        assert re.search(rf"(gramwatch\.|[ ,]){public}\b", text), public
    from gramwatch.methods import METHODS

    for method in METHODS.values():
        assert f"gramwatch.methods.{method.__name__}\n" in text, method
