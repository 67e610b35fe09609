"""Taps: the watched tensors of any network, found and named without changing the network.

A tap is the output of a convolution, a linear layer or an activation function ("any set of values obtained
immediately after applying convolution or activation functions"). A network may call such a layer as a module
or as a plain function, in place or not, once or several times. All these calls end in a PyTorch function, and
a `TorchFunctionMode` sees every such call of one thread. So a tap is the n-th watched call of a forward pass,
and judging needs no hooks.

`find_taps` runs the network twice on a tiny batch. It follows every tensor to learn its batch axis and its
channel axis, and names a call after the module that makes it. `observe` runs the network once, and hands over
every tapped tensor as soon as it is computed.
"""

from gramwatch.inputs.adapters import Network, unwrap
from gramwatch.watch.find import Look, find_head, find_taps
from gramwatch.watch.running import call, judging, observe
from gramwatch.watch.tap import Tap, Taps, mark

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
