"""The examples run, without a warning, and say what they promise."""

import re
import runpy
from collections.abc import Iterator

import pytest

from gramwatch.methods import METHODS
from gramwatch.paper.compare import method_names
from tests.pages import ROOT, code_of

EXAMPLES = ROOT / "examples"


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
    }


def test_the_quickstart_is_that_of_the_readme_and_runs(tmp_path, monkeypatch, capsys):
    block = code_of(ROOT / "README.md", "python")
    docstring, *code = lines((EXAMPLES / "quickstart.py").read_text(encoding="utf-8"))
    assert docstring.startswith('"""')
    assert code == lines(block)
    monkeypatch.chdir(tmp_path)
    run("quickstart")
    said = capsys.readouterr().out
    assert "Detection: 0 of 5 out-of-distribution" in said
    assert "Detection: 5 of 5 out-of-distribution" in said
    assert (tmp_path / "guard.safetensors").is_file()


def test_a_timm_network_is_guarded(capsys):
    pytest.importorskip("timm")
    run("timm_network")
    said = capsys.readouterr().out
    assert "flagged: [False, False, False, False, True, True, True, True]" in said
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
    from gramwatch.paper import compare

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
