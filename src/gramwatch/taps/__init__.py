"""Taps: the watched tensors of any network, found and named without changing the network.

A tap is the output of a convolution, a linear layer or an activation function ("any set of values obtained
immediately after applying convolution or activation functions"). Most networks call some of these as
modules and some as plain functions, in place or not, once or several times. All of them end in a PyTorch
function, and a `TorchFunctionMode` sees every such call of one thread: so nothing is hooked while a
network is being judged, and a tap is simply the n-th watched call of a forward pass.

`find_taps` runs the network twice on a tiny batch, follows every tensor to learn which of its axes are the
batch and the channels, and names each call after the module it happened in. `observe` then runs it once,
handing over each tapped tensor at the moment it is made.
"""

from gramwatch.taps.find import Look, find_head, find_taps
from gramwatch.taps.observe import observe
from gramwatch.taps.running import Network, call, judging, unwrap
from gramwatch.taps.tap import Tap, Taps, mark

__all__ = [
    "Look",
    "Network",
    "Tap",
    "Taps",
    "call",
    "find_head",
    "find_taps",
    "judging",
    "mark",
    "observe",
    "unwrap",
]
