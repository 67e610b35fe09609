"""`gramwatch fit --nproc`: several processes write the file that one would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gramwatch.cli import launch
from gramwatch.cli.common import ImageSet, default_workers
from gramwatch.files import artifact
from tests.cli.invoking import invoke
from tests.cli.own import PREPARED, QUICK

ROOT = Path(__file__).parents[2]


def run(own, *words):
    """A `gramwatch fit` of its own, whose processes find the network of the tests."""
    paths = os.pathsep.join([str(own.folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "gramwatch",
        "fit",
        own.model,
        *words,
        "--weights",
        own.weights,
        *PREPARED,
    ]
    return subprocess.run(
        [str(word) for word in [*command, *QUICK]],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_two_processes_write_the_file_of_one(own, tmp_path):
    done = run(own, own.train, "--nproc", 2, "-o", tmp_path / "guard.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stderr.replace(str(tmp_path), str(own.folder)).split() == own.said.split()  # nothing twice
    one, two = artifact.read(own.guard), artifact.read(tmp_path / "guard.safetensors")
    assert two.header["metadata"]["images"] == one.header["metadata"]["images"]
    assert two.header["metadata"]["classes"] == ["bright", "dark"]
    assert two.file.layout.keys() == one.file.layout.keys()
    sums = 0
    for name in one.file.layout:
        mine, theirs = two.file.tensor(name), one.file.tensor(name)
        last = name.rpartition(".")[2]
        if last in ("sums_", "products_"):
            sums += 1
            torch.testing.assert_close(
                mine, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()), msg=name
            )
        elif last in ("whitening_", "centres_") or name.startswith("calibration"):
            continue  # this network's covariance is nearly singular, so that roundings of sums grow
        else:
            assert torch.equal(mine, theirs), name
    assert sums == 7
    assert torch.equal(two.file.tensor("calibration.predicted"), one.file.tensor("calibration.predicted"))
    scores = [saved.file.tensor("calibration.scores")[:, 0] for saved in (one, two)]
    assert torch.equal(scores[0].argsort(), scores[1].argsort())


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_what_fails_is_said_by_rank_0_alone(own, tmp_path, monkeypatch, rank, lines):
    """A failure of rank 1 by itself reaches rank 0: tests/detect/test_distributed.py."""
    for name, value in launch._environment(rank, 1, 12345).items():
        monkeypatch.setenv(name, value)
    result = invoke(
        "fit", own.model, tmp_path / "none", *PREPARED, *QUICK, "-o", tmp_path / "guard.safetensors"
    )
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == lines * 2  # the network, and the error


def test_images_are_dealt_out_by_batches():
    images = ImageSet([str(i) for i in range(11)], labels=list("abcdefghijk"))
    parts = [images.part(rank, 3, 2) for rank in range(3)]
    assert [part.keys for part in parts] == [["0", "1", "6", "7"], ["2", "3", "8", "9"], ["4", "5", "10"]]
    assert parts[2].labels == ["e", "f", "k"]
    assert images.part(0, 1, 2) == images


def test_cores_are_shared_by_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr("gramwatch.cli.common.cores", lambda: 16)
    assert [default_workers(processes) for processes in (1, 2, 4, 16)] == [8, 8, 4, 1]


def test_every_rank_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launch.device_of_rank("cuda") == "cuda"
    for name, value in launch._environment(3, 4, 12345).items():
        monkeypatch.setenv(name, value)
    assert (launch.processes(), launch.first()) == (4, False)
    assert launch.device_of_rank("cuda") == "cuda:1"
    assert launch.device_of_rank("cpu") == "cpu"


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("exit 0", 0, ""),
        ("exit 2", 2, ""),
        ("kill -9 $$", 1, "gramwatch: rank 1 was ended by SIGKILL. It may have been short of memory."),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(monkeypatch, capsys, end, code, said):
    monkeypatch.setattr(launch, "PATIENCE", 0.2)
    others = "exit 0" if end == "exit 0" else "sleep 60"
    ranks = [subprocess.Popen(["sh", "-c", command]) for command in (others, end)]
    try:
        assert launch._wait(ranks) == code
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert capsys.readouterr().err.strip() == said
