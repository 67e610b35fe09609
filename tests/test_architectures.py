"""A guard on one of each kind of architecture: fitted, calibrated, asked, saved and loaded.

Weights are random and inputs are noise, at the smallest size that an architecture takes. So the tests do not
say how well outliers are told. They say that every kind of network can be guarded, and is left as it was.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import gramwatch
from gramwatch import Guard
from gramwatch.guard.guard import MEMBERS
from gramwatch.inputs.batches import mapped
from tests.shallow import shallow

CLASSES = 4
WORDS = 40
EVERY_ORDER = range(1, 11)


@dataclass(frozen=True)
class Case:
    """A network, its inputs, and what is to be expected of a guard."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    members: tuple[str, ...] = MEMBERS
    """The members of a default guard. `image` is none of them if no input is an image."""
    orders: Any = (1, 2)
    says: str = ""
    """A warning that the fit gives."""
    taps: int | None = None
    """How many taps Gram has, where that is known beforehand."""


def images(pixels: int, channels: int = 3) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, channels, pixels, pixels)


def vectors(width: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, width)


def tokens(n: int, length: int = 6) -> Tensor:
    return torch.randint(2, WORDS, (n, length))


def text(n: int) -> dict[str, Tensor]:
    words = tokens(n)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


# --- networks of our own -----------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Words, a recurrent layer, and a linear layer on the mean or the last state."""

    def __init__(self, kind: type[nn.RNNBase], *, last: bool = False, packed: bool = False, **options: Any):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = kind(8, 12, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") and not last else 12, CLASSES)
        self.last, self.packed, self.first = last, packed, options.get("batch_first", False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x if self.first else x.T)
        if self.packed:
            lengths = torch.full((x.shape[0],), x.shape[1])
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        steps, state = self.layer(x)
        state = state[0] if isinstance(state, tuple) else state
        return self.head(state[-1] if self.last else steps.mean(1 if self.first else 0))


class Cbam(nn.Module):
    """Convolutions, each followed by attention over channels and over places (Woo et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, stride=2)])
        self.channels = nn.ModuleList([nn.Linear(8, 8), nn.Linear(12, 12)])
        self.places = nn.ModuleList([nn.Conv2d(2, 1, 7, padding=3) for _ in self.convs])
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for conv, channels, places in zip(self.convs, self.channels, self.places, strict=True):
            x = conv(x).relu()
            x = x * torch.sigmoid(channels(x.mean((2, 3))))[:, :, None, None]
            x = x * torch.sigmoid(places(torch.stack([x.mean(1), x.amax(1)], 1)))
        return self.head(x.mean((2, 3)))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.table = nn.Conv2d(3, 6, 3), nn.Linear(5, 6)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        seen = self.image(image).relu().mean((2, 3))
        return self.head(torch.cat([seen, self.table(table).relu()], 1))


class Wrapped(nn.Module):
    """A network whose logits lie in what it returns."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.head, self.wrap = nn.Conv2d(3, 6, 3), nn.Linear(6, CLASSES), wrap

    def forward(self, x: Tensor) -> Any:
        hidden = self.conv(x).relu()
        return self.wrap(self.head(hidden.mean((2, 3))), hidden)


def audio() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 6, 9, stride=4),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Conv1d(6, 8, 9, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, CLASSES)
    )


