"""Guards of small networks, fitted by the command itself, once for all tests."""

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.invoking import invoke
from tests.cli.own import PACKAGE, PREPARED, QUICK, write_classes
from tests.guarded import rehearsing
from tests.pages import ROOT, code_of

NAME = "gramwatch_test_nets"


@dataclass(frozen=True)
class Own:
    folder: Path
    said: str
    model: str = f"{NAME}:build"

    @property
    def weights(self) -> Path:
        return self.folder / "net.safetensors"

    @property
    def train(self) -> Path:
        return self.folder / "train"

    @property
    def test(self) -> Path:
        return self.folder / "test"

    @property
    def guard(self) -> Path:
        return self.folder / "guard.safetensors"

    @property
    def score(self) -> list[object]:
        """The beginning of a command that scores."""
        return ["score", self.guard, "--model", self.model, *QUICK]


def _train(folder: Path) -> None:
    """Weights for the network, which then tells bright from dark."""
    from gramwatch.inputs.demo import train
    from gramwatch.inputs.files import files_of
    from gramwatch.inputs.preprocessing import Preprocessing
    from gramwatch.inputs.readers import Images

    files = files_of(folder / "train")
    prepare = Preprocessing((16, 16), 16, "bilinear", (0.5,) * 3, (0.25,) * 3)
    inputs = torch.cat([batch.inputs for batch in Images(files.paths, prepare)])
    labels = torch.tensor([files.classes.index(name) for name in files.labels])
    network = __import__(NAME).build()
    train(network, inputs, labels, epochs=5)
    save_file(network.state_dict(), folder / "net.safetensors")


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    folder = tmp_path_factory.mktemp("own")
    (folder / f"{NAME}.py").write_text(PACKAGE)
    sys.path.insert(0, str(folder))
    write_classes(folder / "train", 150, seed=1)
    write_classes(folder / "test", 20, seed=2)
    _train(folder)
    own_files = Own(folder, "")
    with rehearsing():
        result = invoke(
            "fit", own_files.model, own_files.train, "--weights", own_files.weights, "-o", own_files.guard,
            *PREPARED, *QUICK,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    yield Own(folder, result.output)
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def rehearsed(own: Own, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A guard that rehearsed, and what the command said."""
    path = tmp_path_factory.mktemp("rehearsed") / "guard.safetensors"
    with rehearsing():
        result = invoke(
            "fit", own.model, own.train, "--weights", own.weights, "-o", path, "--rehearse", *PREPARED, *QUICK
        )
    assert result.exit_code == 0, result.output
    return path, result.output


@pytest.fixture(scope="session")
def robust(own: Own, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A guard that rounding hardly moves: channel means of this noise differ too little for the others."""
    path = tmp_path_factory.mktemp("guard") / "guard.safetensors"
    result = invoke(
        "fit", own.model, own.train, "--weights", own.weights, "-o", path, "--taps", "1,3", "--members",
        "gram,energy", *PREPARED, *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="session")
def graph(own: Own, robust: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same guard as an ONNX file that takes pixels."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("graph") / "guard.onnx"
    result = invoke("export", robust, "--model", own.model, "-o", path, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said == {"output": str(path), "pixels": True, "bytes": path.stat().st_size}
    return path


@dataclass(frozen=True)
class OfPage:
    """The folder in which the blocks of docs/cli.md were run, and what the commands said."""

    folder: Path
    said: str


@pytest.fixture(scope="session")
def of_page(tmp_path_factory: pytest.TempPathFactory) -> OfPage:
    page, folder, said = ROOT / "docs" / "cli.md", tmp_path_factory.mktemp("page"), ""
    with pytest.MonkeyPatch.context() as patch, rehearsing():
        patch.chdir(folder)
        exec(code_of(page, "python"), {"__name__": "__main__"})
        for line in code_of(page, "sh").splitlines():
            command, *words = shlex.split(line)
            assert command == "gramwatch"
            result = invoke(*words)
            assert result.exit_code == 0, result.output
            said += result.stderr
    return OfPage(folder, said)
