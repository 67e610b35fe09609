"""Methods on penultimate features: against the papers' formulas in loops, and against pytorch-ood."""

import sys
import types

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gramwatch.detect.passes import plan_for
from gramwatch.errors import GramwatchWarning, InputError, NotFittedError, TapError
from gramwatch.evaluation.evaluate import fit_together
from gramwatch.files import artifact
from gramwatch.methods import (
    FDBD,
    KNN,
    METHODS,
    NCI,
    CADRef,
    MahalanobisPP,
    Method,
    NNGuide,
    RelativeMahalanobis,
    RelativeMahalanobisPP,
    ViM,
)
from gramwatch.methods.features import largest_products, unit
from gramwatch.observe.observation import Head, Observation
from gramwatch.watch import Look
from tests.methods.observed import CLASSES, SMALL, WIDTH, Net, double, fitted, observed, oracle_relative

IN_PYTORCH_OOD = (KNN, NNGuide, ViM, FDBD, NCI, RelativeMahalanobis)
CASES = (*IN_PYTORCH_OOD, MahalanobisPP, RelativeMahalanobisPP, CADRef)
WITH_HEAD = (ViM, FDBD, NCI, CADRef)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))


def log_sum_exp(logits: np.ndarray) -> float:
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max())


# --- the papers' formulas, in loops ---------------------------------------------------------------------


def oracle_knn(training: Observation, new: Observation, k: int) -> list[float]:
    scores = []
    for h in double(new.features):
        u = h / np.sqrt((h**2).sum())
        distances = [np.sqrt(((u - g / np.sqrt((g**2).sum())) ** 2).sum()) for g in double(training.features)]
        scores.append(sorted(distances)[k - 1])
    return scores


def oracle_nnguide(training: Observation, new: Observation, k: int) -> list[float]:
    bank = []
    for g, z in zip(double(training.features), double(training.logits), strict=True):
        bank.append(log_sum_exp(z) * g / np.sqrt((g**2).sum()))
    scores = []
    for h, z in zip(double(new.features), double(new.logits), strict=True):
        u = h / np.sqrt((h**2).sum())
        guidance = np.mean(sorted((float(u @ b) for b in bank), reverse=True)[:k])
        scores.append(-log_sum_exp(z) * guidance)
    return scores


def oracle_vim(training: Observation, new: Observation, d: int) -> list[float]:
    assert training.head is not None
    w, b = double(training.head.weight), double(training.head.bias)
    o = -np.linalg.pinv(w) @ b
    x = double(training.features) - o
    values, vectors = np.linalg.eig(x.T @ x)
    r = vectors[:, np.argsort(-values.real)[d:]].real
    top = np.mean([z.max() for z in double(training.logits)])
    alpha = top / np.mean([np.linalg.norm(r.T @ row) for row in x])
    scores = []
    for h, z in zip(double(new.features), double(new.logits), strict=True):
        virtual = alpha * np.linalg.norm(r @ (r.T @ (h - o)))
        share = np.exp(virtual) / (np.exp(virtual) + np.exp(z).sum())  # Eq. 7
        scores.append(float(np.log(share / (1 - share))))
    return scores


def oracle_fdbd(training: Observation, new: Observation) -> list[float]:
    assert training.head is not None
    w = double(training.head.weight)
    mean = double(training.features).mean(0)
    scores = []
    for h, z in zip(double(new.features), double(new.logits), strict=True):
        y = int(z.argmax())
        distances = [abs(z[y] - z[c]) / np.linalg.norm(w[y] - w[c]) for c in range(len(z)) if c != y]
        scores.append(-np.mean(distances) / np.linalg.norm(h - mean))
    return scores


def oracle_nci(training: Observation, new: Observation, alpha: float) -> list[float]:
    assert training.head is not None
    w = double(training.head.weight)
    mean = double(training.features).mean(0)
    scores = []
    for h, z in zip(double(new.features), double(new.logits), strict=True):
        y = int(z.argmax())
        cosine = (h - mean) @ w[y] / (np.linalg.norm(h - mean) * np.linalg.norm(w[y]))
        scores.append(-(cosine * np.linalg.norm(w[y]) + alpha * np.abs(h).sum()))
    return scores


