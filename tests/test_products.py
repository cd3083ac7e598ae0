"""Large float32 products by oneDNN: the same numbers as float64, and every linear layer of a running model among them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ov_circuits.linalg import products
from ov_circuits.linalg.products import FastLinears, times_transpose


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(2, 150, 300), (700, 300), (1, 1, 300), (3, 300)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_layers_of_any_size_are_right(shape, with_bias, assert_close):
    x, W, bias = random(*shape), random(200, 300, seed=1), random(200, seed=2) if with_bias else None
    with torch.no_grad(), FastLinears():
        ours, conv1d = F.linear(x, W, bias), torch.addmm(random(200, seed=2), x.view(-1, 300), W.mT.contiguous())
    right = x.double() @ W.double().mT
    assert_close(ours, right if bias is None else right + bias.double(), 1e-6)
    assert_close(conv1d, right.view(-1, 200) + random(200, seed=2).double(), 1e-6)
    assert type(ours) is torch.Tensor and ours.layout is torch.strided


@pytest.fixture
def taken(monkeypatch):
    """Shapes of what was given to oneDNN."""
    shapes, packed = [], torch.Tensor.to_mkldnn
    monkeypatch.setattr(torch.Tensor, "to_mkldnn", lambda self: shapes.append(tuple(self.shape)) or packed(self))
    return shapes


def test_large_layers_take_the_fast_road_and_small_or_foreign_ones_do_not(taken):
    large, small = random(700, 300), random(3, 300)
    W = random(200, 300)
    with torch.no_grad(), FastLinears():
        F.linear(large, W)
        F.linear(small, W)
        F.linear(large.double(), W.double())
    assert taken == [(700, 300)]
    with FastLinears():  # gradients are asked for
        F.linear(large, W.requires_grad_()).sum().backward()
    assert taken == [(700, 300)] and W.grad is not None


def test_products_with_a_transpose(assert_close):
    x, y = random(40, 300), random(50, 300, seed=1)
    with torch.no_grad():
        assert_close(times_transpose(x, y), x.double() @ y.double().mT, 1e-6)
    assert torch.equal(times_transpose(x.double(), y.double()), x.double() @ y.double().mT)


def test_a_running_model_uses_it(stories260k, taken, monkeypatch, assert_close):
    import ov_circuits as ov

    model = ov.load(stories260k)
    tokens = list(range(3, 103))
    plain = model.trace(tokens)
    assert not taken
    monkeypatch.setattr(products, "_WORTH_PACKING", 0)
    fast = model.trace(tokens)
    assert len(taken) == 7 * model.n_layers + 1  # q, k, v, o, gate, up, down; and the unembedding
    assert_close(fast.logits, plain.logits, 1e-5)
