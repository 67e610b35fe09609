"""Networks of timm with fewer blocks: what blocks there are stays the same, and tests take less time."""

from typing import Any

SHALLOW: dict[str, dict[str, Any]] = {
    "cait_xxs24_224": {"depth": 3},
    "convit_tiny": {"depth": 3, "local_up_to_layer": 2},
    "convnext_atto": {"depths": (1, 1, 2, 1)},
    "convnextv2_atto": {"depths": (1, 1, 2, 1)},
    "deit_tiny_distilled_patch16_224": {"depth": 3},
    "densenet121": {"block_config": (3, 3, 3, 3)},
    "edgenext_xx_small": {"depths": (1, 1, 2, 1)},
    "efficientvit_b0": {"depths": (1, 1, 1, 1)},
    "eva02_tiny_patch14_224": {"depth": 3},
    "fasternet_t0": {"depths": (1, 1, 2, 1)},
    "levit_128s": {"depth": (1, 2, 1)},
    "maxvit_rmlp_pico_rw_256": {"depths": (1, 1, 2, 1)},
    "pit_ti_224": {"depth": (1, 2, 1)},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "seresnet18": {"layers": (1, 1, 1, 1)},
    "skresnet18": {"layers": (1, 1, 1, 1)},
    "swin_tiny_patch4_window7_224": {"depths": (2, 2, 2, 1)},
    "swinv2_cr_tiny_224": {"depths": (2, 2, 2, 1)},
    "twins_svt_small": {"depths": (2, 2, 2, 1)},
    "vgg11": {"mlp_ratio": 0.05},
    "vit_tiny_patch16_224": {"depth": 3},
    "xcit_nano_12_p8_224": {"depth": 3},
}
"""The options of `timm.create_model`, by the names of architectures."""
