"""Taps and a detector on a wide sweep of timm's architectures, checked against what the modules say.

Nothing here asks the library where channels are: layers state their own widths, and forward hooks tell which
layer made the tensor that an activation was given, or took the one that it made.
"""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from gramwatch import GramDetector, GramwatchWarning, find_taps
from gramwatch.watch import observe
from tests.shallow import shallow

pytest.importorskip("timm")

CLASSES = 7

# name: pixels; with a trailing "i" where the architecture must be told by img_size. Not here: GCViT, which in
# timm mixes the examples of a batch (`q_global.repeat` where the windows of one example lie together).
ARCHITECTURES = dict(
    pair.split(":")
    for pair in """
        resnet10t:32 resnet18:32 resnet26d:32 resnetv2_18:32 resnext26ts:32 seresnet18:32
        seresnext26d_32x4d:32 ecaresnet26t:32 skresnet18:32 resnest14d:64 res2net50_14w_8s:32
        gcresnext26ts:32 legacy_seresnet18:32 densenet121:32 dpn48b:32 efficientnet_b0:32
        efficientnet_lite0:32 tf_efficientnet_cc_b0_4e:32 mixnet_s:32 mobilenetv1_100:32 mobilenetv2_035:32
        mobilenetv3_small_050:32 mobilenetv4_conv_small_035:32 mobilenetv4_hybrid_medium:64 lcnet_035:32
        mnasnet_small:32 semnasnet_075:32 tinynet_e:32 hardcorenas_a:32 fbnetc_100:32 rexnet_100:32
        ghostnet_050:32 ghostnetv2_100:64 repghostnet_050:32 starnet_s050:32 fasternet_t0:32 shvit_s1:64
        convnext_atto:32 convnextv2_atto:32 inception_next_atto:32 convmixer_768_32:32 regnetx_002:32
        regnety_002:32 regnetz_005:32 gernet_s:32 repvgg_a0:32 mobileone_s0:32 repvit_m1:64 vgg11:32
        vgg11_bn:32 inception_v3:75 inception_v4:75 xception41:32 selecsls42:32
        test_nfnet:32 nf_regnet_b0:32 nf_resnet26:32 hrnet_w18_small:32 hgnetv2_b0:32
        dla46_c:32 cs3darknet_focus_s:32 cspresnext50:32 ese_vovnet19b_slim_dw:32 vit_tiny_patch16_224:32i
        deit_tiny_distilled_patch16_224:32i vit_relpos_small_patch16_224:32i vit_tiny_r_s16_p8_224:64i
        test_vit3:32i eva02_tiny_patch14_224:28i beit_base_patch16_224:32i cait_xxs24_224:32i
        swin_tiny_patch4_window7_224:56i swinv2_tiny_window8_256:64i swinv2_cr_tiny_224:64i
        hiera_tiny_224:64i mixer_s32_224:64i resmlp_12_224:32i gmlp_ti16_224:32i gmixer_12_224:32i
        coatnet_pico_rw_224:64i coatnext_nano_rw_224:64i maxvit_pico_rw_256:64i maxvit_rmlp_pico_rw_256:64i
        levit_128s:64i levit_conv_128s:64i crossvit_tiny_240:120i coat_lite_tiny:32i convit_tiny:32i
        pit_ti_224:64i pit_ti_distilled_224:64i twins_svt_small:64i twins_pcpvt_small:64i pvt_v2_b0:64
        poolformer_s12:32 poolformerv2_s12:32 caformer_s18:32 edgenext_xx_small:64 mobilevit_xxs:64
        mobilevitv2_050:64 fastvit_t8:64 efficientvit_b0:64 efficientvit_m0:64i efficientformerv2_s0:64i
        swiftformer_xs:64 volo_d1_224:64i xcit_nano_12_p8_224:32i visformer_tiny:64i davit_tiny:32
        focalnet_tiny_srf:32 mvitv2_tiny:64i nest_tiny:64i tnt_s_patch16_224:32i tiny_vit_5m_224:64
        sequencer2d_s:64i test_mambaout:32 efficientvim_m1:64 lambda_resnet26t:64
        botnet26t_256:64i
    """.split()
)

