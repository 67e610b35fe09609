"""Semantic: several dense vectors for each label instead of a class number.

Shalev, Adi & Keshet, "Out-of-Distribution Detection using Multiple Semantic Label Representations" (NeurIPS
2018), section 3: K predictors on shared features are trained on the sum of their cosine distances
`d(u, v) = (1 - cos(u, v)) / 2` to the label's K vectors,

    L = sum_k d(e_k(y), f_k(x))

The predicted class has the smallest sum. In the paper, the vectors are published word vectors, and a
predictor has several layers. Here, a predictor is one linear layer, and the vectors come from files. Without
files, they are random directions that are about equally far apart. These do not say which labels are alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch.errors import TrainingError
from gramwatch_lab.methods.semantic import SemanticHead, SemanticScore
from gramwatch_lab.training.base import Network, Objective


@dataclass(frozen=True)
class Semantic(Objective):
    """Train a network to predict the label's vectors.

    Args:
        vectors: files with the labels' vectors, see `read_vectors`. Without files, vectors are random.
        words: the names of the labels, in order. They are looked up in files of word vectors. By default
            `gramwatch train` takes the names of the classes, if the set has them.
        count: K, the number of sets of random vectors.
        size: the number of entries of a random vector.
        seed: the seed of random vectors.

    """

    vectors: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    count: int = 5
    size: int = 100
    seed: int = 0

    name = "semantic"
    detector = SemanticScore

    def __post_init__(self) -> None:
        for field in ("vectors", "words"):  # lists, as in JSON, and single names become tuples
            value = getattr(self, field)
            object.__setattr__(self, field, (value,) if isinstance(value, str) else tuple(map(str, value)))
        if self.count < 1 or self.size < 1:
            raise TrainingError(f"semantic: count and size must be at least 1: {self}")

    def prepare(self, network: nn.Module, saved: Mapping[str, Tensor] | None = None) -> None:
        """Replace the last linear layer by a `SemanticHead`."""
        if any(isinstance(part, SemanticHead) for part in network.modules()):
            return
        name, layer = last_linear(network)
        if saved is None:
            labels = self.labels(layer.out_features)
        else:
            start = f"{name}.labels_"
            count = sum(key.startswith(start) for key in saved)
            labels = [saved[f"{start}{k}"] for k in range(count)]
            if not labels:
                raise TrainingError(f"the saved weights hold no vectors of labels at '{name}'")
        parent, _, child = name.rpartition(".")
        head = SemanticHead(layer.in_features, labels).to(layer.weight.device)
        setattr(network.get_submodule(parent), child, head)

    def labels(self, classes: int) -> list[Tensor]:
        """The vectors of the labels, K matrices `(classes, size)`."""
        if not self.vectors:
            return random_vectors(self.count, classes, self.size, self.seed)
        matrices = [matrix for path in self.vectors for matrix in read_vectors(path, self.words)]
        for matrix in matrices:
            if len(matrix) != classes:
                raise TrainingError(
                    f"{', '.join(self.vectors)}: there are vectors for {len(matrix)} labels, the network has "
                    f"{classes} classes"
                )
        return matrices

    def loss(
        self, network: Network, images: Tensor, labels: Tensor, outliers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The summed cosine distances to the label's vectors. That is minus the logit of the label."""
        logits = network(images)
        return -logits.gather(1, labels[:, None]).mean(), logits


def last_linear(network: nn.Module) -> tuple[str, nn.Linear]:
    """The last linear layer and its name."""
    layers = [(name, part) for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    if not layers or not layers[-1][0]:
        raise TrainingError(
            f"{type(network).__name__} has no linear layer inside it that a SemanticHead could replace"
        )
    return layers[-1]


def random_vectors(count: int, classes: int, size: int, seed: int = 0) -> list[Tensor]:
    """Random directions. They have no meaning. If `size` is large, they are nearly at right angles."""
    generator = torch.Generator().manual_seed(seed)
    return list(F.normalize(torch.randn(count, classes, size, generator=generator), dim=2))


def read_vectors(path: str | PathLike[str], words: Sequence[str] = ()) -> list[Tensor]:
    """The labels' vectors in a file.

    Args:
        path: a NumPy file, `.npy`, of shape `(K, classes, size)` or `(classes, size)`; or a text file of word
            vectors. A line of the text has a word and its numbers. Lines of other words are skipped, and so
            is a first line of counts.
        words: the names of the labels, in order. If a name is not in the file, its lower-case form is looked
            up, and then the last word of that ("fish" for "aquarium fish").

    """
    path = Path(path)
    if not path.is_file():
        raise TrainingError(f"there is no file {path} of label vectors")
    matrices = _read_numpy(path) if path.suffix == ".npy" else [_read_words(path, words)]
    for matrix in matrices:
        _check(matrix, path, words)
    return matrices


def _check(matrix: Tensor, path: Path, words: Sequence[str]) -> None:
    """Make sure that every label has a direction of its own."""
    names = words if len(words) == len(matrix) else [f"label {number}" for number in range(len(matrix))]
    for name, vector in zip(names, matrix, strict=True):
        if not vector.isfinite().all() or not vector.any():
            raise TrainingError(f"{path}: each label needs a finite vector with a direction: {name} has none")
    first: dict[tuple[float, ...], int] = {}
    for number, vector in enumerate(matrix.tolist()):
        other = first.setdefault(tuple(vector), number)
        if other != number:
            raise TrainingError(f"{path}: {names[other]} and {names[number]} have the same vector")


def _read_numpy(path: Path) -> list[Tensor]:
    try:
        array = np.load(path)  # by default NumPy reads plain numbers only, no pickles
    except (ValueError, EOFError) as error:
        raise TrainingError(f"{path} is no NumPy file of plain numbers: {error}") from None
    if array.ndim not in (2, 3) or array.dtype.kind not in "fiu":
        raise TrainingError(
            f"{path} holds {array.dtype} of shape {array.shape}: expected numbers, (K, classes, size) or "
            "(classes, size)"
        )
    return list(torch.from_numpy(array if array.ndim == 3 else array[None]).float())


def _read_words(path: Path, words: Sequence[str]) -> Tensor:
    if not words:
        raise TrainingError(f"{path} holds vectors of words: name the labels' words, in their order")
    choices = [dict.fromkeys([word, word.lower(), word.lower().split()[-1]]) for word in words]
    wanted = {choice for spellings in choices for choice in spellings}
    vectors: dict[str, list[float]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            word, *numbers = line.rstrip().split(" ")
            if word in wanted and word not in vectors and len(numbers) > 1:
                try:
                    vectors[word] = [float(number) for number in numbers]
                except ValueError:
                    raise TrainingError(f"{path}: the line of '{word}' holds more than numbers") from None
    pairs = zip(words, choices, strict=True)
    missing = [word for word, spellings in pairs if not vectors.keys() & spellings.keys()]
    if missing:
        raise TrainingError(f"{path} has no vector for {', '.join(missing)}")
    rows = [next(vectors[choice] for choice in spellings if choice in vectors) for spellings in choices]
    if len({len(row) for row in rows}) > 1:
        raise TrainingError(f"{path}: the vectors have {sorted({len(row) for row in rows})} numbers")
    return torch.tensor(rows)
