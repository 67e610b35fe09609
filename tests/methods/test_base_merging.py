"""Methods that are fitted further and merged, and files from before counts and sums were kept."""

import pytest
import torch

import gramwatch
from gramwatch import InputError, NotFittedError
from gramwatch.files import artifact
from gramwatch.methods import FDBD, MSP, NCI, Energy, Mahalanobis
from tests.guarded import Net, images, made


@pytest.fixture
def net() -> Net:
    return made()


@pytest.mark.parametrize("method", [FDBD, NCI, Energy, Mahalanobis])
def test_methods_that_merge_exactly(method, net, tmp_path):
    x = images(300, 0)
    whole, one, two = (method(net).fit(part.split(50), progress=False) for part in (x, x[:90], x[90:]))
    one.calibrate([images(50, 3)], progress=False)
    one.merge(two)
    new = images(20, 2)
    torch.testing.assert_close(one.score_inputs(new)[1], whole.score_inputs(new)[1], rtol=1e-9, atol=1e-12)
    with pytest.raises(NotFittedError, match="not calibrated"):
        one(new)
    with pytest.raises(ValueError, match=r"different methods|differ in"):
        one.merge(MSP(net))
    if method is Energy:
        with pytest.raises(ValueError, match="differ in temperature"):
            one.merge(Energy(net, temperature=2.0))


def test_a_mean_saved_without_its_count_judges_but_does_not_grow(net, tmp_path):
    """As files had it before counts were kept."""
    whole = FDBD(net).fit([images(300, 0)], progress=False)
    header, tensors = whole.contents()
    header["shapes"].pop("state.count_")
    tensors.pop("state.count_")
    more = {"network": artifact.fingerprint(net), "metadata": {}}
    artifact.write(tmp_path / "old.safetensors", header | more, tensors)
    old = gramwatch.load(tmp_path / "old.safetensors", net)
    x = images(9, 2)
    assert torch.equal(old.score_inputs(x)[1], whole.score_inputs(x)[1])
    with pytest.raises(InputError, match="without its number of examples"):
        old.fit([x], progress=False)
    with pytest.raises(InputError, match="without its number of examples"):
        whole.merge(old)
    with pytest.raises(InputError, match="without its number of examples"):
        old.merge(whole)


def test_mahalanobis_adds_and_its_sums_are_saved(net, tmp_path):
    x, new = images(300, 0), images(20, 2)
    whole = Mahalanobis(net).fit(x.split(50), progress=False)
    part = Mahalanobis(net).fit(x[:90].split(50), progress=False)
    assert not torch.allclose(part.score_inputs(new)[1], whole.score_inputs(new)[1], rtol=1e-3)
    part.save(tmp_path / "part.safetensors")
    part.fit(x[90:].split(50), progress=False)
    loaded = gramwatch.load(tmp_path / "part.safetensors", net).fit(x[90:].split(50), progress=False)
    for grown in (part, loaded):
        torch.testing.assert_close(grown.score_inputs(new)[1], whole.score_inputs(new)[1], rtol=1e-9, atol=0)
        assert int(grown.counts_.sum()) == 300

    header, tensors = whole.contents()
    for name in ("state.sums_", "state.products_", "state.counts_"):  # as files had it before
        header["shapes"].pop(name)
        tensors.pop(name)
    more = {"network": artifact.fingerprint(net), "metadata": {}}
    artifact.write(tmp_path / "old.safetensors", header | more, tensors)
    old = gramwatch.load(tmp_path / "old.safetensors", net)
    assert torch.equal(old.score_inputs(new)[1], whole.score_inputs(new)[1])
    with pytest.raises(InputError, match="without its sums"):
        old.fit([x], progress=False)
    with pytest.raises(InputError, match="without its sums"):
        whole.merge(old)
