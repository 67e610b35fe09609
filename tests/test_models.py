"""Networks by their names."""

import pytest
import torch
from safetensors.torch import save_file

from gramwatch import ArtifactError, InputError
from gramwatch.models import Origin, resolve, runs_code
from gramwatch.networks.foreign import import_torchvision


def made(name: str, classes: int) -> torch.nn.Module:
    import_torchvision()
    import timm

    torch.manual_seed(0)
    return timm.create_model(name, num_classes=classes)


@pytest.mark.parametrize("under", [None, "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_checkpoints_of_all_usual_forms(tmp_path, under, prefix):
    network = made("resnet10t", 3)
    state = {f"{prefix}{name}": value for name, value in network.state_dict().items()}
    torch.save({under: state, "epoch": 3} if under else state, tmp_path / "net.pth")
    found = resolve("timm:resnet10t", tmp_path / "net.pth")
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(found.network(x), network.eval()(x))
    assert not found.network.training


def test_a_transformer_is_built_for_the_size(tmp_path):
    import timm

    network = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32)
    save_file(network.state_dict(), tmp_path / "net.safetensors")
    found = resolve("timm:vit_tiny_patch16_224", tmp_path / "net.safetensors", size=32)
    assert found.preprocessing.size == (32, 32)
    assert found.network(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    with pytest.raises(ArtifactError, match="pos_embed"):
        resolve("timm:vit_tiny_patch16_224", tmp_path / "net.safetensors")


def test_a_folder_of_hugging_face(tmp_path):
    import_torchvision()
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32,
        patch_size=8, id2label={0: "cat", 1: "dog", 2: "owl"},
    )  # fmt: skip
    network = transformers.ViTForImageClassification(config).eval()
    network.save_pretrained(tmp_path)
    without = resolve(f"hf:{tmp_path}")
    assert (without.preprocessing, without.classes) == (None, ("cat", "dog", "owl"))
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32}, resample=3)
    processor.save_pretrained(tmp_path)
    found = resolve(f"hf:{tmp_path}")
    assert (found.preprocessing.size, found.preprocessing.resize) == ((32, 32), "bicubic")
    assert found.preprocessing.mean == (0.5, 0.5, 0.5)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(found.network(x).logits, network(x).logits)
    other = transformers.ViTForImageClassification(config).eval()
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    assert torch.equal(
        resolve(f"hf:{tmp_path}", tmp_path / "other.safetensors").network(x).logits, other(x).logits
    )


def test_weights_are_given_or_published_not_both(tmp_path):
    with pytest.raises(InputError, match="not both"):
        resolve("timm:resnet10t", tmp_path / "net.pth", pretrained=True)
    with pytest.raises(InputError, match="belong to timm:NAME"):
        resolve("hf:folder", pretrained=True)
    with pytest.raises(InputError, match="has no weights: give --weights FILE, or --pretrained"):
        resolve("timm:resnet10t")


def test_a_function_that_needs_another_module_says_so(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needy_nets.py").write_text("import no_such_module\n")
    with pytest.raises(InputError, match="'needy_nets' needs the module no_such_module"):
        resolve("needy_nets:build")


def test_only_functions_run_code():
    assert runs_code("package.module:function")
    assert not any(map(runs_code, ("timm:resnet18", "torchvision:resnet18", "hf:folder", "resnet20")))


def test_what_a_guard_says_of_its_network_is_checked():
    origin = Origin("timm:resnet18", "net.safetensors", False, 32)
    assert Origin.of({"model": origin.to_json()}) == origin
    assert Origin.of({"model": "timm:resnet18"}) is Origin.of({}) is None
    assert Origin.of({"model": {"name": "x", "weights": 7, "size": "32"}}) == Origin("x")
