"""A callback for Lightning: at the end of training it fits, calibrates and saves a guard, and logs.

Lightning is imported with this module, and by no other: `import gramwatch` does not need it.
"""

import copy
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from gramwatch.detect.calibrating import calibrate
from gramwatch.detect.distributed import together
from gramwatch.detect.measurement import Measurement
from gramwatch.detect.split import KeptInputs, halves
from gramwatch.errors import InputError, MissingExtraError, warn
from gramwatch.guard.guard import Guard
from gramwatch.inputs.foreign import import_torchvision
from gramwatch.inputs.networks import restore

NAME = "guard.safetensors"
"""The end of the name of the guard's file."""


def _callback() -> Any:
    with suppress(ModuleNotFoundError):
        import_torchvision()  # lightning imports it, too, if it is installed
    try:
        return import_module("lightning.pytorch").Callback
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"gramwatch.integrate.lightning needs the package {error.name}: "
            "install it with pip install 'gramwatch[lightning]'"
        ) from None


Callback: Any = _callback()


class GuardCallback(Callback):  # type: ignore[misc]
    """Fits and calibrates a guard after training, saves it beside the checkpoint, and logs two figures.

    The guard belongs to the best checkpoint of the trainer: its weights are read into a copy of the module.
    The file `NAME.guard.safetensors` stands beside `NAME.ckpt`. Without a checkpoint the guard belongs to the
    last weights, and `guard.safetensors` is written to the trainer's `default_root_dir`.

    Two figures go to the trainer's loggers, of validation examples that did not calibrate: `guard/flagged`,
    the share of flagged examples, and `guard/score`, the mean of the scores that are finite. `metrics_` holds
    them, too.

    Example:
        >>> callback = GuardCallback(level=0.99)
        >>> trainer = lightning.Trainer(max_epochs=10, callbacks=[callback])
        >>> trainer.fit(module, train_loader, validation_loader)
        >>> callback.guard_(images).is_ood

    Args:
        train: the training data for the guard. By default the loader of the trainer. Without augmentation
            is better: the guard then learns what images look like in use.
        calibration: held-out data to calibrate on. By default one random half of the validation data. The
            other half is judged.
        network: the name of the submodule that is the classifier, such as `"model"`. By default the whole
            module: its `forward` returns logits.
        path: the file for the guard, instead of one beside the checkpoint.
        seed: the seed of the random halves.
        options: the other arguments of `Guard`.

    Attributes:
        guard_: the guard, after training.
        metrics_: what was logged.
        path_: the file of the guard.

    """

    def __init__(
        self,
        *,
        train: Iterable[Any] | None = None,
        calibration: Iterable[Any] | None = None,
        network: str = "",
        path: str | PathLike[str] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.train, self.calibration = train, calibration
        self.network, self.path, self.seed = network, path, seed
        self.options = options
        self.guard_: Guard | None = None
        self.metrics_: dict[str, float] = {}
        self.path_: Path | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse, before training, settings that cannot work after it."""
        if stage != "fit":
            return
        if trainer.world_size > 1:
            raise InputError(
                f"GuardCallback works in one process, and the trainer has {trainer.world_size}: fit the "
                "guard afterwards, from the checkpoint"
            )
        Guard(pl_module.get_submodule(self.network), **self.options)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit, calibrate, save, log."""
        if trainer.fast_dev_run:
            warn("GuardCallback does nothing in a fast_dev_run")
            return
        checkpoint = _checkpoint(trainer)
        network = _network(pl_module, checkpoint, self.network)
        train = _only_loader(trainer.train_dataloader, "train") if self.train is None else self.train
        guard = Guard(network, **self.options).fit(train)
        self.metrics_ = self._calibrated(guard, trainer.val_dataloaders)
        if checkpoint is not None:
            guard.metadata["checkpoint"] = checkpoint.name
        self.path_ = self._place(trainer, checkpoint)
        guard.save(self.path_)
        self.guard_ = guard
        for logger in trainer.loggers if self.metrics_ else ():
            logger.log_metrics(self.metrics_, step=trainer.global_step)

    def _calibrated(self, guard: Guard, validation: Any) -> dict[str, float]:
        """Calibrate the guard. Return the figures of the validation examples that did not calibrate."""
        if self.calibration is None:
            sample = KeptInputs(self.seed)
            with together(guard.model, "calibrate") as group:
                measured = guard.measure_all(_only_loader(validation, "calibration"), kept=sample)
                calibrating, judged = halves(len(measured), self.seed)
                calibrate(guard, group, measured, sample, calibrating)
            return _figures(guard, measured[judged])
        guard.calibrate(self.calibration, seed=self.seed)
        return (
            _figures(guard, guard.measure_all(_only_loader(validation, "calibration"))) if validation else {}
        )

    def _place(self, trainer: Any, checkpoint: Path | None) -> Path:
        if self.path is not None:
            return Path(self.path)
        if checkpoint is not None:
            return checkpoint.with_suffix(f".{NAME}")
        return Path(trainer.default_root_dir) / NAME


def _figures(guard: Guard, measured: Measurement) -> dict[str, float]:
    verdict = guard.calibration().judged(measured)
    finite = verdict.score[verdict.score.isfinite()]
    return {"guard/flagged": float(verdict.is_ood.double().mean()), "guard/score": float(finite.mean())}


def _checkpoint(trainer: Any) -> Path | None:
    """The best checkpoint of the trainer, if there is one."""
    written = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not written:
        return None
    if not Path(written).is_file():
        warn(f"the checkpoint {written} is not a file here: the guard belongs to the last weights")
        return None
    return Path(written)


def _network(module: Any, checkpoint: Path | None, name: str) -> nn.Module:
    """The classifier with the weights of the checkpoint, in a copy; without one, as it is."""
    if checkpoint is not None:
        module = copy.deepcopy(module)
        restore(module, checkpoint, type(module).__name__)
    network: nn.Module = module.get_submodule(name)
    return network


def _only_loader(loader: Any, argument: str) -> Iterable[Any]:
    """The loader of a trainer, if it has exactly one."""
    if isinstance(loader, list | tuple) and len(loader) == 1:
        (loader,) = loader
    if loader is None or isinstance(loader, list | tuple | dict):
        raise InputError(
            f"the trainer has {'no loader' if not loader else 'several loaders'} for this: give GuardCallback"
            f"({argument}=...)"
        )
    single: Iterable[Any] = loader
    return single
