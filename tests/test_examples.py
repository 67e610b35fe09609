"""The examples run, without a warning, and say what they promise."""

import ast
import io
import random
import re
import runpy
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gramwatch.evaluation.compare import method_names
from gramwatch.methods import METHODS
from tests.pages import ROOT, code_of

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.usefixtures("whole_rehearsals")


@pytest.fixture(autouse=True)
def _no_more_methods_than_before() -> Iterator[None]:
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def run(name: str) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def lines(code: str) -> list[str]:
    """The lines of some code, comments included, however they are aligned."""
    return [re.sub(r"\s+", " ", line).strip() for line in code.splitlines() if line.strip()]


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "quickstart",
        "timm_network",
        "own_method",
        "onnx_only",  # tests/cli/test_export.py
        "text_classifier",
    }


def test_the_quickstart_is_that_of_the_readme_and_runs(tmp_path, monkeypatch, capsys):
    block = code_of(ROOT / "README.md", "python")
    docstring, *code = lines((EXAMPLES / "quickstart.py").read_text(encoding="utf-8"))
    assert docstring.startswith('"""')
    assert code == lines(block)
    monkeypatch.chdir(tmp_path)
    run("quickstart")
    said = capsys.readouterr().out
    assert re.search("Detection: [01] of 5 out-of-distribution", said)  # a false alarm may be among them
    assert "Detection: 5 of 5 out-of-distribution" in said
    assert (tmp_path / "guard.safetensors").is_file()


def test_a_timm_network_is_guarded(capsys):
    pytest.importorskip("timm")
    run("timm_network")
    said = capsys.readouterr().out
    flagged = ast.literal_eval(re.search(r"flagged: (.*)", said)[1])
    assert sum(flagged[:4]) <= 1  # a false alarm may be among them
    assert flagged[4:] == [True] * 4
    assert "profile: [" in said
    assert "where the last image deviates most: " in said
    assert "loaded, for resnet10t: the same verdicts: True" in said


def test_a_method_of_ones_own_does_what_all_do(capsys):
    assert "logit_gap" not in METHODS
    run("own_method")
    said = capsys.readouterr().out
    for promise in ("fitted in two parts and merged", "interrupted and resumed", "saved and loaded"):
        assert f"{promise}: True" in said
    assert "in a guard: ['gram', 'logit_gap']" in said
    assert re.search(r"^logit gap +\d+\.\d\d ", said, re.MULTILINE)
    assert "logit_gap" in method_names("all")


def test_the_command_line_evaluates_a_method_of_ones_own(tmp_path, monkeypatch):
    testing = pytest.importorskip("typer.testing")
    from gramwatch.cli.app import app
    from gramwatch.evaluation import compare

    asked = []
    monkeypatch.setattr(compare, "run", lambda methods, *rest: asked.append(compare.method_names(methods)))
    own, output = str(EXAMPLES / "own_method.py"), str(tmp_path)
    options = ["evaluate", "--methods", "all", "--output", output]
    done = testing.CliRunner().invoke(app, [*options, "--own", own])
    assert done.exit_code == 0, done.output
    assert asked == [["guard", "gram", *METHODS]]
    assert "logit_gap" in METHODS
    done = testing.CliRunner().invoke(app, [*options, "--own", str(tmp_path / "none.py")])
    assert done.exit_code == 2
    assert "there is no file" in done.output


# --- texts -------------------------------------------------------------------------------------------


def written(path: Path, files: Mapping[str, bytes]) -> bytes:
    """A packed archive with these files."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path.read_bytes()


def catalogue(messages: list[str]) -> bytes:
    """A file of translations: a header, places of originals and translations, then the texts."""
    texts = [*(f"{i:04d}".encode() for i in range(len(messages))), *(text.encode() for text in messages)]
    head, at, places = 28, 28 + 8 * len(texts), b""
    for text in texts:
        places += struct.pack("<II", len(text), at)
        at += len(text) + 1
    header = struct.pack("<7I", 0x950412DE, 0, len(messages), head, head + 8 * len(messages), 0, at)
    return header + places + b"".join(text + b"\0" for text in texts)


def made_up_texts(folder: Path) -> list[str]:
    """Archives like those that the example downloads, with made-up sentences."""
    draw = random.Random(0)
    things = {
        "tweets": "lol omg weekend party friends happy tonight",
        "movieReviewSnippets": "actor plot director scene comedy drama film",
        "amazonReviewSnippets": "battery camera player screen price button manual",
        "nytEditorialSnippets": "senate court budget governor treaty school tax",
    }

    def sentence(words: str) -> str:
        return " ".join(["the", *draw.choices(words.split(), k=draw.randint(4, 14)), "was", "good."])

    files = {
        f"hutto/{name}_GroundTruth.txt": "".join(
            f"{i // 3}_{i}\t0.5\t{sentence(words)}\r\n" for i in range(200)
        ).encode()
        for name, words in things.items()
    }
    inner = written(folder / "inner.tar.gz", files)
    written(folder / "texts.tar.gz", {"vader/additional_resources/hutto_ICWSM_2014.tar.gz": inner})
    with zipfile.ZipFile(folder / "messages.whl", "w") as wheel:
        messages = [f"le mot de passe %(name)s {'est trop court ' * i}." for i in range(1, 30)]
        wheel.writestr("django/conf/locale/fr/LC_MESSAGES/django.mo", catalogue(messages))
    return ["--texts", str(folder / "texts.tar.gz"), "--messages", str(folder / "messages.whl")]


@pytest.mark.filterwarnings("ignore:.*(taps never deviate|predicted for fewer than)")
def test_a_text_classifier_is_guarded(tmp_path, capsys):
    pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLES / "text_classifier.py"))
    (figures,) = example["main"]([*made_up_texts(tmp_path), "--epochs", "3"])
    said = capsys.readouterr().out
    assert figures["accuracy"] > 0.9
    assert figures["padding"]["largest difference"] < 0.01
    assert figures["padding"]["other verdicts"] == 0
    assert figures["auroc"]["Guard"]["editorials"] > 0.8
    assert figures["auroc"].keys() == {
        *("Guard", "Gram", "profile", "class ratio", "energy", "Mahalanobis++", "KNN", "MSP")
    }
    assert re.search(r"^Flagged \(p = .*\n +adds +token\n +\d+\.\d{3} █* +\[CLS\]\n", said, re.MULTILINE)
    assert re.search(r"^ +\d+\.\d{3} █+ +▁the$", said, re.MULTILINE)
