"""Networks by their names."""

import io
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from gramwatch import ArtifactError, InputError
from gramwatch.inputs.foreign import import_torchvision
from gramwatch.inputs.models import Origin, resolve, runs_code


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
    result = resolve("timm:resnet10t", tmp_path / "net.pth")
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(result.network(x), network.eval()(x))
    assert not result.network.training


def test_a_transformer_is_built_for_the_size(tmp_path):
    import timm

    network = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32)
    save_file(network.state_dict(), tmp_path / "net.safetensors")
    result = resolve("timm:vit_tiny_patch16_224", tmp_path / "net.safetensors", size=32)
    assert result.preprocessing.size == (32, 32)
    assert result.network(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
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
    result = resolve(f"hf:{tmp_path}")
    assert (result.preprocessing.size, result.preprocessing.resize) == ((32, 32), "bicubic")
    assert result.preprocessing.mean == (0.5, 0.5, 0.5)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(result.network(x).logits, network(x).logits)
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


REMOTE = """
import pathlib
from transformers import PretrainedConfig, PreTrainedModel
from torch import nn

pathlib.Path({marker!r}).touch()


class OwnConfig(PretrainedConfig):
    model_type = "own"


class OwnNet(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(12, 2)
        self.post_init()

    def forward(self, pixel_values):
        return self.linear(pixel_values.flatten(1))
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A folder of Hugging Face whose network is in a Python file. The file leaves a mark where it runs."""
    import_torchvision()
    pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tmp_path / "net", tmp_path / "ran"
    folder.mkdir()
    (folder / "own.py").write_text(REMOTE.format(marker=str(marker)))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForImageClassification": "own.OwnNet"}
    config = {"model_type": "own", "architectures": ["OwnNet"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    state = {"linear.weight": torch.randn(2, 12, generator=generator), "linear.bias": torch.zeros(2)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, marker


@pytest.mark.parametrize("answer", ["y\n", ""])
def test_no_code_of_a_folder_runs_whatever_stands_on_standard_input(own_code, answer, monkeypatch):
    folder, marker = own_code
    monkeypatch.setattr("sys.stdin", io.StringIO(answer * 5))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever would answer
    with pytest.raises(InputError, match=r"comes with Python code. If you trust that code, name hf\+code:"):
        resolve(f"hf:{folder}")
    assert not marker.exists()
    assert sys.stdin.read() == answer * 5


def test_code_of_a_folder_runs_if_a_person_names_it(own_code):
    folder, marker = own_code
    result = resolve(f"hf+code:{folder}")
    assert marker.exists()
    assert result.name == f"hf+code:{folder}"
    assert result.network(torch.zeros(1, 3, 2, 2)).shape == (1, 2)


def test_attention_from_a_hub_is_code_too(tmp_path):
    import_torchvision()
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"attn_implementation": "someone/attention"}))
    with pytest.raises(InputError, match="names the code someone/attention"):
        resolve(f"hf:{tmp_path}")


def test_libraries_have_no_standard_input_while_a_network_loads(tmp_path):
    (tmp_path / "asking_nets.py").write_text(
        "import subprocess, sys\nfrom torch import nn\n"
        "def build():\n"
        "    assert sys.stdin.read() == ''\n"
        "    assert subprocess.run(['cat'], capture_output=True).stdout == b''\n"
        "    return nn.Linear(2, 2)\n"
    )
    command = (
        "import sys; from gramwatch.inputs.models import resolve; resolve('asking_nets:build'); "
        "print(sys.stdin.read())"
    )
    result = subprocess.run(
        [sys.executable, "-c", command], input="y\nphoto.jpg\n", capture_output=True, text=True, cwd=tmp_path
    )
    assert result.stdout == "y\nphoto.jpg\n\n", result.stderr


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("timm:resnet18", False),
        ("torchvision:resnet18", False),
        ("hf:org/net", False),
        ("resnet20", False),
        ("hf+code:org/net", True),
        ("timm:hf-hub:org/net", True),
        ("timm:local-dir:/folder", True),
        ("os:system", True),
        ("HF:org/net", True),
    ],
)
def test_what_may_be_code_must_be_named_by_a_person(name, code):
    assert runs_code(name) is code
