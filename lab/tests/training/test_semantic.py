"""Semantic labels: the head, and label vectors from files."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramwatch import TrainingError
from gramwatch_lab.methods.semantic import SemanticHead
from gramwatch_lab.training import objective_of
from gramwatch_lab.training.semantic import random_vectors, read_vectors
from lab.tests.training.small import small_mlp

# --- the head ------------------------------------------------------------------------------------------


def test_the_semantic_head_measures_cosine_distances():
    labels = [torch.randn(3, 5), torch.randn(3, 8)]
    head = SemanticHead(6, labels)
    x = torch.randn(4, 6)
    vectors = head.predict(x).detach().split([5, 8], 1)
    distance = [
        [
            sum((1 - F.cosine_similarity(v[n], e[c], 0)) / 2 for v, e in zip(vectors, labels, strict=True))
            for c in range(3)
        ]
        for n in range(4)
    ]
    assert torch.allclose(head(x), -torch.tensor(distance), atol=1e-6)
    loss, _ = objective_of("semantic").loss(head, x, torch.tensor([0, 2, 1, 1]), None)
    assert torch.allclose(loss, torch.tensor([distance[n][c] for n, c in enumerate([0, 2, 1, 1])]).mean())


# --- label vectors -------------------------------------------------------------------------------------


def test_random_label_vectors_are_unit_directions_fixed_by_their_seed():
    result = torch.stack(random_vectors(5, 10, 100, seed=3))
    assert result.shape == (5, 10, 100)
    assert torch.allclose(result.norm(dim=2), torch.ones(5, 10))
    assert torch.equal(result, torch.stack(random_vectors(5, 10, 100, seed=3)))
    assert (result @ result.transpose(1, 2) - torch.eye(10)).abs().max() < 0.5
    assert not torch.allclose(result[0], result[1])


def test_label_vectors_are_read_from_files(tmp_path):
    array = np.random.default_rng(0).normal(size=(2, 3, 4))
    np.save(tmp_path / "two.npy", array)
    np.save(tmp_path / "one.npy", array[0])
    assert np.allclose(torch.stack(read_vectors(tmp_path / "two.npy")).numpy(), array)
    (words,) = read_vectors(tmp_path / "one.npy")
    assert np.allclose(words.numpy(), array[0])
    text = "4 2\nship 1 2\nfish 3 4\nShip 9 9\ncat -1 0.5\n"
    (tmp_path / "words.txt").write_text(text, encoding="utf-8")
    (result,) = read_vectors(tmp_path / "words.txt", ["Cat", "Ship", "aquarium fish"])
    assert result.tolist() == [[-1, 0.5], [9, 9], [3, 4]]
    (tmp_path / "more.txt").write_text("ship 1 2 3\nfish 3 4 5\ncat 6 7 8\n", encoding="utf-8")
    files = [str(tmp_path / "words.txt"), str(tmp_path / "more.txt")]
    objective = objective_of("semantic", {"vectors": files, "words": ["cat", "ship", "fish"]})
    net = small_mlp()
    objective.prepare(net)
    assert [m.shape for m in net[5].labels] == [(3, 2), (3, 3)]
    assert net[5].predict.out_features == 5
    head = net[5]
    objective.prepare(net)
    assert net[5] is head


def test_files_of_label_vectors_that_do_not_serve_are_refused(tmp_path):
    def refused(name, match, words=()):
        with pytest.raises(TrainingError, match=match):
            read_vectors(tmp_path / name, words)

    refused("none.npy", "there is no file .*none.npy")
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}]), allow_pickle=True)
    refused("objects.npy", "no NumPy file of plain numbers")
    np.save(tmp_path / "flat.npy", np.zeros(4))
    refused("flat.npy", r"shape \(4,\): expected numbers")
    np.save(tmp_path / "zero.npy", np.zeros((3, 4)))
    refused("zero.npy", "finite vector with a direction: label 0 has none")
    np.save(tmp_path / "same.npy", np.ones((2, 3, 4)))
    refused("same.npy", "label 0 and label 1 have the same vector")
    lines = ["cat 1 2", "dog 1 2 3", "cow 1 x", "hen 1 nan", "pig inf 1", "tree 3 4", "rat 0 0"]
    (tmp_path / "w.txt").write_text("\n".join(lines), encoding="utf-8")
    refused("w.txt", "a finite vector with a direction: hen has none", ["cat", "hen"])
    refused("w.txt", "a finite vector with a direction: pig has none", ["pig", "cat"])
    refused("w.txt", "a finite vector with a direction: rat has none", ["cat", "rat"])
    refused("w.txt", "oak tree and maple tree have the same vector", ["cat", "oak tree", "maple tree"])
    refused("w.txt", "name the labels' words")
    refused("w.txt", "no vector for ship, car", ["cat", "ship", "car"])
    refused("w.txt", r"the vectors have \[2, 3\] numbers", ["cat", "dog"])
    refused("w.txt", "line of 'cow' holds more than numbers", ["cow"])
    np.save(tmp_path / "two.npy", np.eye(2, 4))
    with pytest.raises(TrainingError, match="vectors for 2 labels, the network has 3"):
        objective_of("semantic", {"vectors": [str(tmp_path / "two.npy")]}).prepare(small_mlp())
    with pytest.raises(TrainingError, match="ReLU has no linear layer"):
        objective_of("semantic").prepare(nn.ReLU())