def oracle_mahalanobis_pp(training: Observation, new: Observation, *, relative: bool = False) -> list[float]:
    """As the authors' code computes it, with the pseudo-inverse of scikit-learn's `EmpiricalCovariance`."""
    x = np.array([h / np.linalg.norm(h) for h in double(training.features)])
    labels = double(training.labels)
    means = np.array([x[labels == c].mean(0) for c in sorted(set(labels))])
    centred = np.concatenate([x[labels == c] - x[labels == c].mean(0) for c in sorted(set(labels))])
    precision = np.linalg.pinv(centred.T @ centred / len(x), hermitian=True)
    whole = np.linalg.pinv((x - x.mean(0)).T @ (x - x.mean(0)) / len(x), hermitian=True)
    scores = []
    for h in double(new.features):
        u = h / np.linalg.norm(h)
        nearest = min((u - mean) @ precision @ (u - mean) for mean in means)
        background = (u - x.mean(0)) @ whole @ (u - x.mean(0))
        scores.append(float(nearest - background if relative else nearest))
    return scores


def oracle_cadref(training: Observation, new: Observation) -> list[float]:
    """As the authors' code computes it, with the energy, but for an energy near zero or below."""
    assert training.head is not None
    w = double(training.head.weight)
    x, predicted = double(training.features), double(training.logits).argmax(1)
    mean_energy = np.mean([log_sum_exp(z) for z in double(training.logits)])
    scores = []
    for h, z in zip(double(new.features), double(new.logits), strict=True):
        y = int(z.argmax())
        distance = h - x[predicted == y].mean(0)
        positive = sum(max(d * np.sign(s), 0) for d, s in zip(distance, w[y], strict=True)) / np.abs(h).sum()
        negative = sum(max(-d * np.sign(s), 0) for d, s in zip(distance, w[y], strict=True)) / np.abs(h).sum()
        scores.append(positive / max(log_sum_exp(z), 0.01 * mean_energy) + negative / mean_energy)
    return scores


def expected(method: type[Method], training: Observation, new: Observation) -> list[float]:
    if method is KNN:
        return oracle_knn(training, new, 7)
    if method is NNGuide:
        return oracle_nnguide(training, new, 4)
    if method is ViM:
        return oracle_vim(training, new, 5)
    if method is FDBD:
        return oracle_fdbd(training, new)
    if method is NCI:
        return oracle_nci(training, new, 0.02)
    if issubclass(method, MahalanobisPP):
        return oracle_mahalanobis_pp(training, new, relative=method is RelativeMahalanobisPP)
    if method is CADRef:
        return oracle_cadref(training, new)
    return oracle_relative(training, new)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", CASES)
