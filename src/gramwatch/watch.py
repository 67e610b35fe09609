"""Watch: one forward pass for several detectors of one network, whichever methods they are."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from gramwatch.batches import Inputs
from gramwatch.detector import Collector, GramDetector, Measurement
from gramwatch.errors import warn
from gramwatch.methods.base import Method
from gramwatch.observation import ChannelMeans, Observation, Observer

Single = GramDetector | Method
"""A detector that looks for itself."""
KEPT = frozenset({"features", "head"})
"""What most methods that keep examples need of them, so that all of these share one copy."""


@dataclass(frozen=True)
class Seen:
    """What one forward pass shows of a batch: to Gram its deviations, to each rival its observation."""

    observation: Observation
    """What rivals see who look where most do."""
    elsewhere: Mapping[Method, Observation]
    """What others see."""
    deviations: Mapping[GramDetector, Measurement]

    @property
    def constant(self) -> None:
        """What is there beside tensors: nothing that changes."""

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Seen":
        """The same with every tensor changed."""
        return Seen(
            self.observation.changed(change),
            {rival: each.changed(change) for rival, each in self.elsewhere.items()},
            {gram: each.changed(change) for gram, each in self.deviations.items()},
        )

    def said_by(self, detector: Single) -> Measurement | Tensor:
        """What a detector says of it: Gram its deviations, the others their scores."""
        if isinstance(detector, GramDetector):
            return self.deviations[detector]
        return detector.judged(self.elsewhere.get(detector, self.observation))


class Watch:
    """Runs the network once for all: an observation for the rivals, collected statistics for Gram.

    Args:
        detectors: of one network, each once; none that takes passes of its own.

    """

    def __init__(self, detectors: Iterable[Single]) -> None:
        detectors = list(detectors)
        self.network = detectors[0].network
        self._grams = [each for each in detectors if isinstance(each, GramDetector)]
        self._rivals = [each for each in detectors if isinstance(each, Method)]
        self._observer, self._elsewhere = (
            shared_observer(self._rivals) if self._rivals else (Observer(self.network), [])
        )
        self._left_out: dict[GramDetector, Tensor | int] = dict.fromkeys(self._grams, 0)

    def take(self, inputs: Inputs, labels: Tensor | None) -> None:
        """Let every detector take in a batch of training examples."""
        observation, collected, elsewhere = self._look(inputs, labels)
        for gram in self._grams:
            left_out: Tensor | int
            if gram in collected:
                left_out = gram.take(inputs, observation.logits, collected[gram].statistics)
            else:
                left_out = gram.take_alone(inputs)
            self._left_out[gram] = self._left_out[gram] + left_out
        kept = None
        for rival in self._rivals:
            if not rival.record.fitted:
                continue
            if rival.running or not rival.needs <= KEPT:
                rival.take(elsewhere.get(rival, observation))
            else:
                kept = observation.kept(KEPT) if kept is None else kept
                rival.take(kept)

    def finish(self) -> None:
        """Let every detector learn from what it took in."""
        for gram, left_out in self._left_out.items():
            gram.finish(int(left_out))
        self._left_out = dict.fromkeys(self._grams, 0)
        for rival in self._rivals:
            rival.finish()
            if rival.says_nothing:
                warn(f"{rival.says_nothing}. Until then it says the same of every input")

    def measure(self, inputs: Inputs) -> tuple[Tensor, dict[Single, Measurement | Tensor]]:
        """The logits of a batch, and what each says of it."""
        seen = self.look(inputs)
        detectors: list[Single] = [*self._grams, *self._rivals]
        return seen.observation.logits, {each: seen.said_by(each) for each in detectors}

    def look(self, inputs: Inputs) -> Seen:
        """One forward pass."""
        observation, collected, elsewhere = self._look(inputs, None)
        deviations = {
            gram: gram.measured(inputs, observation.logits, collected[gram].statistics)
            if gram in collected
            else gram.measure(inputs)
            for gram in self._grams
        }
        return Seen(observation, elsewhere, deviations)

    def _look(
        self, inputs: Inputs, labels: Tensor | None
    ) -> tuple[Observation, dict[GramDetector, Collector], dict[Method, Observation]]:
        """One forward pass. A Gram detector with too many statistics for one pass is left out.

        Those that measure the same at the same taps share one collector. What rivals see who look at other
        taps than the shared observer is told apart.
        """
        collected: dict[GramDetector, Collector] = {}
        for gram in self._grams:
            own = gram.collector(inputs)
            if not gram.is_large(inputs):
                collected[gram] = next((each for each in collected.values() if each.same(own)), own)
        means: dict[Method, ChannelMeans] = {}
        for rival in self._elsewhere:
            same = (each for other, each in means.items() if other.taps == rival.taps)
            means[rival] = next(same, None) or rival.means_of(inputs)
        others = list(dict.fromkeys(means.values()))
        with ExitStack() as stack:
            for gram in self._grams:
                stack.enter_context(gram.naming_sizes(inputs))
            observation = self._observer(inputs, labels, [*dict.fromkeys(collected.values()), *others])
        seen = {each: each.seen_in(observation) for each in others}
        return observation, collected, {rival: seen[each] for rival, each in means.items()}


def shared_observer(rivals: Iterable[Method]) -> tuple[Observer, list[Method]]:
    """An observer that collects what all of them need, and those who look at other taps than it does."""
    rivals = list(rivals)
    first = rivals[0]
    needs = frozenset().union(*(rival.needs for rival in rivals))
    tapped = [rival for rival in rivals if "channel_means" in rival.needs]
    if any(rival.model is not first.model or rival.features != first.features for rival in rivals):
        raise ValueError("detectors that share a pass must have the same model and features")
    taps = tapped[0].taps if tapped else "all"
    elsewhere = [rival for rival in tapped if rival.taps != taps]
    return Observer(first.network, needs, taps=taps, features=first.features), elsewhere
