"""Try tile sizes and warps for the CUDA kernels: which is fastest for which map."""

import itertools

import torch
import triton.testing

from gramwatch.kernels import cuda

ORDERS = tuple(range(1, 11))
MAPS = [
    (256, 64, 1024),
    (256, 128, 256),
    (256, 256, 64),
    (256, 512, 16),
    (256, 12, 1024),
    (128, 768, 197),
    (64, 256, 3136),
]


def main() -> None:
    """Print the five fastest choices for each map."""
    for shape, layout in itertools.product(
        MAPS,
        ["first", "last"],
    ):
        x = torch.randn(shape, device="cuda").relu_()
        if layout == "last":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        out = torch.empty(shape[0], 10, shape[1], device="cuda")
        found = []
        for size, width, warps in itertools.product(
            [256, 512, 1024, 2048], [16, 32, 64, 128, 256], [1, 2, 4, 8]
        ):
            if width > size or size // warps > 1024 or size < 32 * warps:
                continue
            cuda._tile = lambda *args, chosen=(size, width, warps): tile(*args, *chosen)
            try:
                time = triton.testing.do_bench(
                    lambda x=x, o=out: cuda.compute("row_sums", x, ORDERS, o), warmup=2, rep=6
                )
            except Exception as error:
                print(size, width, warps, type(error).__name__)
                continue
            found.append((time, size, width, warps))
        found.sort()
        limit = x.numel() * 4 / 4.33e9
        print(
            shape,
            layout,
            f"one read {limit:.4f} ms:",
            [f"{t:.4f} ms {s}/{w}/{p}" for t, s, w, p in found[:5]],
            flush=True,
        )


def tile(channels: int, pixels: int, dense: bool, size: int, width: int, warps: int) -> tuple[int, int, int]:
    """What `cuda._tile` would return for this choice."""
    along, across = (channels, pixels) if dense else (pixels, channels)
    along = min(triton.next_power_of_2(along), width)
    across = min(triton.next_power_of_2(across), max(1, size // along))
    return (along, across, warps) if dense else (across, along, warps)


if __name__ == "__main__":
    main()
