"""The command as a whole: its version, and how it fails."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

import gramwatch
from gramwatch.errors import DataError, GramwatchWarning
from tests.cli.invoking import invoke, raising, told
from tests.cli.own import PREPARED, QUICK


def test_the_command_knows_its_version():
    done = subprocess.run(
        [sys.executable, "-m", "gramwatch", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == gramwatch.__version__


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DataError("MNIST is damaged"), "gramwatch: MNIST is damaged"),
        (OSError(28, "No space left on device"), "gramwatch: [Errno 28] No space left on device"),
        (OSError(), "gramwatch: OSError"),
    ],
)
def test_what_fails_on_the_way_is_one_line(
    error: Exception, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gramwatch.cli.quickstart.run", raising(error))
    result = invoke("demo", "--output", tmp_path)
    assert (result.exit_code, told(result)) == (1, line)


def test_the_unexpected_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramwatch.cli.quickstart.run", raising(KeyError("a bug")))
    assert isinstance(invoke("demo", "--output", tmp_path).exception, KeyError)


def test_help_does_not_wait_for_pytorch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from gramwatch.cli.app import app\n"
        "shown = CliRunner().invoke(app, ['--help'])\n"
        "assert 'score' in shown.output\n"
        "heavy = set('torch numpy numba scipy PIL timm torchvision transformers'.split())\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_has_no_line_breaks_inside_paragraphs() -> None:
    """A narrow terminal would show them beside its own."""
    from gramwatch.cli.app import COMMANDS, app

    for command in typer.main.get_command(app).commands.values():
        for paragraph in (command.help or "").split("\n\n"):
            first, *others = paragraph.split("\n")
            assert not others or (first, len(others)) == ("Examples:", 1), command.name
    assert len(COMMANDS) > 12


def test_the_command_shows_warnings_as_notes(own, tmp_path) -> None:
    some = next(path for path in own.train.iterdir() if path.is_dir())
    words = ["fit", own.model, some, "--weights", own.weights, "--hold-out", 0, *PREPARED, *QUICK]
    command = [sys.executable, "-m", "gramwatch", *words, "-o", tmp_path / "guard.safetensors"]
    done = subprocess.run(
        [str(word) for word in command], cwd=own.folder, capture_output=True, text=True, check=True
    )
    assert "note: 1 of 2 classes were predicted for fewer than 20 training examples" in done.stderr
    assert "GramwatchWarning" not in done.stderr


def test_quiet_silences_warnings_too(own, tmp_path) -> None:
    some = next(path for path in own.train.iterdir() if path.is_dir())
    words = ["fit", own.model, some, "--weights", own.weights, "--hold-out", 0, *PREPARED, *QUICK]
    with pytest.warns(GramwatchWarning, match="predicted for fewer than"):
        invoke(*words, "-o", tmp_path / "a.safetensors")
    result = invoke(*words, "-o", tmp_path / "b.safetensors", "-q")
    assert (result.exit_code, result.output) == (0, "")


def test_every_command_has_a_short_option_for_help() -> None:
    from gramwatch.cli.app import app

    group = typer.main.get_command(app)
    words = [
        [],
        *([name] for name in group.commands),
        *(["data", name] for name in group.commands["data"].commands),
    ]
    for command in words:
        shown = invoke(*command, "-h")
        assert (shown.exit_code, "Usage: " in shown.output) == (0, True), command
    assert invoke("score", "-h").output == invoke("score", "--help").output


@pytest.mark.parametrize("command", ["paper list", "study", "train --help", "data list --sources"])
def test_without_the_lab_its_commands_say_what_to_install(command: str) -> None:
    found = without_the_lab(*command.split())
    assert found.returncode == 2
    name = command.split()[0]
    assert found.stderr == f"gramwatch: '{name}' comes with gramwatch-lab: pip install gramwatch-lab\n"


def test_without_the_lab_help_does_not_list_its_commands() -> None:
    found = without_the_lab("--help")
    assert found.returncode == 0
    assert "evaluate" in found.stdout
    assert " paper " not in found.stdout


def without_the_lab(*words: str, points: str = "[]") -> "subprocess.CompletedProcess[str]":
    """A command where packages offer no more commands than `points`."""
    code = (
        "import importlib.metadata as m, sys\n"
        f"m.entry_points = lambda **_: {points}\n"
        "from gramwatch.cli import main\n"
        f"sys.argv = ['gramwatch', *{words!r}]\n"
        "main()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_command_that_cannot_be_imported_does_not_stop_the_others() -> None:
    found = without_the_lab("paper", points="[m.EntryPoint('paper', 'no.such:thing', 'gramwatch.commands')]")
    assert found.returncode == 2
    assert "the command 'paper' of another package cannot be imported: No module named 'no'" in found.stderr
    assert "pip install gramwatch-lab" in found.stderr
