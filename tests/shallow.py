"""Networks of timm with fewer and narrower blocks: the kinds of blocks stay, and tests take less time."""

from typing import Any

import pytest
from torch import nn

STAGES = {"channels": (16, 24, 32, 48)}
NARROW = {"depth": 3, "embed_dim": 48}
SHALLOW: dict[str, dict[str, Any]] = {
    "cait_xxs24_224": NARROW,
    "convit_tiny": {"depth": 3, "local_up_to_layer": 2, "embed_dim": 12},
    "convnext_atto": {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)},
    "convnextv2_atto": {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)},
    "deit_tiny_distilled_patch16_224": NARROW,
    "densenet121": {"block_config": (3, 3, 3, 3)},
    "ecaresnet26t": {"layers": (1, 1, 1, 1), **STAGES},
    "edgenext_xx_small": {"depths": (1, 1, 2, 1)},
    "efficientvit_b0": {"depths": (1, 1, 1, 1)},
    "eva02_tiny_patch14_224": NARROW,
    "fasternet_t0": {"depths": (1, 1, 2, 1)},
    "levit_128s": {"depth": (1, 2, 1), "embed_dim": (32, 48, 64)},
    "maxvit_rmlp_pico_rw_256": {"depths": (1, 1, 2, 1)},
    "pit_ti_224": {"depth": (1, 2, 1)},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "resnet10t": STAGES,
    "seresnet18": {"layers": (1, 1, 1, 1), **STAGES},
    "skresnet18": {"layers": (1, 1, 1, 1), "channels": (32, 48, 64, 96)},
    "swin_tiny_patch4_window7_224": {"depths": (2, 2, 2, 1), "embed_dim": 24},
    "swinv2_cr_tiny_224": {"depths": (2, 2, 2, 1)},
    "twins_svt_small": {"depths": (2, 2, 2, 1), "embed_dims": (16, 32, 48, 64)},
    "vgg11": {"mlp_ratio": 0.05},
    "vit_tiny_patch16_224": NARROW,
    "xcit_nano_12_p8_224": {"depth": 3, "embed_dim": 64},
}
"""The options of `timm.create_model`, by the names of architectures."""


def shallow(name: str, **options: Any) -> nn.Module:
    """A network of timm with random weights."""
    timm = pytest.importorskip("timm")
    network: nn.Module = timm.create_model(name, **SHALLOW.get(name, {}), **options)
    # No option of timm chooses how many blocks these have.
    if name in ("gmlp_ti16_224", "mixer_s32_224", "resmlp_12_224"):
        network.blocks = network.blocks[:3]
    elif name == "poolformer_s12":
        for stage in network.stages:
            stage.blocks = stage.blocks[:1]
    elif name in ("efficientnet_lite0", "mobilenetv3_small_050"):
        for number, stage in enumerate(network.blocks):
            network.blocks[number] = stage[:1]
    return network
