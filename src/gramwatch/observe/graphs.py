"""The CUDA graphs of a plan: of its pass alone, and of the verdicts on batches. They have this one owner."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gramwatch.inputs.batches import Inputs
from gramwatch.observe.observation import Observation
from gramwatch.observe.replay import Nest, Replay, Tensors
from gramwatch.observe.uses import Mean, Read
from gramwatch.watch import Network


class Judge(Protocol):
    """A calibrated detector whose verdicts are replayed."""

    record_pass: bool
    """Whether the forward pass is part of the graph."""

    def calibration(self) -> object:
        """The calibration. Graphs hold for one."""

    def given(self, observations: Sequence[Observation]) -> Tensors:
        """What a graph of the verdict alone reads, from the observations of a pass."""

    def judge_given(self, given: Any) -> tuple[Tensor, ...]:
        """The tensors of the verdict. This does not wait for a GPU."""

    def tables(self) -> Iterable[Tensor]:
        """The fitted tensors that kernels read, which PyTorch does not see."""


class Graphs:
    """The CUDA graphs of a plan.

    Args:
        network: the network of the plan.
        read: runs and reads one pass.
        observe: runs one pass, and returns the observations of all detectors.

    """

    def __init__(
        self,
        network: Network,
        read: Callable[[Inputs], Read],
        observe: Callable[[Inputs], list[Observation]],
    ) -> None:
        self._network, self._read, self._observe = network, read, observe
        self.forget()

    def forget(self) -> None:
        """Forget all recordings."""
        self._passes: Replay[Nest] | None = None
        self.verdicts: Replay[Any] | None = None
        """The recordings of verdicts."""
        self._held: list[Tensor] = []
        """The tensors of the network when the recordings began."""
        self._calibration: object = None
        self._with_pass = False
        self._means: list[Mean] = []
        self._tables = 0

    def read(self, inputs: Inputs) -> Read:
        """What is read in one pass, replayed. Weights that have moved make a new recording."""
        if self._passes is None:
            self._hold()
            self._passes = Replay(self._flat, lambda: self._held)
        logits, *rest = self._passes(Nest(inputs, self._places()))
        tables, means = self._tables, self._tables + len(self._means)
        by_tap = dict(zip(self._means, rest[tables:means], strict=True))
        return Read(logits, rest[:tables], by_tap, rest[means:])

    def _flat(self, given: Nest) -> tuple[Tensor, ...]:
        """What is read in one pass, side by side."""
        logits, tables, means, features = self._read(given.value)
        self._means, self._tables = list(means), len(tables)
        return (logits, *tables, *means.values(), *features)

    def judged(self, inputs: Inputs, judge: Judge) -> tuple[Tensor, ...]:
        """The tensors of a verdict, replayed. The pass is a part of the graph if the judge says so."""
        calibration = judge.calibration()
        if self._calibration is not calibration or self._with_pass != judge.record_pass:
            self._calibration, self._with_pass = calibration, judge.record_pass
            self.verdicts = None
        if judge.record_pass:
            if self.verdicts is None:
                self._hold()
                self.verdicts = Replay(
                    lambda nest: judge.judge_given(self.given(nest.value, judge)),
                    lambda: [*judge.tables(), *self._held],
                )
            return self.verdicts(Nest(inputs, self._places()))
        if self.verdicts is None:
            self.verdicts = Replay(judge.judge_given)
        return self.verdicts(self.given(inputs, judge))

    @torch.inference_mode()
    def given(self, inputs: Inputs, judge: Judge) -> Tensors:
        """What the graph of a verdict alone reads, from one pass."""
        return judge.given(self._observe(inputs))

    def _hold(self) -> None:
        """Note the tensors of the network. To list them for each batch takes long."""
        self._held = [*self._network.model.parameters(), *self._network.model.buffers()]

    def _places(self) -> tuple[int, ...]:
        """Where the tensors of the network lie in memory."""
        return tuple([tensor.data_ptr() for tensor in self._held])
