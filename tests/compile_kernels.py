"""Compile the CPU kernels and leave them on disk: `python -m tests.compile_kernels`.

`make test` does so beside the type checker, which uses one core. Without it, the processes of the tests
compile the same kernels, each for itself.
"""

import torch

from gramwatch.inputs.image_numbers import look
from gramwatch.numerics.kernels import FAST, cpu


def main() -> None:
    for statistic in FAST:
        for order in (2, 3, 13):  # orders that are doubled, up to ten, and above
            for channels, pixels in ((3, 40), (40, 3)):
                maps, out = torch.rand(2, channels, pixels), torch.empty(2, 1, channels)
                cpu.compute(statistic, maps, (order,), out)
    values, predicted = torch.rand(2, 3), torch.zeros(2, dtype=torch.long)
    minimum, maximum = torch.zeros(1, 3), torch.ones(1, 3)
    cpu.widen(values, predicted, minimum, maximum)
    cpu.deviations(values, predicted, minimum, maximum, torch.tensor([0, 3]), torch.ones(3))
    look(torch.rand(1, 3, 8, 8))


if __name__ == "__main__":
    main()