NO_TAP = r"gram, profile, class_ratio are left out of the guard: {} has no tap"
NO_HEAD = r"mahalanobis_pp, knn are left out of the guard: the logits of \w+ are not made by one linear layer"
HEADLESS = tuple(name for name in MEMBERS if name not in ("mahalanobis_pp", "knn"))
ONE_CHANNEL = r"taps='ends' leaves out 3 stage\(s\) of ResNet, in which every tensor has one channel only"
FIRST = {"batch_first": True}
OWN = {
    "LSTM": Case(lambda: Recurrent(nn.LSTM, **FIRST), tokens, taps=1, orders=EVERY_ORDER),
    "LSTM, its state": Case(lambda: Recurrent(nn.LSTM, last=True, num_layers=2, **FIRST), tokens, taps=1),
    "GRU, both ways": Case(lambda: Recurrent(nn.GRU, bidirectional=True, **FIRST), tokens, taps=1),
    "RNN, time first": Case(lambda: Recurrent(nn.RNN), tokens, taps=1),
    "RNN, rectified": Case(lambda: Recurrent(nn.RNN, nonlinearity="relu"), tokens, taps=1),
    "packed LSTM": Case(
        lambda: Recurrent(nn.LSTM, last=True, packed=True, **FIRST),
        tokens,
        members=("energy", "mahalanobis_pp", "knn"),
        says=NO_TAP.format("Recurrent") + ".*packed sequence.*gramwatch.mark",
    ),
    "logistic regression": Case(
        lambda: nn.Linear(9, CLASSES),
        vectors(9),
        members=("energy", "mahalanobis_pp", "knn"),
        says=NO_TAP.format("Linear"),
    ),
    "audio": Case(audio, lambda n: torch.randn(n, 1, 128), taps=4, orders=EVERY_ORDER),
    "table": Case(mlp, vectors(9), taps=4, orders=EVERY_ORDER),
    "CBAM": Case(Cbam, images(16), taps=12, orders=EVERY_ORDER),
    "two inputs": Case(TwoInputs, lambda n: (images(8)(n), torch.randn(n, 5)), taps=4),
    "two named inputs": Case(
        TwoInputs, lambda n: {"image": images(8)(n), "table": torch.randn(n, 5)}, taps=4
    ),
    "dictionary": Case(lambda: Wrapped(lambda z, h: {"hidden": h, "logits": z}), images(8), taps=2),
    "object": Case(lambda: Wrapped(lambda z, h: SimpleNamespace(logits=z, h=h)), images(8), taps=2),
    "tuple": Case(lambda: Wrapped(lambda z, h: (z, h)), images(8), taps=2),
}

# --- timm and torchvision ----------------------------------------------------------------------------

TIMM = """
    resnet10t:32 seresnet18:32 ecaresnet26t:32 skresnet18:32 densenet121:32
    efficientnet_lite0:32 mobilenetv3_small_050:32 regnetx_002:32 ghostnet_050:32
    convnext_atto:32 convnextv2_atto:32 test_nfnet:32 vit_tiny_patch16_224:32i test_vit3:32i
    deit_tiny_distilled_patch16_224:32i mixer_s32_224:32i resmlp_12_224:32i levit_128s:64i pvt_v2_b0:32
    poolformer_s12:32 edgenext_xx_small:32 mobilevit_xxs:32 xcit_nano_12_p8_224:32i
""".split()


def from_timm(pair: str) -> Case:
    name, _, size = pair.partition(":")
    pixels = int(size.rstrip("i"))
    options = {"img_size": pixels} if size.endswith("i") else {}

    def build() -> nn.Module:
        return shallow(name, num_classes=CLASSES, **options)

    if "distilled" in name or name.startswith("levit"):  # the mean of two heads
        return Case(build, images(pixels), members=HEADLESS, says=NO_HEAD)
    return Case(build, images(pixels), says=ONE_CHANNEL if name.startswith("eca") else "")


def from_torchvision(make: Callable[[Any], nn.Module], **expected: Any) -> Case:
    """A network of torchvision. Two blocks of each kind are enough."""
    return Case(lambda: make(pytest.importorskip("torchvision").models), images(32), **expected)


