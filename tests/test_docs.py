"""The pages of the documentation: programs run, commands exist, links and figures are right."""

import json
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
from gramwatch.measurement import calibration_needs
from gramwatch.report.calibration import IMAGES
from gramwatch.threshold import range_of_rates
from tests import pages
from tests.pages import PAGES, ROOT, Block

DOCS = ROOT / "docs"
ELSEWHERE = {ROOT / "README.md": "tests/test_examples.py", DOCS / "cli.md": "tests/cli/test_app_page.py"}
"""Pages whose programs another test runs, because it compares what they print."""
NEEDS = {name: name for name in ("timm", "torchvision", "lightning")}
NEEDS |= {"hugging_face": "transformers", "text": "transformers", "report": "altair", "live": "fastapi"}
"""The package that the program of a page needs."""
EVERY_BLOCK = [block for page in PAGES for block in pages.blocks(page)]


def with_blocks(language: str) -> list[Path]:
    """The pages with blocks of a language that run here."""
    found = {block.page for block in EVERY_BLOCK if block.language == language and not block.why_not}
    return sorted(found)


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
    "gpus": lambda names: int(names["found"].is_ood.sum()) >= 4,
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
    from gramwatch.demo import digits, photograph_patches, small_mlp, train

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
        "found": guard(photograph_patches(8)),
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
            found = [folder / place for folder in (ROOT, ROOT / "src")]
            assert any(p.with_suffix(".py").is_file() or (p / "__main__.py").is_file() for p in found), words


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


def test_the_tutorial_has_the_figures_of_its_file():
    found = json.loads((DOCS / "data" / "tutorial.json").read_text(encoding="utf-8"))
    text = " ".join((DOCS / "tutorial.md").read_text(encoding="utf-8").split())
    for each in found["flagged"].values():
        flagged, images = each["flagged"], each["images"]
        assert f"| {flagged} | {images:,} | {100 * flagged / images:.1f} % |" in text
    clean, foreign = (found["flagged"][kind] for kind in ("clean", "foreign"))
    assert f"clean photographs {100 * clean['flagged'] / clean['images']:.1f} % are flagged" in text
    assert f"other places {100 * foreign['flagged'] / foreign['images']:.1f} % are" in text
    assert round(6 * foreign["flagged"] / foreign["images"]) == 1  # five in six are missed
    earlier = found["earlier"]["flagged"]
    shares = {kind: f"{100 * each['flagged'] / each['images']:.1f} %" for kind, each in earlier.items()}
    assert (
        f"It flagged {shares['clean']} of the clean photographs, {shares['blurred']} of those out of focus, "
        f"{shares['normalised']} of the normalised ones and {shares['foreign']} of the other places" in text
    )
    assert f"right on {100 * found['earlier']['accuracy']:.1f} %, was judged by an earlier guard" in text
    blur, swapped = (found["milder"][kind] for kind in ("blur, sigma 2", "red and blue swapped"))
    assert f"flagged in {blur['flagged']} of {blur['images']} photographs, and red and blue swapped" in text
    assert f"swapped in {swapped['flagged']} of {swapped['images']}" in text
    for group in found["groups"]:
        kinds = [group.get(kind, 0) for kind in ("blurred", "normalised", "foreign", "clean")]
        assert sum(kinds) == group["images"]
        assert f"| {group['images']} | {' | '.join(map(str, kinds))} |" in text
    total = sum(each["flagged"] for each in found["flagged"].values())
    assert f"{total} photographs are flagged, and chance alone would give about 150" in text
    assert sum(each["images"] for each in found["flagged"].values()) == 3000
    assert f"right on {100 * found['accuracy']:.1f} % of the test photographs" in text
    largest, second, third, fourth, *_ = found["groups"]
    assert largest["blurred"] > 0.8 * largest["images"]
    assert max(second, key=lambda kind: second[kind] if kind in found["flagged"] else 0) == "foreign"
    assert second["foreign"] > 0.5 * sum(group.get("foreign", 0) for group in found["groups"])
    assert "class_ratio" in second["about"]
    for group in (third, fourth):
        assert group["normalised"] > 0.8 * group["images"]
        assert "conv_stem" in group["about"]
    seconds = found["seconds"]
    each = f"{seconds['fit']} to fit, {seconds['score']} to score and {seconds['report']} for the report"
    assert found["cores"] == 2
    assert sum(seconds.values()) < 600  # ten minutes
    assert f"took {sum(seconds.values())} seconds together on two cores: {each}" in text
    assert f"That is {sum(found['processor_seconds'].values())} seconds of processor time" in text


