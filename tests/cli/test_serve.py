"""The command `gramwatch serve`."""

import contextlib
import csv
import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gramwatch
from gramwatch.inputs.models import resolve
from tests.cli.invoking import invoke, raising, told
from tests.cli.own import PREPARED, QUICK
from tests.pages import ROOT

TOKEN = "correct horse battery"


@contextlib.contextmanager
def served(own, *words: object, **environment: str) -> Iterator[tuple[Any, Any]]:
    """The command in a process of its own, and a function that asks it."""
    network = [] if own.model is None else ["--model", own.model]
    command = ["serve", own.guard, *network, "--port", 0, "--device", "cpu", *words]
    running = subprocess.Popen(
        [sys.executable, "-m", "gramwatch", *map(str, command)],
        cwd=own.folder, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    assert running.stderr is not None
    lines: list[str] = []
    for line in running.stderr:
        lines.append(line)
        if "listening at http://" in line:
            break
    assert lines, "the service did not start"
    assert "listening" in lines[-1], lines
    threading.Thread(target=lambda: lines.extend(running.stderr or ()), daemon=True).start()

    def ask(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(lines_address, timeout=60)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, text if path == "/metrics" else json.loads(text)

    lines_address = next(line for line in lines if "listening" in line).split("//")[1].strip()
    running.lines = lines  # type: ignore[attr-defined]
    try:
        yield running, ask
    finally:
        running.kill()
        running.wait()


def test_the_verdicts_are_those_of_score_and_sigterm_is_an_orderly_end(own, tmp_path):
    one_by_one = [*own.score, own.test, "--batch-size", 1]  # as the requests below
    assert invoke(*one_by_one, "-o", tmp_path / "s.csv", "-q").exit_code == 0
    with (tmp_path / "s.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[:6]
    state = tmp_path / "state.safetensors"
    with served(own, "--monitor-state", state) as (running, ask):
        for row in rows:
            status, answer = ask("POST", "/score", Path(row["path"]).read_bytes())
            assert status == 200
            (result,) = answer["results"]
            assert result["class"] == row["class"]
            assert result["score"] == pytest.approx(float(row["score"]))
            assert result["p_value"] == float(row["p_value"])
            assert result["parts"]["gram"] == float(row["p_gram"])
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
        time.sleep(0.2)
        assert running.lines[-1] == "ended. All that was accepted is answered\n"
    guard = gramwatch.load(own.guard, resolve(own.model, own.weights).network)
    assert gramwatch.Monitor.load(state, guard).seen == 6
    with served(own, "--monitor-state", state, "--monitor-every", 2) as (running, ask):
        assert f"note: {state} was begun with every=1, which stays\n" in running.lines
        assert "going on: the monitor has seen 6 images\n" in running.lines
        assert ask("GET", "/monitor")[1]["images"] == 6
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0


def test_an_exported_guard_is_served_without_its_network(own, robust, graph, tmp_path):
    assert (
        invoke("score", robust, own.test, "--model", own.model, *QUICK, "-o", tmp_path / "s.csv").exit_code
        == 0
    )
    with (tmp_path / "s.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[::8]
    state = tmp_path / "state.safetensors"
    alone = SimpleNamespace(
        guard=graph, model=None, folder=tmp_path
    )  # the module of the network is elsewhere
    with served(alone, "--monitor-state", state) as (running, ask):
        for row in rows:
            (result,) = ask("POST", "/score", Path(row["path"]).read_bytes())[1]["results"]
            assert (result["class"], str(result["is_ood"]).lower()) == (row["class"], row["is_ood"])
            assert result["score"] == pytest.approx(float(row["score"]), rel=1e-4, abs=1e-4)
            assert result["p_value"] == pytest.approx(float(row["p_value"]))
            assert result["parts"]["gram"] == pytest.approx(float(row["p_gram"]))
        outputs = ask("GET", "/v2/models/guard")[1]["outputs"]
        assert [output["name"] for output in outputs][-2:] == ["p_gram", "p_energy"]
        refused = ask("POST", "/score?reasons=true", Path(rows[0]["path"]).read_bytes())
        assert refused[0] == 400
        assert "this guard gives no reasons: an exported guard returns" in refused[1]["error"]
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    guard = gramwatch.load(robust, resolve(own.model, own.weights).network)
    assert gramwatch.Monitor.load(state, guard).seen == len(rows) == 5


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "timm:resnet18"], "has its network inside: leave it out"),
        (["--mean", "0.5,0.5,0.5"], "normalises by itself: leave them out"),
        (["--size", "8"], "takes images of shape (16, 16, 3), the preprocessing makes (8, 8, 3)"),
        (["--device", "mps"], "ONNX Runtime has no device 'mps'"),
    ],
)
def test_wrong_usage_of_an_exported_guard_is_one_line(graph, words, reason, monkeypatch):
    monkeypatch.setattr("gramwatch.deploy.serve.server.Server.run", raising(AssertionError("it serves")))
    result = invoke("serve", graph, *words)
    assert result.exit_code in (1, 2)
    assert reason in told(result)


