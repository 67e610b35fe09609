"""docs/limits.md: what the page says of networks and of memory is so."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gramwatch
from gramwatch import GramDetector, GramwatchWarning, Guard, TapError

PAGE = (Path(__file__).parents[1] / "docs" / "limits.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 20 training:gramwatch.GramwatchWarning")


def bounds_in_bytes() -> Callable[..., int]:
    """The function on the page."""
    (code,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    names = {"gramwatch": gramwatch}
    exec(code, names)
    return names["bounds_in_bytes"]  # type: ignore[return-value]


def small(classes: int = 4) -> nn.Module:
    """Two maps, one vector."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(),
        nn.Linear(6, classes),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("orders", [range(1, 11), [1], [1, 2, 3]])
def test_the_memory_of_bounds_is_known_beforehand(orders: list[int], tmp_path: Path) -> None:
    model, images = small(), torch.rand(64, 3, 8, 8)
    detector = GramDetector(model, orders=orders).fit([images], progress=False)
    from safetensors import safe_open

    detector.save(tmp_path / "d.safetensors")
    with safe_open(tmp_path / "d.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.startswith("bounds.")]  # noqa: SIM118
        kept = sum(file.get_tensor(name).nbytes for name in names)
    assert bounds_in_bytes()(model, images, 4, len(orders)) == kept


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small()[:6]
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        return self.one(features) + self.other(features)


def test_members_that_need_one_linear_head_are_left_out() -> None:
    images = [torch.rand(64, 3, 8, 8)]
    guard = Guard(TwoHeads().eval(), members=("gram", "fdbd", "energy"))
    with pytest.warns(GramwatchWarning, match="fdbd is left out"):
        guard.fit(images, progress=False)
    assert list(guard.members) == ["gram", "energy"]
    usual = Guard(TwoHeads().eval())
    with pytest.warns(GramwatchWarning, match="mahalanobis_pp, knn are left out"):
        usual.fit(images, progress=False)
    assert list(usual.members) == ["gram", "profile", "class_ratio", "energy", "image"]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Conv2d(3, 3, 1), small()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x)) if x.mean() > 0.5 else self.rest(x)


def test_an_input_that_takes_another_path_is_refused() -> None:
    guard = Guard(Branching().eval())
    guard.fit([torch.rand(64, 3, 8, 8) / 2], progress=False)
    with pytest.raises(TapError):
        guard.measure(torch.rand(4, 3, 8, 8) / 2 + 0.5)


def test_traced_networks_are_refused() -> None:
    model, images = small(), torch.rand(64, 3, 8, 8)
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        traced = torch.jit.trace(model, images[:2])
    with pytest.raises(TapError, match=r"pass the nn\.Module it was made from"):
        Guard(traced).fit([images], progress=False)


def test_weights_that_change_are_noticed_when_loading_only(tmp_path: Path) -> None:
    model, images = small(), torch.rand(64, 3, 8, 8)
    guard = GramDetector(model).fit([images], progress=False)
    guard.save(tmp_path / "g.safetensors")
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert guard.measure(images).deviations.sum() > 0
    with pytest.raises(gramwatch.ArtifactError, match="other weights"):
        gramwatch.load(tmp_path / "g.safetensors", model)


def test_inputs_of_another_size_give_one_warning() -> None:
    guard = Guard(small()).fit([torch.rand(64, 3, 8, 8)], progress=False)
    with pytest.warns(GramwatchWarning, match="another size"):
        guard.measure(torch.rand(4, 3, 9, 9))
    guard.measure(torch.rand(4, 3, 9, 9))  # no other: it would be an error here
