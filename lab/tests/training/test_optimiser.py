"""Training by AdamW: its steps, and its state in files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gramwatch import TrainingError
from gramwatch.files import artifact
from gramwatch_lab import training
from gramwatch_lab.training import checkpoint


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )


def noise() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8, generator=generator)


def learnt(net: nn.Module, path: Path | None = None, **options: Any) -> training.History:
    settings: dict[str, Any] = {
        "mean": (0.5,) * 3,
        "std": (0.25,) * 3,
        "epochs": 4,
        "batch_size": 8,
        "optimiser": "adamw",
        "augment": "crops",
        "learning_rate": 0.01,
        "progress": False,
        **options,
    }
    objective = settings.pop("objective", training.CrossEntropy(mixup=0.2))
    return training.train(net, noise(), torch.arange(24) % 3, objective, checkpoint=path, **settings)


def test_a_step_of_adamw_is_pytorchs_with_clipped_gradients_and_decays_matrices_only() -> None:
    net, other = small(), small()
    plain = training.CrossEntropy()
    learnt(net, epochs=1, batch_size=24, warmup=0.0, weight_decay=0.5, augment=False, objective=plain)
    other.train()
    nn.functional.cross_entropy(other((noise() / 255 - 0.5) / 0.25), torch.arange(24) % 3).backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    matrices, rest = ([p for p in other.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, 0.01).step()
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_an_interrupted_training_by_adamw_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parted = small(), small()
    learnt(whole)
    epoch = training.loop._Run.epoch

    def stops(self: Any, number: int, progress: bool) -> Any:
        if number == 4:
            raise KeyboardInterrupt
        return epoch(self, number, progress)

    monkeypatch.setattr(training.loop._Run, "epoch", stops)
    path = tmp_path / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        learnt(parted, path, save_every=2)
    header, tensors = checkpoint.read(path)
    assert header["epoch"] == 2  # the third is lost: the file was written after the second
    assert {key.partition("/")[0] for key in tensors if "/" in key} == {"average", "square", "step"}
    monkeypatch.setattr(training.loop._Run, "epoch", epoch)
    resumed = small()
    learnt(resumed, path)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    assert not any("/" in key for key in checkpoint.read(path)[1])


def test_a_file_begun_before_there_was_a_choice_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    plain = training.CrossEntropy()
    learnt(small(), path, optimiser="sgd", objective=plain)
    header, tensors = checkpoint.read(path)
    del header["plan"]["optimiser"], header["tensors"]
    header["plan"]["settings"] = header["settings"] = {}
    artifact.write(path, header, tensors)
    assert len(learnt(small(), path, optimiser="sgd", objective=plain).epochs) == 4
    with pytest.raises(TrainingError, match="optimiser was sgd, is adamw"):
        learnt(small(), path, objective=plain)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"optimiser": "adam"}, "sgd, adamw"),
        ({"augment": "crop"}, "'crops'"),
        ({"save_every": 0}, "at least 1"),
        ({"class_names": ["one"]}, "1 classes are named, the network has 3"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(TrainingError, match=told):
        learnt(small(), **wrong)
