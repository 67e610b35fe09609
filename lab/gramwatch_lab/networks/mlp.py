"""The paper's fully connected networks for MNIST: hidden layers of 300, 300-150 or 300-150-50 ReLUs."""

from collections.abc import Sequence

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLUs between them, for 28 x 28 grey images."""

    # The outputs of the ReLUs. There a unit is zero or active, and the Gram matrix of a vector says most.
    paper_taps = ("layers.*relu*",)

    def __init__(self, hidden: Sequence[int], classes: int = 10, pixels: int = 784) -> None:
        super().__init__()
        widths = [pixels, *hidden]
        self.layers = nn.Sequential()
        for number, (width_in, width) in enumerate(zip(widths, hidden, strict=False), start=1):
            self.layers.add_module(f"linear{number}", nn.Linear(width_in, width))
            self.layers.add_module(f"relu{number}", nn.ReLU())
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.head(self.layers(x.flatten(1)))
        return logits
