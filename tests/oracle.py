"""The paper, transcribed literally in float64: loops, matrices and all. The oracle for everything fast.

Notation as in the paper: D an example, D_c its predicted class, l a layer, p an order, F_l(D) the n x pixels
feature map. NOTES 1-4 refer to how the published figures were computed: row sums before the root, division
by the confidence, 1e-6 and 1e-7 in denominators.
"""

import math

import numpy as np


def signed_root(t: np.ndarray, p: int) -> np.ndarray:
    return np.sign(t) * np.abs(t) ** (1.0 / p)


def gram_before_root(feature_map: np.ndarray, p: int) -> np.ndarray:
    """F^p F^pT of Eq. 2, the n x n matrix before its p-th root."""
    values = feature_map.astype(np.float64)
    power = values.copy()
    for _ in range(p - 1):
        power *= values
    return power @ power.T


def stat(feature_map: np.ndarray, p: int, statistic: str) -> np.ndarray:
    """Line 8 of Algorithm 1 for one example, layer and order."""
    a = gram_before_root(feature_map, p)
    n = len(a)
    if statistic == "row_sums":
        return signed_root(a.sum(1), p)
    if statistic == "row_sums_of_roots":
        return signed_root(a, p).sum(1)
    if statistic == "diagonal":
        return signed_root(np.diag(a), p)
    if statistic == "off_diagonal":
        return signed_root(np.where(np.eye(n, dtype=bool), 0, a).sum(1), p)
    assert statistic == "triangle"
    return np.array([signed_root(a[i, j], p) for i in range(n) for j in range(i, n)])


def magnitude(feature_map: np.ndarray, p: int, statistic: str) -> np.ndarray:
    """The sum of magnitudes that cancel in a statistic of odd order, before the root."""
    a = gram_before_root(np.abs(feature_map.astype(np.float64)), p)
    n = len(a)
    if statistic == "row_sums":
        return a.sum(1)
    if statistic == "diagonal":
        return np.diag(a)
    if statistic == "off_diagonal":
        return np.where(np.eye(n, dtype=bool), 0, a).sum(1)
    assert statistic == "triangle"
    return np.array([a[i, j] for i in range(n) for j in range(i, n)])


def scaled(feature_map: np.ndarray, p: int, statistic: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`stat` and `magnitude` for activations of any size, even where their powers underflow float64.

    Gives for each channel its largest product q, and `stat` and `magnitude` before the root of the products
    divided by q. The statistic is q times the signed root of the second.
    """
    values = feature_map.astype(np.float64)
    products = values[:, None] * values[None]
    own = np.eye(len(values), dtype=bool)
    if statistic == "diagonal":
        products = products[own][:, None]
    elif statistic == "off_diagonal":
        products[own] = 0
    else:
        assert statistic == "row_sums"
    q = np.abs(products).max((1, 2))
    share = products / np.where(q == 0, 1, q)[:, None, None]
    return q, (share**p).sum((1, 2)), (np.abs(share) ** p).sum((1, 2))


def compute_bounds(features, predicted, orders, statistic, classes, bounds="min_max"):
    """Algorithm 1. `features[D][l]` is a feature map; returns lower, upper as [c][l][p] -> array.

    For `mean_variance` (App. C): means and variances.
    """
    layers = range(len(features[0]))
    first = [[dict.fromkeys(orders) for _ in layers] for _ in range(classes)]
    second = [[dict.fromkeys(orders) for _ in layers] for _ in range(classes)]
    for c in range(classes):
        examples = [d for d in range(len(features)) if predicted[d] == c]
        for layer in layers:
            for p in orders:
                stats = np.array([stat(features[d][layer], p, statistic) for d in examples])
                if len(stats) == 0:
                    continue
                if bounds == "min_max":
                    first[c][layer][p], second[c][layer][p] = stats.min(0), stats.max(0)
                else:
                    first[c][layer][p] = stats.mean(0)
                    second[c][layer][p] = stats.var(0)
    return first, second


def delta_min_max(minimum: float, maximum: float, value: float) -> float:
    """Eq. 3, with the denominators of NOTES 3."""
    if value < minimum:
        return (minimum - value) / abs(minimum + 1e-6)
    if value > maximum:
        return (value - maximum) / abs(maximum + 1e-6)
    return 0.0


def layer_deviation(feature_map, c, layer, orders, statistic, first, second, bounds="min_max") -> float:
    """Eq. 4: delta_l(D)."""
    total = 0.0
    for p in orders:
        values = stat(feature_map, p, statistic)
        low, high = first[c][layer][p], second[c][layer][p]
        for i in range(len(values)):
            if bounds == "min_max":
                total += delta_min_max(low[i], high[i], values[i])
            else:
                floor = (1e-3 * abs(low[i]) + 1e-6) ** 2
                total += (values[i] - low[i]) ** 2 / max(high[i], floor)
    return total


def deviations(features, predicted, orders, statistic, first, second, bounds="min_max") -> np.ndarray:
    """delta_l(D) for each example and layer."""
    return np.array(
        [
            [
                layer_deviation(f, predicted[d], layer, orders, statistic, first, second, bounds)
                for layer, f in enumerate(features[d])
            ]
            for d in range(len(features))
        ]
    )


def softmax_confidence(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return (shifted / shifted.sum(1, keepdims=True)).max(1)


def total_deviation(validation, validation_confidence, test, test_confidence, confidence, normalise=True):
    """Eq. 5 and its variants (NOTES 2): Delta of each test example."""

    def totals(deltas, conf):
        scores = []
        for d in range(len(deltas)):
            total = 0.0
            for layer in range(deltas.shape[1]):
                value = deltas[d, layer] / (conf[d] if confidence == "divide" else 1.0)
                total += value / (expectation[layer] + 1e-7) if normalise else value
            scores.append(total)
        return np.array(scores)

    divided = validation / validation_confidence[:, None] if confidence == "divide" else validation
    expectation = divided.mean(0)
    result = totals(test, test_confidence)
    if confidence == "divide_total":
        return result / test_confidence
    if confidence == "subtract":
        return result / totals(validation, validation_confidence).max() - test_confidence
    return result


def p_value(calibration: np.ndarray, score: float) -> float:
    return (1 + sum(1 for s in calibration if s >= score)) / (len(calibration) + 1)


def threshold(calibration: np.ndarray, level: float) -> float:
    """Eq. 6's tau: the ceil((n + 1) level)-th smallest."""
    rank = math.ceil(round((len(calibration) + 1) * level, 9))
    return sorted(calibration)[rank - 1]


def splitmix64(state: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood, 2014) from a state: its output."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def drawn(examples: int, seed: int) -> np.ndarray:
    """The random order of calibration examples: the first half standardises, the rest ranks.

    It is that of the outputs of a generator whose first state is made of the seed by the same function.
    """
    outputs = [splitmix64(splitmix64(seed) + i * 0x9E3779B97F4A7C15) for i in range(examples)]
    return np.array(sorted(range(examples), key=outputs.__getitem__))