def test_a_guard_without_preprocessing_needs_the_options(own, robust, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    served = []
    monkeypatch.setattr("gramwatch.deploy.serve.server.Server.run", lambda server: served.append(server))
    guard = gramwatch.load(robust, resolve(own.model, own.weights).network)
    del guard.metadata["preprocessing"]
    guard.export(tmp_path / "guard.onnx", torch.zeros(1, 3, 16, 16))
    result = invoke("serve", tmp_path / "guard.onnx", "--device", "cpu")
    assert result.exit_code == 1
    assert "guard.onnx is not known: give --size, --resize, --mean, --std" in told(result)
    assert served == []
    result = invoke("serve", tmp_path / "guard.onnx", "--device", "cpu", *PREPARED)
    assert (result.exit_code, len(served)) == (0, 1), result.output
    result = invoke("serve", tmp_path / "guard.pt2", "--device", "cpu")
    assert result.exit_code == 2
    (tmp_path / "guard.pt2").write_bytes(b"")
    result = invoke("serve", tmp_path / "guard.pt2", "--device", "cpu")
    assert "PyTorch may run code that is in it. Export the guard to .onnx" in told(result)


def test_the_token_comes_from_the_environment_or_a_file(own, tmp_path):
    with served(own, GRAMWATCH_TOKEN=TOKEN) as (_, ask):
        assert ask("GET", "/v2")[0] == 401
        assert ask("GET", "/v2", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert ask("GET", "/healthz") == (200, {"live": True})
    (tmp_path / "token").write_text("short\n")
    result = invoke("serve", own.guard, "--model", own.model, "--token-file", tmp_path / "token")
    assert result.exit_code == 2
    assert "the token has 5 letters" in told(result)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines, and there is no token"),
        (["--queue", "8"], "a request may have 32 images, but only 8 may wait"),
        (["--token-file", "missing"], "there is no file missing"),
        (["--monitor-state", "/proc/missing/state"], "cannot write into"),
        (["--mean-time-to-false-alarm", "0.5"], "mean_time_to_false_alarm must be above 1"),
        (["--monitor-reference", "both"], "reference must be 'online' or 'fixed'"),
        (["--monitor-replica", "4/4"], "'4/4' does not name a copy: write 0/4 for the first of four"),
        (["--weights", "missing"], "missing"),
    ],
)
def test_wrong_usage_is_one_line(own, words, reason, monkeypatch):
    monkeypatch.delenv("GRAMWATCH_TOKEN", raising=False)
    monkeypatch.setattr("gramwatch.deploy.serve.server.Server.run", raising(AssertionError("it serves")))
    result = invoke("serve", own.guard, "--model", own.model, "--device", "cpu", *words)
    assert result.exit_code in (1, 2)
    assert reason in told(result)


def test_the_guard_of_another_network_is_refused(own, tmp_path):
    from safetensors.torch import save_file

    changed = __import__(own.model.partition(":")[0]).build()
    save_file(changed.state_dict(), tmp_path / "untrained.safetensors")
    result = invoke("serve", own.guard, "--model", own.model, "--weights", tmp_path / "untrained.safetensors")
    assert result.exit_code == 1
    assert "a network of the same form with other weights" in told(result)


def test_without_the_extra_the_command_says_what_to_install(own):
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "import gramwatch\n"
        "try: import gramwatch.deploy.serve\n"
        "except gramwatch.MissingExtraError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gramwatch[serve]" in done.stdout


def test_the_production_section_of_the_readme_runs_as_it_stands(of_page, monkeypatch):
    """In the folder of docs/cli.md. Figures of a training differ a little from machine to machine."""
    pytest.importorskip("onnxscript")
    section = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("## Run it in production")[1].split("\n## ")[0]
    )
    export, serve, score, monitor = re.findall(r"^ {4}((?:gramwatch|curl) .*)", section, re.MULTILINE)
    shown, watched = (json.loads(text) for text in re.findall(r"^ {4}(\{.*)", section, re.MULTILINE))
    folder = of_page.folder
    monkeypatch.chdir(folder)
    assert invoke(*shlex.split(export)[1:], "-q").exit_code == 0
    words = shlex.split(serve)[2:]
    with served(SimpleNamespace(guard=words[0], model=None, folder=folder), *words[1:]) as (_, ask):
        image = folder / score.split("@")[1].split()[0]
        (result,) = ask("POST", score.rpartition("8000")[2], image.read_bytes())[1]["results"]
        actual = ask("GET", monitor.rpartition("8000")[2])[1]
        for photograph in sorted(image.parent.iterdir())[1:16]:
            ask("POST", score.rpartition("8000")[2], photograph.read_bytes())
        later = ask("GET", monitor.rpartition("8000")[2])[1]
    (expected,) = shown["results"]
    assert result["score"] == pytest.approx(expected["score"], rel=0.1)
    assert result.keys() == expected.keys()
    assert result["parts"].keys() == expected["parts"].keys()
    assert result["is_ood"] is expected["is_ood"] is True
    assert actual.keys() == watched.keys()
    assert (actual["images"], actual["alarm"]) == (watched["images"], watched["alarm"]) == (1, False)
    assert later["alarm"]
    assert 6 <= later["alarm_at"] <= 10
