"""`gramwatch taps`: the tensors of a network that can be watched."""

from typing import Annotated

import typer

from gramwatch.cli.checks import about
from gramwatch.cli.common import chosen_taps
from gramwatch.cli.options import Json, NetworkName, Size, Voice, WatchedTaps, Weights
from gramwatch.errors import InputError


def taps(
    model: NetworkName,
    weights: Weights = None,
    which: WatchedTaps = None,
    size: Size = None,
    channels: Annotated[
        int | None, typer.Option(min=1, help="The channels of images, if they are not known. 3: colour.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the tensors of a network that a guard watches, with their shapes. Weights are not needed.

    Examples:
    gramwatch taps timm:resnet18

    gramwatch taps mypackage.nets:build --size 64 --taps 'layer4.*'

    """
    import torch

    from gramwatch.guard.guard import EFFORTS
    from gramwatch.inputs.models import resolve
    from gramwatch.watch import find_taps

    with about("MODEL"):
        resolved = resolve(model, weights, untrained=True, size=size)
    known = resolved.preprocessing
    if known is None and size is None:
        raise InputError(f"how large images of {model} are is not known: give --size, such as --size 224")
    height, width = (size, size) if size is not None else known.size if known else (0, 0)
    depth = channels or (len(known.mean) if known else 3)
    images = torch.zeros(2, depth, height, width)
    try:
        listed = find_taps(resolved.network, images, chosen_taps(which) or EFFORTS["lean"]["taps"])
        every = len(find_taps(resolved.network, images)) if which is None else len(listed)
    except InputError as error:
        if known is None and channels is None:
            raise InputError(
                f"images of 3 x {height} x {width} were tried: {error}. If images are grey, give --channels "
                "1; if they have another size, give that as --size"
            ) from None
        raise
    if as_json:
        Voice(as_json=True).summary(
            [{"name": tap.name, "operation": tap.operation, "shape": list(tap.shape)} for tap in listed]
        )
        return
    typer.echo(repr(listed))
    if len(listed) < every:
        typer.echo(f"a guard watches these {len(listed)} of {every:,} tensors; all of them: --taps all")
