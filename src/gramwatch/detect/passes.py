"""Passes that several detectors share: the plan, and the one `measure`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from gramwatch.detect.contract import Contract
from gramwatch.detect.measurement import Measurement
from gramwatch.errors import InputError
from gramwatch.inputs.batches import (
    Inputs,
    count_examples,
    described,
    same_form,
    same_size,
    signature,
)
from gramwatch.observe.needs import Statistics
from gramwatch.observe.observation import Observation
from gramwatch.observe.plan import Plan
from gramwatch.watch import Look, Taps


def measure(
    detectors: Sequence[Contract],
    leaves: Sequence[Contract],
    pieces: Iterable[Iterable[Observation | Measurement]],
) -> list[Measurement]:
    """Measure a batch: one measurement for each detector.

    Args:
        detectors: methods, and guards whose members are among the leaves.
        leaves: the detectors that are given observations.
        pieces: the observations of the leaves, for each piece of the batch. What is measured already is taken
            as it is.

    """
    measured: list[list[Measurement]] = [[] for _ in detectors]
    for observations in pieces:
        by_leaf = {
            leaf: leaf.measured(seen) if isinstance(seen, Observation) else seen
            for leaf, seen in zip(leaves, observations, strict=True)
        }
        for detector, parts in zip(detectors, measured, strict=True):
            of_members = {name: by_leaf[member] for name, member in detector.members.items()}
            parts.append(Measurement.together(of_members) if of_members else by_leaf[detector])
    return [parts[0] if len(parts) == 1 else Measurement.of_pieces(parts) for parts in measured]


def note_form(detector: Contract, inputs: Inputs) -> None:
    """Note the form of the first example, for the probe."""
    if detector._recipe is None:
        from gramwatch.detect import probe

        detector._recipe = probe.recipe_of(inputs)


def plan_for(leaves: Sequence[Contract], look: Look, known: Mapping[Statistics, Taps] | None = None) -> Plan:
    """The plan for these detectors. `known` are taps that are known besides those of the detectors."""
    known = {**(known or {}), **{asked: taps for leaf in leaves for asked, taps in leaf.known_taps.items()}}
    plan = Plan(look, [leaf.needs for leaf in leaves], known)
    plan.explained = partial(explained, leaves)
    for leaf in leaves:
        leaf.use(plan)
    return plan


@contextmanager
def explained(leaves: Sequence[Contract], inputs: Inputs) -> Iterator[None]:
    """Refuse inputs whose form differs from the fit. Explain an error of the network by the inputs' form."""
    for form in (leaf._form for leaf in leaves if leaf._form is not None):
        if not same_form(signature(inputs), form):
            count_examples(inputs)  # what is no batch has an error of its own
            raise InputError(
                f"inputs of {described(signature(inputs))} were given, "
                f"the detector was fitted on {described(form)}"
            )
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, InputError) as error:
        # `Look` raises an InputError whose cause is the network's error.
        network_error = error.__cause__ if isinstance(error, InputError) else error
        if network_error is not None:
            for leaf in leaves:
                leaf.network.explain_dtype(inputs, network_error)
                if leaf._form is not None and not same_size(signature(inputs), leaf._form):
                    raise InputError(
                        f"the network fails on inputs of {described(signature(inputs))}, "
                        f"the detector was fitted on {described(leaf._form)}: {network_error}"
                    ) from network_error
        raise


def leaves_of(detectors: Iterable[Contract]) -> list[Contract]:
    """The leaves of all these detectors, without repetition: see `Contract.leaves`."""
    return list(dict.fromkeys(leaf for detector in detectors for leaf in detector.leaves))
