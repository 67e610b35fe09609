"""Options that several commands share, and groups of them."""

import inspect

import pytest
import typer
from typer.testing import CliRunner

from gramwatch.cli.options import NetworkOptions, PreprocessingOptions, Voice, with_groups


def command(name: str, *, network: NetworkOptions, last: int = 3, voice: Voice) -> None:
    """A command."""
    typer.echo(f"{name} {network.model} {network.weights} {last} {voice.quiet} {voice.as_json}")


def test_the_options_of_a_group_stand_in_its_place():
    expanded = with_groups(command)
    assert list(inspect.signature(expanded).parameters) == [
        "name", "model", "weights", "last", "quiet", "as_json",
    ]  # fmt: skip
    assert expanded.__doc__ == "A command."


def test_a_command_receives_its_groups():
    app = typer.Typer()
    app.command()(with_groups(command))
    runner = CliRunner()
    assert runner.invoke(app, ["x"]).output == "x None None 3 False False\n"
    words = ["x", "--json", "--model", "timm:resnet18", "--last", "4", "-q"]
    assert runner.invoke(app, words).output == "x timm:resnet18 None 4 True True\n"


def test_only_the_first_process_speaks(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    for rank, text in (("1", ""), ("0", '{"a": 1}\n')):
        monkeypatch.setenv("RANK", rank)
        voice = Voice(as_json=True)
        voice.say("a message")
        voice.summary({"a": 1})
        out, err = capsys.readouterr()
        assert (out, err) == (text, "a message\n" if text else "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": "sharp"}, "there is no filter 'sharp'"),
        ({"mean": "grey"}, "'grey' is not a list of numbers"),
        ({"mean": "127.5"}, "On a scale to 255, 127.5 is 0.5 here"),
        ({"std": "0.5,0"}, "a standard deviation of 0 cannot divide"),
        ({"mean": "0.5", "std": "0.5,0.5,0.5"}, "--mean has 1 number"),
    ],
)
def test_preprocessing_that_cannot_be_meant_is_refused(options, message):
    with pytest.raises(typer.BadParameter, match=message.replace("(", r"\(")):
        PreprocessingOptions(**options)
