"""The command `gramwatch doctor`."""

import json

import torch

from tests.cli.invoking import invoke, raising


def test_the_doctor_finds_versions_kernels_and_a_working_guard():
    result = invoke("doctor", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["torch"] == torch.__version__
    assert found["kernels"].startswith("compiled, within ")
    assert float(found["kernels"].split()[2]) < 1e-4
    assert (found["device"], found["self-test"]) == ("cpu", "passed")


def test_the_doctor_reports_what_fails(monkeypatch):
    monkeypatch.setattr("gramwatch.guard.Guard.fit", raising(RuntimeError("no such luck")))
    result = invoke("doctor", "--device", "cpu")
    assert result.exit_code == 1
    assert "RuntimeError: no such luck" in result.output


def test_the_doctor_says_why_kernels_are_not_used(monkeypatch):
    monkeypatch.setattr("gramwatch.kernels._given_up", set())
    monkeypatch.setattr("gramwatch.kernels.cpu.compute", raising(RuntimeError("no compiler")))
    shown = invoke("doctor", "--device", "cpu", "--json")
    assert "not used: " in json.loads(shown.stdout)["kernels"]
    assert "no compiler" in json.loads(shown.stdout)["kernels"]