def test_the_page_on_large_data_has_the_figures_of_its_file():
    found = json.loads((DOCS / "data" / "stream.json").read_text(encoding="utf-8"))
    text = " ".join((DOCS / "howto" / "large_data.md").read_text(encoding="utf-8").split())
    memory, costs = found["memory"], found["costs"]
    assert (memory["images"], found["cores"], memory["workers"]) == (100_000, 2, 2)
    assert f"judged 100,000 small images in {memory['seconds']:.0f} seconds on two cores" in text
    parts = [zip(memory["rows"], memory["mib"], strict=True) for _ in range(2)]
    second = max(mib for rows, mib in parts[0] if 10_000 <= rows <= 20_000)
    last = max(mib for rows, mib in parts[1] if rows >= 90_000)
    assert f"at most {second:.0f} MiB over the second tenth of the images and at most {last:.0f} MiB" in text
    assert (second, last) == (memory["second_tenth"], memory["last_tenth"])
    assert last < 1.05 * second  # nearly flat
    for name, case in found["workers"].items():
        spans = [f"{min(rates):,.0f} to {max(rates):,.0f}" for rates in case["rounds"].values()]
        cost = f"{costs[name]['decode_ms']:.2f} | {costs[name]['judge_ms']:.2f}"
        assert f"| {case['about']} | {cost} | {' | '.join(spans)} |" in text
        assert {len(rates) for rates in case["rounds"].values()} == {3}
    assert costs["small"]["decode_ms"] < 0.1 * costs["small"]["judge_ms"]
    assert costs["large"]["decode_ms"] > costs["large"]["judge_ms"]
    rounds = {name: case["rounds"] for name, case in found["workers"].items()}
    assert min(rounds["large"]["2"]) > max(rounds["large"]["1"])
    assert max(rounds["large"]["3"]) < max(rounds["large"]["2"])


