"""The command `gramwatch doctor`."""

import json
import sys

import pytest
import torch

from gramwatch.cli.doctor import versions
from tests.cli.invoking import invoke, raising


def test_the_doctor_finds_versions_kernels_and_a_working_guard():
    result = invoke("doctor", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["torch"] == torch.__version__
    assert report["kernels"].startswith("compiled, within ")
    assert float(report["kernels"].split()[2]) < 1e-4
    assert (report["device"], report["self-test"]) == ("cpu", "passed")


def test_the_doctor_reports_what_fails(monkeypatch):
    monkeypatch.setattr("gramwatch.guard.guard.Guard.fit", raising(RuntimeError("no such luck")))
    result = invoke("doctor", "--device", "cpu")
    assert result.exit_code == 1
    assert "RuntimeError: no such luck" in result.output


def test_the_doctor_says_why_kernels_are_not_used(monkeypatch):
    monkeypatch.setattr("gramwatch.numerics.kernels._given_up", set())
    monkeypatch.setattr("gramwatch.numerics.kernels.cpu.compute", raising(RuntimeError("no compiler")))
    shown = invoke("doctor", "--device", "cpu", "--json")
    assert "not used: " in json.loads(shown.stdout)["kernels"]
    assert "no compiler" in json.loads(shown.stdout)["kernels"]


@pytest.mark.parametrize("package", ["pyarrow", "torchvision"])
def test_the_doctor_imports_what_it_calls_installed(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # as a package that fails when it is imported
    monkeypatch.setattr("gramwatch.cli.doctor.PACKAGES", {package: "gramwatch[some]", "numpy": ""})
    monkeypatch.setattr("importlib.metadata.version", lambda package: "1.2.3")
    monkeypatch.setattr("gramwatch.cli.doctor.self_test", lambda place: "")
    shown = invoke("doctor", "--device", "cpu", "--json")
    assert shown.exit_code == 1
    report = json.loads(shown.stdout)
    assert report[package].startswith("1.2.3, cannot be imported: ModuleNotFoundError")
    assert report["numpy"] == "1.2.3"


def test_the_doctor_knows_that_classifiers_do_without_the_operators_of_torchvision(monkeypatch):
    monkeypatch.setattr("gramwatch.cli.doctor.PACKAGES", {"torchvision": ""})
    monkeypatch.setattr("gramwatch.inputs.foreign.import_torchvision", lambda: None)
    monkeypatch.setattr("importlib.import_module", raising(RuntimeError("operator torchvision::nms")))
    ((_, text, works),) = versions()
    assert works
    assert "cannot be imported: RuntimeError: operator torchvision::nms" in text
    assert "Classifiers work nevertheless" in text
