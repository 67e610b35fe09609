"""The CPU kernels: where compiled code is kept, and threads."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gramwatch
from gramwatch.numerics.kernels import FAST

# numba keeps compiled code in NUMBA_CACHE_DIR, the package's __pycache__ or the user's home.
USE = """
import os, shutil, sys, warnings
from pathlib import Path
import torch
from gramwatch.numerics import kernels
folder = Path(sys.argv[1])
if sys.argv[2] == "later":
    import gramwatch.numerics.kernels.cpu
    shutil.rmtree(os.environ["NUMBA_CACHE_DIR"])
    Path(os.environ["NUMBA_CACHE_DIR"]).write_text("in the way")
assert kernels.__file__.startswith(str(folder)), kernels.__file__
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        values, minimum = torch.rand(5, 3), torch.full((1, 3), torch.inf)
        maximum = -minimum
        assert kernels.attempt(("cpu", "widen"), values, torch.zeros(5, dtype=torch.long), minimum, maximum)
        assert torch.equal(torch.cat([minimum, maximum]), torch.stack(values.aminmax(dim=0)))
assert not kernels._given_up, kernels._given_up
for warning in caught:
    print(Path(warning.filename).name, warning.category.__name__, warning.message)
"""


@pytest.mark.parametrize("when", ["never", "later"])
def test_without_a_folder_for_compiled_code_the_kernels_still_work(tmp_path, when):
    """Files stand where the folders would be, as permissions say nothing to root.

    The kernel is the one that takes the least time to compile.
    """
    (tmp_path / "file").write_text("in the way")
    nowhere = str(tmp_path / "file" / "below")
    cache = str(tmp_path / "cache") if when == "later" else nowhere
    environment = os.environ | {
        "HOME": nowhere,
        "XDG_CACHE_HOME": nowhere,
        "NUMBA_CACHE_DIR": cache,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    package = shutil.copytree(
        Path(gramwatch.__file__).parent, tmp_path / "gramwatch", ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "numerics" / "kernels" / "__pycache__").write_text("in the way")
    environment["PYTHONPATH"] = str(tmp_path)
    (tmp_path / "use.py").write_text(USE)
    command = [sys.executable, str(tmp_path / "use.py"), str(tmp_path), when]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("use.py GramwatchWarning the compiled kernels cannot be kept on disk")
    assert "set NUMBA_CACHE_DIR" in line


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("own_threads", [True, False])
@pytest.mark.parametrize("name", FAST)
def test_several_threads_give_what_one_gives(name, own_threads, three_threads, monkeypatch):
    from gramwatch.numerics.kernels import cpu, threads

    if own_threads:
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    maps, orders = torch.randn(13, 40, 35), (1, 2, 10)
    several, one = torch.empty(13, 3, 40), torch.empty(13, 3, 40)
    cpu.compute(name, maps, orders, several)
    torch.set_num_threads(1)
    cpu.compute(name, maps, orders, one)
    assert torch.equal(several, one)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyTorch may bring another kind of threads")
def test_the_threads_are_those_of_pytorch():
    from gramwatch.numerics.kernels import threads

    assert threads._openmp() is not None


@pytest.mark.parametrize("own_threads", [True, False])
def test_an_error_on_another_thread_is_raised(own_threads, three_threads, monkeypatch):
    from gramwatch.numerics.kernels import threads

    if own_threads:
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    seen = []

    def fail(start, stop):
        seen.append((start, stop))
        if start == 0:
            raise ValueError("the first part")

    with pytest.raises(ValueError, match="the first part"):
        threads.in_parts(fail, 30)
    seen.clear()
    threads.in_parts(lambda start, stop: seen.extend(range(start, stop)), 30)
    assert sorted(seen) == list(range(30))