def test_formula(method: type[Method], device: str, net: Net, head: Head, training: Observation) -> None:
    new = observed(head, 25, 1, scale=2.0, device=device)
    scores = fitted(method, net, training).judged(new)
    assert scores.dtype == torch.float64
    assert scores.device.type == device
    np.testing.assert_allclose(double(scores), expected(method, training, new), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", CASES)
def test_one_by_one_is_the_same(
    method: type[Method], net: Net, training: Observation, new: Observation
) -> None:
    detector = fitted(method, net, training)
    alone = torch.cat([detector.judged(new[i : i + 1]) for i in range(len(new))])
    torch.testing.assert_close(detector.judged(new), alone, rtol=1e-9, atol=1e-9)


class OneDevice(TorchDispatchMode):
    """No operation but a copy may have tensors of several devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        if "copy" not in str(func):
            assert len({t.device for t in given}) < 2, f"{func} on several devices"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", CASES)
def test_no_tensor_stays_behind(method: type[Method], net: Net, training: Observation, head: Head) -> None:
    """On another device, if one without values, everything happens there and not on the CPU."""
    detector = fitted(method, net, training)
    elsewhere = observed(head, 25, 1, device="meta")
    with OneDevice():
        assert detector.judged(elsewhere).device.type == "meta"
    assert all(tensor.device.type == "cpu" for tensor in detector.state().values())


def test_a_copy_on_another_device_is_kept_until_the_next_fit(
    net: Net, training: Observation, new: Observation
) -> None:
    detector, elsewhere = fitted(ViM, net, training), torch.device("meta")
    copy = detector.on(elsewhere, "residual_")
    assert copy.device == elsewhere
    assert detector.on(elsewhere, "residual_") is copy
    assert detector.on(torch.device("cpu"), "residual_") is detector.state()["residual_"]
    detector.take(new)
    detector.finish()
    assert detector.on(elsewhere, "residual_") is not copy


@pytest.mark.parametrize("method", CASES)
def test_autocast_changes_nothing(
    method: type[Method], net: Net, training: Observation, new: Observation
) -> None:
    detector = fitted(method, net, training)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fitted(method, net, training).judged(new)
    assert torch.equal(inside, detector.judged(new))


def test_autocast_finds_the_same_neighbours() -> None:
    """Neighbours too close for bfloat16 to tell apart."""
    bank = unit(1 + 0.01 * torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(0)))
    found = largest_products(bank[:20], bank, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(largest_products(bank[:20], bank, 5), found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["high", "medium", None])
def test_fast_products_find_the_same_neighbours(
    precision: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = unit(1 + 0.01 * torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(0))).to(device)
    found = (bank[:20].double() @ bank.double().T).topk(5).indices

    def setting() -> str:
        if precision is None:
            raise RuntimeError("mix of the legacy and new APIs")
        return precision

    monkeypatch.setattr(torch, "get_float32_matmul_precision", setting)
    seen: list[torch.dtype] = []
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: (seen.append(a.dtype), torch.matmul(a, b))[1])
    assert torch.equal(largest_products(bank[:20], bank, 5), found)
    assert set(seen) == {torch.float64}


@pytest.mark.parametrize("method", [KNN, ViM, RelativeMahalanobis, MahalanobisPP, CADRef])
def test_far_away_scores_higher(method: type[Method], net: Net, training: Observation, head: Head) -> None:
    detector = fitted(method, net, training)
    assert training.features is not None
    strange = -training.features
    far = Observation(head(strange), strange, head)
    assert detector.judged(far).mean() > detector.judged(training).mean()


# --- pytorch-ood ----------------------------------------------------------------------------------------


def linear(head: Head) -> nn.Linear:
    layer = nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        layer.weight.copy_(head.weight)
        layer.bias.copy_(head.bias)
    return layer


@pytest.mark.parametrize("method", IN_PYTORCH_OOD)
def test_pytorch_ood(
    method: type[Method], net: Net, training: Observation, new: Observation, head: Head
) -> None:
    detectors = pytest.importorskip("pytorch_ood.detector")
    if method is KNN:
        theirs = detectors.KNN(None, k=7)
    elif method is NNGuide:
        theirs = detectors.NNGuide(None, linear(head), k=4)
    elif method is ViM:
        theirs = detectors.ViM(None, d=5, w=head.weight, b=head.bias)
    elif method is FDBD:
        theirs = detectors.fDBD(None, linear(head))
    elif method is NCI:
        theirs = detectors.NCI(None, linear(head), alpha=0.02)
    else:
        theirs = detectors.RMD(None)
    theirs.fit_features(training.features, training.labels)
    scores = double(theirs.predict_features(new.features))
    if method is RelativeMahalanobis:
        scores = scores * len(training)  # theirs does not divide the covariances by the number of examples
    ours = double(fitted(method, net, training).judged(new))
    np.testing.assert_allclose(ours, scores, rtol=1e-3, atol=1e-4)
    assert (ours.argsort() == scores.argsort()).all()


def test_pytorch_ood_elsewhere(net: Net, training: Observation, new: Observation, head: Head) -> None:
    """Where the two differ, as the pages on the methods say."""
    detectors = pytest.importorskip("pytorch_ood.detector")
    assert training.features is not None
    assert new.features is not None
    features, labels = training.features, training.labels

    twice = linear(head)
    with torch.no_grad():
        twice.weight[1], twice.bias[1] = twice.weight[0], twice.bias[0]
    theirs = detectors.fDBD(None, twice).fit_features(features).predict_features(new.features)
    assert theirs.isnan().any()
    same = Head(twice.weight.detach(), twice.bias.detach())
    seen, now = (Observation(same(f), f, same) for f in (features, new.features))
    assert fitted(FDBD, net, seen).judged(now).isfinite().all()

    mirrored = torch.cat((features[:1], -features[:1]))
    middle = torch.zeros(1, WIDTH)
    theirs = detectors.NCI(None, linear(head)).fit_features(mirrored).predict_features(middle)
    assert theirs.isnan().all()
    ours = fitted(NCI, net, Observation(head(mirrored), mirrored, head), alpha=0.0)
    assert ours.judged(Observation(head(middle), middle, head)) == 0

    wide = detectors.ViM(None, d=WIDTH + 1, w=head.weight, b=head.bias).fit_features(features, labels)
    assert wide.d == WIDTH // 2

    dead = features.clone()
    dead[:, 3] = 0

    def relative(scale: float) -> tuple[Tensor, Tensor]:
        both = Observation(training.logits, scale * dead, head, labels=labels)
        with pytest.warns(GramwatchWarning, match="singular"):
            detector = fitted(RelativeMahalanobis, net, both)
        theirs = detectors.RMD(None).fit_features(scale * dead, labels)
        ours = detector.judged(Observation(new.logits, scale * new.features, head))
        return ours, theirs.predict_features(scale * new.features).double()

    (ours, theirs), (ours_larger, theirs_larger) = relative(1.0), relative(10.0)
    torch.testing.assert_close(
        ours, ours_larger, rtol=1e-5, atol=1e-5
    )  # the unit of the features is no matter
    assert not torch.allclose(theirs, theirs_larger, rtol=0.1)
    assert theirs.argsort().tolist() != ours.argsort().tolist()


def test_near_duplicates(net: Net) -> None:
    """A neighbour at a millionth of the length: here it is measured, not lost in rounding."""
    base = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(5))
    training = Observation(torch.zeros(60, CLASSES), base)
    step = torch.zeros(60, WIDTH)
    step[:, 0] = 1e-5
    scores = fitted(KNN, net, training, k=1).judged(Observation(torch.zeros(60, CLASSES), base + step))
    np.testing.assert_allclose(
        double(scores), oracle_knn(training, Observation(torch.zeros(60, CLASSES), base + step), 1), atol=1e-7
    )
    same = fitted(KNN, net, training, k=1).judged(training)
    assert (same == 0).all()


# --- neighbours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece", [1, 50, 200, 10_000])
def test_products_in_pieces(piece: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    bank = torch.randn(300, WIDTH, generator=generator).to(device)
    queries = torch.randn(17, WIDTH, generator=generator).to(device)
    whole = (queries.double() @ bank.double().T).topk(9).indices
    assert largest_products(queries, bank, 9, piece).tolist() == whole.tolist()


def test_bank_in_pieces() -> None:
    """A bank wider than one piece: the best of each are merged."""
    bank = torch.randn(2**16 + 500, 3, generator=torch.Generator().manual_seed(0))
    queries = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    whole = (queries @ bank.T).topk(6).values
    found = largest_products(queries, bank, 6)
    torch.testing.assert_close((queries.unsqueeze(1) * bank[found]).sum(2), whole)


@pytest.mark.parametrize("method", [KNN, NNGuide])
@pytest.mark.parametrize("piece", [1, 333, 5000])
def test_pieces_change_nothing(
    method: type[Method],
    piece: int,
    net: Net,
    training: Observation,
    new: Observation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    detector = fitted(method, net, training)
    whole = detector.score(new)
    monkeypatch.setattr("gramwatch.methods.features.PIECE", piece)
    torch.testing.assert_close(detector.score(new), whole, rtol=1e-12, atol=1e-12)


class FlatIndex:
    """What is used of `faiss.IndexFlatIP`."""

    searches = 0

    def __init__(self, width: int) -> None:
        self.bank = np.zeros((0, width), dtype=np.float32)

    def add(self, entries: np.ndarray) -> None:
        assert entries.dtype == np.float32
        assert entries.flags["C_CONTIGUOUS"]
        self.bank = np.concatenate((self.bank, entries))

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        assert queries.dtype == np.float32
        FlatIndex.searches += 1
        products = queries @ self.bank.T
        where = np.argsort(-products, 1)[:, :k]
        return np.take_along_axis(products, where, 1), where


@pytest.mark.parametrize("method", [KNN, NNGuide])
@pytest.mark.parametrize("real", [False, True])
def test_faiss(
    method: type[Method],
    real: bool,
    net: Net,
    training: Observation,
    new: Observation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    without = fitted(method, net, training).judged(new)
    monkeypatch.delitem(sys.modules, "faiss")
    if real:
        pytest.importorskip("faiss")
    else:
        module = types.ModuleType("faiss")
        monkeypatch.setattr(module, "IndexFlatIP", FlatIndex, raising=False)
        monkeypatch.setitem(sys.modules, "faiss", module)
        monkeypatch.setattr(FlatIndex, "searches", 0)
    detector = fitted(method, net, training)
    torch.testing.assert_close(detector.judged(new), without, rtol=1e-12, atol=1e-12)
    if not real:
        assert FlatIndex.searches == 1


def test_refitting_adds_to_the_bank(net: Net, training: Observation, new: Observation) -> None:
    detector = fitted(KNN, net, training[torch.arange(0, 90, 2)])
    detector.judged(new)
    detector.take(training[torch.arange(1, 90, 2)])
    detector.finish()
    assert torch.equal(detector.judged(new), fitted(KNN, net, training).judged(new))


@pytest.mark.parametrize("method", [KNN, NNGuide])
def test_too_few_for_k(method: type[Method], net: Net, training: Observation) -> None:
    with pytest.warns(GramwatchWarning, match=r"6 training example.*k=9.*takes them all. Fit on more"):
        few = fitted(method, net, training[:6], k=9)
    assert torch.equal(few.judged(training), fitted(method, net, training[:6], k=6).judged(training))
    with pytest.raises(ValueError, match=r"most_examples=5 .* k=9"):
        method(net, k=9, most_examples=5)
    with pytest.raises(ValueError, match="at least 1"):
        method(net, k=0)
    assert fitted(method, net, training[:6], k=6).judged(training).isfinite().all()


def test_bank_is_bounded_and_sampled_by_the_seed(net: Net, training: Observation) -> None:
    banks = []
    for seed in (0, 0, 1):
        detector = fitted(KNN, net, training, most_examples=20, seed=seed)
        assert isinstance(detector, KNN)
        assert detector.bank_ is not None
        assert detector.bank_.shape == (20, WIDTH)
        banks.append(detector.bank_)
    assert torch.equal(banks[0], banks[1])
    assert not torch.equal(banks[0], banks[2])


def test_feature_of_zeros(net: Net, training: Observation) -> None:
    nothing = Observation(torch.zeros(1, CLASSES), torch.zeros(1, WIDTH))
    torch.testing.assert_close(fitted(KNN, net, training).judged(nothing), torch.ones(1).double())
    assert fitted(NNGuide, net, training).judged(nothing) == 0


def test_the_bank_moves_with_the_device(net: Net, training: Observation) -> None:
    detector = fitted(KNN, net, training)
    assert isinstance(detector, KNN)
    assert detector.on(torch.device("cpu"), "bank_") is detector.bank_
    assert detector.on(torch.device("meta"), "bank_").device.type == "meta"
    assert detector.on(torch.device("cpu"), "bank_") is not None


# --- fDBD and NCI ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FDBD, NCI])
def test_feature_at_the_mean(method: type[Method], net: Net, head: Head) -> None:
    """Nothing to divide by, and yet a number."""
    features = torch.stack((torch.ones(WIDTH), -torch.ones(WIDTH)))
    detector = fitted(method, net, Observation(head(features), features, head))
    middle = torch.zeros(1, WIDTH)
    assert detector.judged(Observation(head(middle), middle, head)).isfinite().all()


# --- what all share -------------------------------------------------------------------------------------


def loader(n: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % CLASSES
    inputs = torch.randn(n, 16, generator=generator) + labels.unsqueeze(1)
    return list(zip(inputs.split(32), labels.split(32), strict=True))


@pytest.mark.parametrize("method", CASES)
def test_through_a_network(method: type[Method], tmp_path: object) -> None:
    from pathlib import Path

    net = Net().eval()
    detector = method(net, **SMALL.get(method, {}), level=0.9)
    with pytest.raises(NotFittedError):
        detector.score_all(loader(10, 2), progress=False)
    detector.fit(loader(200, 0), progress=False).calibrate(loader(60, 1), progress=False)
    scores = detector.score_all(loader(40, 2), progress=False)
    with torch.no_grad():
        x = torch.cat([inputs for inputs, _ in loader(200, 0)])
        y = torch.cat([inputs for inputs, _ in loader(40, 2)])
        head = Head(net.head.weight.detach(), net.head.bias.detach())
        seen, new = (Observation(net(t), torch.relu(net.body(t)), head) for t in (x, y))
    labelled = Observation(seen.logits, seen.features, head, labels=torch.arange(200) % CLASSES)
    wanted = expected(method, labelled, new)
    np.testing.assert_allclose(double(scores), wanted, rtol=1e-3, atol=1e-4)

    path = Path(str(tmp_path)) / "detector.safetensors"
    detector.save(path)
    saved = artifact.read(path)
    assert saved.header["detector"] == method.name
    back = METHODS[method.name].from_artifact(saved, net)
    assert type(back) is method
    assert back.threshold_ == detector.threshold_
    assert torch.equal(back.score_all(loader(40, 2), progress=False), scores)
    assert all(getattr(back, name) == getattr(detector, name) for name in method.settings)
    assert torch.equal(back(y).is_ood, detector(y).is_ood)


def test_fit_together_is_the_same() -> None:
    net = Net().eval()
    together = {method.name: method(net, **SMALL.get(method, {})) for method in CASES}
    fit_together(together, loader(200, 0), progress=False)
    x = loader(40, 2)[0][0]
    members = list(together.values())
    observations = plan_for(members, Look(members[0].network, x))(x)
    for method, observation in zip(CASES, observations, strict=True):
        alone = method(net, **SMALL.get(method, {})).fit(loader(200, 0), progress=False)
        assert torch.equal(together[method.name].judged(observation), alone.score_inputs(x)[1])


@pytest.mark.parametrize("method", CASES)
def test_named_features(method: type[Method]) -> None:
    net = Net().eval()
    detector = method(net, **SMALL.get(method, {}), features="body")
    if method in WITH_HEAD:
        with pytest.raises(TapError, match="needs the weights of the linear layer that makes the logits"):
            detector.fit(loader(200, 0), progress=False)
    else:
        detector.fit(loader(200, 0), progress=False)
        assert detector.score_all(loader(40, 2), progress=False).isfinite().all()


@pytest.mark.parametrize("method", CASES)
def test_missing_observations(
    method: type[Method], net: Net, training: Observation, new: Observation
) -> None:
    detector = fitted(method, net, training)
    with pytest.raises(InputError, match="penultimate features, which were not observed"):
        detector.judged(Observation(new.logits, None, new.head))
    if method in (FDBD, NCI):
        with pytest.raises(TapError, match=f"{method.name} needs the weights"):
            detector.judged(Observation(new.logits, new.features))


@pytest.mark.parametrize("method", CASES)
def test_what_is_not_finite(method: type[Method], net: Net, training: Observation, new: Observation) -> None:
    """It is left out of fitting, and out-of-distribution when judged."""
    assert training.features is not None
    assert training.labels is not None
    finite = torch.ones(90, dtype=torch.bool)
    finite[5] = False
    features = training.features.clone()
    features[5, 0] = torch.nan
    broken = Observation(training.logits, features, training.head, labels=training.labels, finite=finite)
    detector = fitted(method, net, broken)
    rounding = 1e-9 if issubclass(method, MahalanobisPP) else 0.0  # of sums about another first mean
    without = fitted(method, net, training[finite])
    torch.testing.assert_close(detector.judged(new), without.judged(new), rtol=rounding, atol=rounding)
    scores = detector.judged(broken)
    assert scores[5] == torch.inf
    assert scores[finite].isfinite().all()


@pytest.mark.parametrize("method", CASES)
def test_record(method: type[Method]) -> None:
    record = method.record
    assert METHODS[method.name] is method
    assert record.fitted
    assert all((record.title, record.paper, record.equation, record.limits))
    assert record.cost != "none"
    assert method.looks_at == ({"features", "head"} if method in WITH_HEAD else {"features"})
