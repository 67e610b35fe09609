"""The Lightning callback, with the real package, on a small network."""

import csv
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import gramwatch
from gramwatch import CalibrationError, GramwatchWarning, InputError, MissingExtraError
from tests import oracle, small

lightning = pytest.importorskip("lightning", reason="lightning is not installed (the extra 'lightning')")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")
loggers = pytest.importorskip("lightning.pytorch.loggers")

from gramwatch.integrate.lightning import GuardCallback, _callback, _checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:::lightning")


class Module(lightning.LightningModule):
    """Its weights change a little in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small.made().train()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, number):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, number, dataloader_idx=0):
        self.log("epoch", float(self.current_epoch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4)


def loader(count: int, seed: int, scale: float = 1.0) -> DataLoader:
    images = small.images(count, seed, scale)
    return DataLoader(TensorDataset(images, small.made()(images).argmax(1)), batch_size=64)


def trained(folder: Path, callback: GuardCallback, validation=None, epochs: int = 2, **options):
    """A trainer after training, and its module."""
    options = {"logger": False, "enable_checkpointing": False} | options
    extra = options.pop("callbacks", [])
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[callback, *extra],
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = Module()
    trainer.fit(module, loader(300, 0), validation)
    return trainer, module


def test_a_guard_stands_beside_the_best_checkpoint_and_fits_it(tmp_path):
    callback = GuardCallback(level=0.9)
    best = callbacks.ModelCheckpoint(monitor="epoch", mode="min", filename="net-{epoch}-v0.5")
    log = loggers.CSVLogger(tmp_path)
    trainer, module = trained(
        tmp_path, callback, loader(300, 1), callbacks=[best], logger=log, enable_checkpointing=True
    )
    written = Path(best.best_model_path)
    assert written.name == "net-epoch=0-v0.5.ckpt"  # not the last epoch
    assert callback.path_ == written.with_name("net-epoch=0-v0.5.guard.safetensors")
    again = Module.load_from_checkpoint(written)
    guard = gramwatch.load(callback.path_, again)
    assert guard.level == 0.9
    assert guard.metadata == {"checkpoint": written.name}
    images = torch.cat([small.images(20, 4), small.images(20, 5, 4.0)])
    assert torch.equal(guard(images).p_value, callback.guard_(images).p_value)
    assert callback.guard_(images).is_ood[20:].double().mean() > 0.5
    with pytest.raises(gramwatch.ArtifactError, match="other weights"):
        gramwatch.load(callback.path_, module)  # it has the weights of the last epoch
    assert module.training  # it was left as it was

    with (Path(log.log_dir) / "metrics.csv").open(newline="") as file:
        logged = [row for row in csv.DictReader(file) if row["guard/flagged"]]
    assert len(logged) == 1
    assert float(logged[0]["guard/flagged"]) == pytest.approx(callback.metrics_["guard/flagged"])
    assert float(logged[0]["guard/score"]) == pytest.approx(callback.metrics_["guard/score"])
    assert int(logged[0]["step"]) == trainer.global_step


def test_the_figures_are_of_the_half_that_did_not_calibrate(tmp_path):
    callback = GuardCallback(seed=3, network="net")
    _, module = trained(tmp_path, callback, loader(301, 1))
    guard = callback.guard_
    assert guard.model is module.net
    assert callback.path_ == tmp_path / "guard.safetensors"
    assert guard.calibration().how["examples"] == 150
    assert guard.calibration().how["seed"] == 3
    detection = guard(small.images(301, 1)[oracle.drawn(301, 3)[150:]])
    assert callback.metrics_["guard/flagged"] == pytest.approx(detection.is_ood.double().mean().item())
    assert callback.metrics_["guard/score"] == pytest.approx(detection.score.mean().item())
    assert callback.metrics_["guard/flagged"] < 0.2


def test_other_loaders_can_be_given(tmp_path):
    callback = GuardCallback(
        train=loader(200, 7), calibration=loader(100, 8), path=tmp_path / "g.safetensors", network="net"
    )
    trained(tmp_path, callback, loader(100, 9, 6.0))
    assert int(callback.guard_.members["gram"].class_counts_.sum()) == 200
    assert callback.guard_.calibration().how["examples"] == 100
    assert callback.metrics_["guard/flagged"] > 0.5  # the validation data are unlike the others
    assert (tmp_path / "g.safetensors").is_file()


def test_without_validation_data_nothing_is_logged(tmp_path):
    callback = GuardCallback(calibration=loader(100, 8))
    trained(tmp_path, callback)
    assert callback.metrics_ == {}
    assert (tmp_path / "guard.safetensors").is_file()


@pytest.mark.parametrize(
    ("validation", "error", "words"),
    [
        (None, InputError, r"no loader.*calibration="),
        ([loader(40, 1), loader(40, 2)], InputError, r"several loaders.*calibration="),
        (loader(60, 1), CalibrationError, "30 calibration examples cannot support level 0.95"),
    ],
)
def test_what_is_missing_is_said_in_words(tmp_path, validation, error, words):
    with pytest.raises(error, match=words):
        trained(tmp_path, GuardCallback(), validation, epochs=1)


def test_wrong_arguments_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="no member 'magic'"):
        trained(tmp_path, GuardCallback(members=("magic",)))
    with pytest.raises(AttributeError, match="body"):
        trained(tmp_path, GuardCallback(network="body"))


def test_several_processes_are_refused():
    class Trainer:
        world_size = 2

    with pytest.raises(InputError, match="one process, and the trainer has 2"):
        GuardCallback().setup(Trainer(), Module(), "fit")
    GuardCallback().setup(Trainer(), Module(), "test")


def test_a_dry_run_does_nothing(tmp_path):
    callback = GuardCallback()
    with pytest.warns(GramwatchWarning, match="fast_dev_run"):
        trained(tmp_path, callback, loader(100, 1), fast_dev_run=True)
    assert callback.guard_ is None


def test_a_checkpoint_elsewhere_is_said(tmp_path):
    class Trainer:
        class checkpoint_callback:  # noqa: N801
            best_model_path = "s3://bucket/net.ckpt"

    with pytest.warns(GramwatchWarning, match=r"net\.ckpt is not a file here"):
        assert _checkpoint(Trainer()) is None


def test_without_the_extra_an_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)  # importing it is an error now
    with pytest.raises(MissingExtraError, match=r"gramwatch\[lightning\]"):
        _callback()