EVERYDAY = """
    resnet10t resnext26ts seresnet18 skresnet18 densenet121 efficientnet_lite0 tf_efficientnet_cc_b0_4e
    mixnet_s mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small_035 mnasnet_small tinynet_e
    ghostnet_050 starnet_s050 fasternet_t0 convnext_atto convnextv2_atto regnetx_002 regnety_002 repvgg_a0
    mobileone_s0 inception_v3 selecsls42 test_nfnet hgnetv2_b0 dla46_c cs3darknet_focus_s
    ese_vovnet19b_slim_dw
    vit_tiny_patch16_224 deit_tiny_distilled_patch16_224 test_vit3 eva02_tiny_patch14_224 cait_xxs24_224
    swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 mixer_s32_224 resmlp_12_224 gmlp_ti16_224
    maxvit_rmlp_pico_rw_256 levit_128s convit_tiny pit_ti_224 twins_svt_small pvt_v2_b0 poolformer_s12
    edgenext_xx_small mobilevit_xxs efficientvit_b0 xcit_nano_12_p8_224 nest_tiny test_mambaout vgg11
""".split()
"""One or two of each kind; the rest take minutes more, with `make test-real`."""

NO_ACTIVATION_TOLD = {"gmixer_12_224", "eva02_tiny_patch14_224"}
"""Where every activation is one of two factors, and neither comes straight from a layer nor goes into one."""

LAYERS = (nn.modules.conv._ConvNd, nn.Linear)
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def width_of(module: nn.Module, side: str = "out") -> int | None:
    """How many channels a layer makes or takes, or a normalisation has, in its own words."""
    if isinstance(module, LAYERS + NORMS):
        for name in (
            f"{side}_channels",
            f"{side}_features",
            "num_features",
            "num_channels",
            "normalized_shape",
        ):
            width = getattr(module, name, None)
            if isinstance(width, tuple) and len(width) == 1:
                (width,) = width
            if isinstance(width, int):
                return width
    return None


class Recorder:
    """What each call of a leaf module made; if it is no layer, how wide that is, where this is known."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.outputs: dict[str, list[Tensor]] = {}
        self.widths: dict[str, list[int | None]] = {}
        self._by_layers: dict[tuple[int, int], int] = {}
        self._by_others: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[str, int]] = {}
        self._alive: list[Tensor] = []  # so that no address is used twice
        handles = []
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                handles.append(module.register_forward_pre_hook(self._before(name)))
                handles.append(module.register_forward_hook(self._after(name)))
        try:
            with torch.no_grad():
                self.logits = model(images)
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name):
        def hook(module, args):
            x = args[0] if args and isinstance(args[0], Tensor) else torch.empty(0)
            if (width := width_of(module, "in")) is None:
                # The same memory may have another shape by now: permuted, or its channels split into heads.
                width = self._by_layers.get((x.data_ptr(), x.numel()))
                self.widths.setdefault(name, []).append(width if width in x.shape[1:] else None)
            elif (x.data_ptr(), x.shape, x.stride()) in self._by_others:
                maker, call = self._by_others[x.data_ptr(), x.shape, x.stride()]
                self.widths[maker][call] = self.widths[maker][call] or width

        return hook

    def _after(self, name):
        def hook(module, args, out):
            if isinstance(module, nn.RNNBase):
                out, _ = out  # and its last state
            if isinstance(out, Tensor):
                self._alive.append(out)
                self.outputs.setdefault(name, []).append(out.clone())
                if (width := width_of(module)) is not None:
                    self._by_layers[out.data_ptr(), out.numel()] = width
                else:
                    place = out.data_ptr(), out.shape, out.stride()
                    self._by_others[place] = name, len(self.widths[name]) - 1

        return hook


def split(name: str) -> tuple[str, int]:
    """`conv#2` is the second call of `conv`."""
    base, _, number = name.partition("#")
    return base, int(number or 1) - 1


def expected_channels(model: nn.Module, recorder: Recorder, name: str, kind: str) -> int | None:
    """A tap's channels by what the modules say, where that can be told."""
    base, call = split(name)
    try:
        module, parent = model.get_submodule(base), model.get_submodule(base.rpartition(".")[0])
    except AttributeError:
        return None  # a function
    if kind in ("convolution", "linear"):
        return width_of(module) if isinstance(module, LAYERS) else None
    if kind == "recurrent":
        return module.hidden_size * (2 if module.bidirectional else 1)
    if base not in recorder.widths:
        return None
    if isinstance(parent, NORMS):  # timm's BatchNormAct2d and the like normalise, then call their activation
        return width_of(parent)
    return recorder.widths[base][call]


def maps_by_hand(out: Tensor, channels: int, examples: int, kind: str) -> Tensor | None:
    """(examples, channels, pixels) of a module's output; None where it is not clear which axis is which."""
    axes = [axis for axis in range(1, out.ndim) if out.shape[axis] == channels]
    if kind != "activation":
        axes = [1 if kind == "convolution" else out.ndim - 1]
    if len(axes) != 1 or out.shape[0] % examples:
        return None
    out = out.reshape(examples, -1, *out.shape[1:])
    return out.movedim(axes[0] + 1, 1).reshape(examples, channels, -1)