def test_the_page_on_texts_has_the_figures_of_its_file():
    runs = json.loads((DOCS / "data" / "text.json").read_text(encoding="utf-8"))
    text = " ".join((DOCS / "howto" / "text.md").read_text(encoding="utf-8").split())
    assert len(runs) == 3

    def mean(figure: Callable[[dict[str, Any]], float]) -> float:
        return float(np.mean([figure(each) for each in runs]))

    sets = list(runs[0]["auroc"]["Guard"])
    auroc = {
        method: np.array([100 * mean(lambda run: run["auroc"][method][name]) for name in sets])  # noqa: B023
        for method in runs[0]["auroc"]
    }
    for method, row in auroc.items():
        assert f"| {method} | {' | '.join(f'{value:.1f}' for value in (*row, row.mean()))} |" in text
    ahead = auroc["Guard"] - auroc["MSP"]
    assert ahead.mean() > 0
    assert sets[ahead.argmax()] == "Python code"
    assert ahead[sets.index("editorials")] < 0
    assert (auroc["class ratio"] > auroc["Guard"]).all()
    assert min(auroc, key=lambda method: auroc[method].mean()) == "profile"
    assert all(row[sets.index("shuffled words")] < 55 for row in auroc.values())
    flagged = {name: 100 * mean(lambda run: run["flagged"][name]) for name in runs[0]["flagged"]}  # noqa: B023
    shares = [f"{flagged[name]:.1f} % of the {name}" for name in sets[:3]]
    assert f"flags {flagged['test']:.1f} % of the test sentences, {', '.join(shares)}" in text
    assert f"{flagged['French']:.1f} % of the French and {flagged['Python code']:.1f} % of the code" in text
    assert max(flagged.values()) < 50
    counts = runs[0]["texts"]
    assert f"{counts['train']:,} sentences to train on, 1,200 to calibrate on, 1,200 to test on" in text
    assert counts["calibration"] == counts["test"] == 1200
    right = [100 * run["accuracy"] for run in runs]
    assert f"right on {min(right):.0f} to {max(right):.0f} % of the test sentences" in text
    train, fit = (mean(lambda run: run["processor seconds"][part]) for part in ("train", "fit"))  # noqa: B023
    assert f"took {train:.0f} seconds of processor time to train and {fit:.0f} to fit and calibrate" in text
    padding = [run["padding"] for run in runs]
    assert f"of {sum(each['texts'] for each in padding)} test sentences, judged alone" in text
    assert not any(each["other verdicts"] for each in padding)
    largest = max(each["largest difference"] for each in padding)
    assert f"largest difference of two scores is {largest:.4f}. It is rounding" in text
    every, because = (
        {
            "texts": sum(part["texts"] for part in parts),
            **{
                name: 100
                * np.average([part[name] for part in parts], weights=[part["texts"] for part in parts])
                for name in ("auroc", "top", "chance")
            },
        }
        for parts in ([run["planted"][key] for run in runs] for key in ("all", "flagged because of it"))
    )
    assert f"put into {every['texts']:,} test sentences" in text
    assert (
        f"by contribution, is {every['auroc']:.0f} %, and {because['auroc']:.0f} % in the {because['texts']}"
        in text
    )
    assert f"in {every['top']:.0f} % of the sentences; chance is {every['chance']:.0f} %" in text


def test_the_page_on_levels_has_the_fewest_images():
    text = (DOCS / "howto" / "level.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (0\.\d+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for level, images in rows:
        assert int(images.replace(",", "")) == calibration_needs(float(level), split=True)


def test_the_page_on_calibration_has_the_ranges_of_the_picture():
    text = (DOCS / "howto" / "calibration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d,]+) \| ([\d.]+) % \| ([\d.]+) % \|$", text, re.MULTILINE)
    assert [int(row[0].replace(",", "")) for row in rows] == list(IMAGES)
    for images, (_, low, high) in zip(IMAGES, rows, strict=True):
        expected = range_of_rates(images - images // 2, 0.95)
        assert (low, high) == tuple(f"{100 * rate:.1f}" for rate in expected)
    assert f"Level 0.95 needs at least {calibration_needs(0.95, split=True)}." in text
    faq = (DOCS / "faq.md").read_text(encoding="utf-8")
    assert "With 100 of them, 9 % instead of 5 % is within chance" in faq
    assert range_of_rates(50, 0.95)[1] > 0.09


def test_the_memory_of_imagenet_is_that_of_the_page_on_limits():
    """tests/test_limits.py computes the figures on that page."""
    limits = (DOCS / "limits.md").read_text(encoding="utf-8")
    said = r"(\d\.\d) GB of bounds; with `storage=\"float16\"` it is (\d\.\d) GB"
    ((whole, half),) = re.findall(said, limits)
    faq = " ".join((DOCS / "faq.md").read_text(encoding="utf-8").split())
    large = " ".join((DOCS / "howto" / "large_data.md").read_text(encoding="utf-8").split())
    assert f'{whole} GB of bounds, and {half} GB with `storage="float16"`' in faq
    assert f"{whole} GB of bounds, or {half} GB in float16" in large


def test_the_reference_has_every_public_name():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for public in gramwatch.__all__:
        assert re.search(rf"(gramwatch\.|[ ,]){public}\b", text), public
    from gramwatch.methods import METHODS

    for method in METHODS.values():
        assert f"gramwatch.methods.{method.__name__}\n" in text, method
