"""The importance of higher orders (Fig. 2 and appendix): Gram with one order at a time, all layers.

One detector for each metric measures all orders apart. Its cells take some 40 MB for 10,000 images.
"""

from torch import Tensor

from gramwatch_lab.paper import published
from gramwatch_lab.paper.beside import Line
from gramwatch_lab.paper.curves import Parts, run_curves
from gramwatch_lab.paper.experiment import Options
from gramwatch_lab.paper.subject import MethodSpec, Subject

ORDERS = range(1, 11)


def run(options: Options) -> list[Line]:
    """Judge every set by every order."""
    title = "Gram with one order at a time"
    # Pairs of a vector have one odd and one even order alone: row sums have all, at every tap.
    spec = MethodSpec("", "gram_by_order", {"statistic": "row_sums"})
    return run_curves(options, "order", spec, _orders, published.ORDER, title)


def _orders(subject: Subject) -> Parts:
    def choose(order: int, deviations: Tensor) -> Tensor:
        return deviations[:, :, order - 1]

    return {
        f"order {order}": lambda deviations, order=order: choose(order, deviations)  # type: ignore[misc]
        for order in ORDERS
    }