def is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()))


def noise(examples: int, pixels: int) -> Tensor:
    """Images in double precision, for which the order of a sum hardly matters however deep the network."""
    return torch.randn(examples, 3, pixels, pixels, dtype=torch.float64)


@torch.no_grad()
def liven(model: nn.Module, pixels: int) -> None:
    """As if trained: no layer that is zero at first, and statistics that let differing images differ.

    A network whose tensors hardly depend on its input would hide mistakes.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.0)
        elif parameter.std() < 1e-3:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    model.train()(noise(8, pixels))
    for norm in norms:  # so few examples leave channels of hardly any variance, which would blow up
        norm.running_var.clamp_(min=0.3 * float(norm.running_var.mean()))
    model.eval()


def create(name: str) -> tuple[nn.Module, int]:
    size = ARCHITECTURES[name]
    pixels = int(size.rstrip("i"))
    options = {"img_size": pixels} if size.endswith("i") else {}
    model = shallow(name, num_classes=CLASSES, **options).double()
    liven(model, pixels)
    return model, pixels


def test_the_sweep_is_wide():
    assert len(ARCHITECTURES) >= 100


def test_the_everyday_ones_are_among_them():
    assert len(set(EVERYDAY)) > 50
    assert set(EVERYDAY) < ARCHITECTURES.keys()


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.real) for n in ARCHITECTURES]
)
def test_architecture(name):
    model, pixels = create(name)
    images, others = noise(2, pixels), noise(2, pixels)
    taps = find_taps(model, images)
    assert len(taps) > 3
    assert len(set(taps.names)) == len(taps)

    seen: dict[str, Tensor] = {}
    logits = observe(model, taps, images, lambda number, maps: seen.update({taps[number].name: maps.clone()}))
    assert list(seen) == taps.names
    recorder, other = Recorder(model, images), Recorder(model, others)
    assert is_close(logits, recorder.logits)

    # No tap is the logits.
    for tap_name, maps in seen.items():
        assert not (maps.numel() == logits.numel() and torch.allclose(maps.flatten(1), logits)), tap_name

    # Every call of a convolution or a linear layer whose values depend on the input is a tap, but the head's.
    head = model.get_classifier()
    heads = {id(m) for h in (head if isinstance(head, tuple | list) else [head]) for m in h.modules()}
    for module_name, outputs in recorder.outputs.items():
        module = model.get_submodule(module_name)
        if isinstance(module, LAYERS) and id(module) not in heads:
            for call, out in enumerate(outputs):
                if not is_close(out, other.outputs[module_name][call]):
                    assert (module_name if call == 0 else f"{module_name}#{call + 1}") in seen

    # Channels, and with them all values, are what the modules say.
    told = {"convolution": 0, "linear": 0, "activation": 0, "recurrent": 0}
    for tap in taps:
        channels = expected_channels(model, recorder, tap.name, tap.kind)
        assert seen[tap.name].shape[:2] == (2, tap.channels)
        assert math.prod(seen[tap.name].shape) == 2 * math.prod(tap.shape)
        if channels is None:
            continue
        assert tap.channels == channels, tap
        base, call = split(tap.name)
        told[tap.kind] += 1
        module = model.get_submodule(base)
        if isinstance(module, LAYERS) or type(module).__module__.startswith("torch.nn"):
            by_hand = maps_by_hand(recorder.outputs[base][call], channels, 2, tap.kind)
            assert by_hand is None or is_close(seen[tap.name], by_hand), tap
    assert told["convolution"] + told["linear"] > len(taps) / 4
    assert (told["activation"] > 0) == (name not in NO_ACTIVATION_TOLD)

    # What is seen of an example does not depend on the rest of its batch.
    def compare(number, maps):
        assert is_close(maps, seen[taps[number].name][:1]), taps[number]

    observe(model, taps, images[:1], compare)

    detector = GramDetector(model, taps="all", orders=(1, 2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)  # few examples; wide vectors
        detector.fit([torch.cat([noise(3, pixels), images])], progress=False)
    assert detector.taps == taps
    fresh, fitted = detector.measure(torch.cat([others, images])).deviations.split(2)
    assert fresh.shape == (2, len(taps))
    assert fresh.isfinite().all()
    assert fitted.isfinite().all()
    assert (fresh >= 0).all()
    assert fitted.max() < 1e-2 * fresh.max()  # examples that were fitted lie within the bounds