TORCHVISION = {
    "resnet": from_torchvision(lambda of: of.ResNet(of.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)),
    "mobilenet_v2": from_torchvision(
        lambda of: of.MobileNetV2(
            CLASSES, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2], [6, 48, 1, 2]]
        )
    ),
    "shufflenet_v2": from_torchvision(
        lambda of: of.ShuffleNetV2([2, 2, 2], [24, 32, 48, 96, 128], num_classes=CLASSES)
    ),
    # Its last layer is a convolution.
    "squeezenet1_1": from_torchvision(
        lambda of: of.squeezenet1_1(weights=None, num_classes=CLASSES), members=HEADLESS, says=NO_HEAD
    ),
    "regnet_y": from_torchvision(
        lambda of: of.RegNet(
            of.regnet.BlockParams([1, 2, 2], [16, 32, 48], [8, 8, 8], [1.0] * 3, [2] * 3, se_ratio=0.25),
            num_classes=CLASSES,
        )
    ),
    "swin": from_torchvision(
        lambda of: of.SwinTransformer(
            [4, 4],
            embed_dim=24,
            depths=[2, 2, 2],
            num_heads=[2, 4, 8],
            window_size=[7, 7],
            num_classes=CLASSES,
        )
    ),
}

# --- Hugging Face ------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": CLASSES,
}
OF_WORDS = {**SMALL, "vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}


def from_transformers(
    family: str,
    kind: str,
    inputs: Callable[[int], Any],
    taps: int | None = None,
    head: bool = True,
    **options: Any,
) -> Case:
    """A small network of a family; only that family's modules are imported."""

    def build() -> nn.Module:
        pytest.importorskip("transformers")
        home = f"transformers.models.{family}"
        configuration = getattr(importlib.import_module(f"{home}.configuration_{family}"), f"{kind}Config")
        modelling = importlib.import_module(f"{home}.modeling_{family}")
        task = next(
            name
            for name in (f"{kind}ForSequenceClassification", f"{kind}ForImageClassification")
            if hasattr(modelling, name)
        )
        network: nn.Module = getattr(modelling, task)(configuration(**options))
        return network

    if not head:  # the logits of one token are chosen among those of all
        return Case(build, inputs, members=HEADLESS, says=NO_HEAD, taps=taps)
    return Case(build, inputs, taps=taps)


TRANSFORMERS = {
    "BERT": from_transformers("bert", "Bert", text, **OF_WORDS),
    "DistilBERT": from_transformers(
        "distilbert",
        "DistilBert",
        text,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=24,
        vocab_size=WORDS,
        num_labels=CLASSES,
    ),
    "RoBERTa": from_transformers("roberta", "Roberta", text, **{**OF_WORDS, "pad_token_id": 1}, **NO_ENDS),
    "ELECTRA": from_transformers("electra", "Electra", text, embedding_size=8, **OF_WORDS),
    "ALBERT": from_transformers("albert", "Albert", text, embedding_size=8, **OF_WORDS, **NO_ENDS),
    "GPT-2": from_transformers(
        "gpt2",
        "GPT2",
        text,
        taps=2 * 5 + 1,
        head=False,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        vocab_size=WORDS,
        num_labels=CLASSES,
        pad_token_id=0,
        **NO_ENDS,
    ),
    "Llama": from_transformers("llama", "Llama", text, head=False, **OF_WORDS, **NO_ENDS),
    "ViT": from_transformers(
        "vit", "ViT", lambda n: {"pixel_values": images(16)(n)}, image_size=16, patch_size=8, **SMALL
    ),
    "ResNet": from_transformers(
        "resnet",
        "ResNet",
        lambda n: {"pixel_values": images(32)(n)},
        embedding_size=8,
        hidden_sizes=[8, 12],
        depths=[1, 1],
        layer_type="basic",
        num_labels=CLASSES,
    ),
    "wav2vec 2": from_transformers(
        "wav2vec2",
        "Wav2Vec2",
        lambda n: {"input_values": torch.randn(n, 400)},
        conv_dim=(8, 8),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        vocab_size=WORDS,
        **SMALL,
    ),
}

CASES: dict[str, Case] = {
    **OWN,
    **{f"timm {pair}": from_timm(pair) for pair in TIMM},
    **{f"torchvision {name}": case for name, case in TORCHVISION.items()},
    **{f"transformers {name}": case for name, case in TRANSFORMERS.items()},
}


# --- the test ----------------------------------------------------------------------------------------


def split(inputs: Any, size: int) -> Iterator[Any]:
    """The batches of one input, as a loader yields them."""
    total = gramwatch.inputs.batches.count_examples(inputs)
    for start in range(0, total, size):
        batch = mapped(inputs, lambda t, start=start: t[start : start + size])
        yield (batch,) if isinstance(batch, tuple) else batch


@torch.no_grad()
def liven(model: nn.Module, inputs: Any) -> None:
    """As if trained: statistics that let differing inputs differ, and logits that favour no class."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    heads: list[nn.Module] = []
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    handles = [
        module.register_forward_hook(lambda module, *_: heads.append(module))
        for module in model.modules()
        if isinstance(module, kinds) and len(module.weight) == CLASSES
    ]
    gramwatch.watch.call(model.train(), inputs)
    for handle in handles:
        handle.remove()
    head = heads[-1]
    if not head.weight.any():  # as timm begins some heads
        nn.init.normal_(head.weight)
    logits = gramwatch.watch.Network(model).logits_of(gramwatch.watch.call(model.eval(), inputs))
    head.weight /= logits.std()
    if head.bias is not None:
        head.bias.copy_((head.bias - logits.mean(0)) / logits.std())


def hooks(model: nn.Module) -> list[int]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [len(getattr(module, name)) for module in model.modules() for name in names]


def layers_called(model: nn.Module, inputs: Any) -> int:
    """How many calls of linear layers and convolutions one pass makes, as hooks count them."""
    calls: list[nn.Module] = []
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    handles = [
        module.register_forward_hook(lambda module, *_: calls.append(module))
        for module in model.modules()
        if isinstance(module, kinds)
    ]
    with torch.no_grad():
        gramwatch.watch.call(model, inputs)
    for handle in handles:
        handle.remove()
    return len(calls)


@pytest.mark.filterwarnings(
    "ignore:.*classes were predicted for fewer than",
    "ignore:.*taps never deviate on the calibration data",
    "ignore:.*are judged by row sums",
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:the scores of the same inputs differ")  # nobody trained these networks
def test_a_guard(name, tmp_path):
    case = CASES[name]
    model = case.build()
    liven(model, case.inputs(32))
    model.train()
    for child in list(model.children())[:1]:
        child.eval()  # a mode of its own
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes, hooked = [module.training for module in model.modules()], hooks(model)

    guard = Guard(model, taps="all", orders=case.orders, level=0.9)
    if case.says:
        with pytest.warns(gramwatch.GramwatchWarning, match=case.says):
            guard.fit(split(case.inputs(64), 32), progress=False)
    else:
        guard.fit(split(case.inputs(64), 32), progress=False)
    guard.calibrate(split(case.inputs(48), 48), progress=False)
    fresh = case.inputs(40)
    detection = guard(fresh)

    tensors = [t for t in tree_leaves(fresh) if isinstance(t, Tensor)]
    seen = [name for name in case.members if name != "image" or any(t.ndim == 4 for t in tensors)]
    assert list(detection.parts) == seen
    assert detection.score.isfinite().all()
    assert detection.is_ood.double().mean() < 0.5
    if "gram" in case.members:
        taps = guard.members["gram"].taps
        assert detection.deviations.isfinite().all()
        assert detection.deviations.shape == (40, len(taps))
        assert (detection.deviations > 0).any()
        if case.taps is not None:
            assert len(taps) == case.taps
    else:
        assert detection.deviations is None

    guard.save(tmp_path / "guard.safetensors")
    loaded = gramwatch.load(tmp_path / "guard.safetensors", model)
    again = loaded(fresh)
    for value in ("logits", "score", "p_value", "is_ood"):
        assert torch.equal(getattr(again, value), getattr(detection, value)), value

    assert [module.training for module in model.modules()] == modes
    assert hooks(model) == hooked
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[key], value) for key, value in state.items())
    if "gram" in case.members and case.taps is None:
        model.eval()
        assert len(taps) >= layers_called(model, case.inputs(2)) - 1 > 0
