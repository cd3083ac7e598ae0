"""Products by oneDNN and numpy: the same numbers as float64, every linear layer of a running model among them, no more threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ov_circuits.linalg import products
from ov_circuits.linalg.products import FastLinears, many_products, product, row_gram, times_transpose
from ov_circuits.linalg.threads import numpy_threads, side_by_side


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def gains(monkeypatch):
    """Also on processors where it is not used, oneDNN's road must be right."""
    monkeypatch.setattr(products, "_GAINS", torch.backends.mkldnn.is_available())


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
    shapes, linear = [], products._onednn_linear
    monkeypatch.setattr(
        products, "_onednn_linear", lambda x, W, bias=None: shapes.append(tuple(x.shape)) or linear(x, W, bias)
    )
    return shapes


def test_large_layers_take_the_fast_road_and_small_or_foreign_ones_do_not(taken):
    large, small = random(20, 300), random(3, 300)
    W = random(200, 300)
    with torch.no_grad(), FastLinears():
        F.linear(large, W)
        F.linear(small, W)
        F.linear(large.double(), W.double())
    assert taken == [(20, 300)]
    with FastLinears():  # gradients are asked for
        F.linear(large, W.requires_grad_()).sum().backward()
    assert taken == [(20, 300)] and W.grad is not None


def test_without_avx512_all_goes_to_torch(taken, monkeypatch, assert_close):
    monkeypatch.setattr(products, "_GAINS", False)
    x, W = random(20, 300), random(200, 300, seed=1)
    with torch.no_grad(), FastLinears():
        found = F.linear(x, W), times_transpose(x, W)
    assert not taken
    for ours in found:
        assert_close(ours, x.double() @ W.double().mT, 1e-6)


BIASES = {
    "whole": lambda n: random(n, seed=2),
    "gaps": lambda n: random(2 * n, seed=2)[::2],
    "one number for all": lambda n: random(1, seed=2).expand(n),
    "one number": lambda n: random(1, seed=2),
    "a row": lambda n: random(1, n, seed=2),
    "a matrix": lambda n: random(20, n, seed=2),
    "sign to come": lambda n: torch._neg_view(random(n, seed=2)),
}


@pytest.mark.parametrize("kind", BIASES)
def test_biases_of_any_shape_and_layout(kind, assert_close):
    """oneDNN reads each as n numbers side by side, whatever lies there."""
    x, W, bias = random(20, 300), random(200, 300, seed=1), BIASES[kind](200)
    right = x.double() @ W.double().mT + bias.double()
    with torch.no_grad(), FastLinears():
        assert_close(torch.addmm(bias, x, W.mT), right, 1e-6)
        assert_close(F.linear(x, W, bias), right, 1e-6)


def test_only_the_biass_gradient_is_asked_for():
    bias = random(200).requires_grad_()
    with FastLinears():
        F.linear(random(20, 300), random(200, 300), bias).sum().backward()
    assert bias.grad is not None and bool((bias.grad == 20).all())


def test_a_view_whose_sign_is_to_come(assert_close):
    x, y = torch._neg_view(random(70, 300)), torch._neg_view(random(50, 300, seed=1))
    right = x.double() @ y.double().mT
    for factor, other, sign in ((x, y, 1), (-x, y, -1), (x, -y, -1)):
        assert_close(times_transpose(factor, other), sign * right, 1e-6)
    assert_close(row_gram(x), x.double() @ x.double().mT, 1e-6)
    assert_close(product(x, y.mT), right, 1e-6)
    with torch.no_grad(), FastLinears():
        assert_close(F.linear(x, y), right, 1e-6)


@pytest.mark.parametrize("second", ["whole", "columns", "rows apart", "columns apart", "one row"])
@pytest.mark.parametrize("first", [(40, 300), (70, 300), (2, 40, 300), (0, 300), (40, 0)])
def test_products_with_a_transpose(first, second, assert_close):
    x, wide = random(*first), random(100, 2 * first[-1], seed=1)
    y = {
        "whole": wide[:50, : first[-1]].contiguous(),
        "columns": wide[:50, : first[-1]].mT.contiguous().mT,
        "rows apart": wide[::2, : first[-1]],
        "columns apart": wide[:50, ::2],
        "one row": wide[:1, : first[-1]].expand(50, -1),
    }[second]
    with torch.no_grad():
        ours = times_transpose(x, y)
    assert ours.shape == (*first[:-1], 50)
    assert_close(ours, x.double() @ y.double().mT, 1e-6)
    assert torch.equal(times_transpose(x.double(), y.double()), x.double() @ y.double().mT)


LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "neither": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "one matrix": lambda x: x[0],
    "shared": lambda x: x[:1].expand(3, -1, -1),
    "with gradient": lambda x: x.clone().requires_grad_(),
    "bfloat16": lambda x: x.bfloat16(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gram_matrices_of_any_layout(layout, dtype, assert_close):
    x = LAYOUTS[layout](random(3, 20, 300).to(dtype))
    ours, right = row_gram(x), x.double() @ x.double().mT
    assert ours.dtype == x.dtype and ours.shape == right.shape
    assert_close(ours.detach(), right.detach(), 1e-2 if x.dtype == torch.bfloat16 else 1e-6)
    if layout not in ("with gradient", "bfloat16"):
        assert torch.equal(ours, ours.mT)


@pytest.mark.filterwarnings("error")
def test_nan_stays_in_its_matrix_and_numpy_says_nothing():
    x = random(3, 20, 300)
    x[1, 2, 3] = torch.nan
    assert row_gram(x).isfinite().flatten(1).all(1).tolist() == [True, False, True]
    assert product(x.double(), x.double().mT).isfinite().flatten(1).all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("layout", ["rows", "columns", "neither", "shared"])
def test_many_small_products(layout, assert_close):
    x, y = LAYOUTS[layout](random(3, 20, 40)), LAYOUTS[layout](random(3, 40, 30, seed=1))
    out = torch.empty(4, 20, 30)[1:]
    assert many_products(x, y, out) is out
    assert_close(out, x.double() @ y.double(), 1e-6)


def blas_threads():
    from threadpoolctl import threadpool_info

    return [
        pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas" and "numpy" in pool["filepath"]
    ]


def test_numpy_takes_no_more_threads_than_it_is_told_and_gets_its_own_back(monkeypatch):
    if not blas_threads():
        pytest.skip("numpy's BLAS is not one whose threads can be told")
    with numpy_threads(2):  # whatever it was before
        pass
    before = blas_threads()
    seen, inside, over = [], threading.Event(), threading.Event()

    def other():
        with numpy_threads(1):
            inside.set()
            over.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with numpy_threads(2):  # beside another block: its number stays
        seen.append(blas_threads())
    seen.append(blas_threads())  # the other one is still in its block
    over.set()
    thread.join()
    assert seen == [[1] * len(before)] * 2
    assert list(side_by_side(lambda _: blas_threads(), range(2))) == [[1] * len(before)] * 2
    with pytest.raises(ValueError, match="matmul"), numpy_threads(1):
        np.matmul(np.ones((2, 3)), np.ones((2, 3)))
    assert blas_threads() == before


def test_a_running_model_uses_it(stories260k, taken, monkeypatch, assert_close):
    import ov_circuits as ov

    model = ov.load(stories260k)
    tokens = list(range(3, 103))
    monkeypatch.setattr(products, "_WORTH_PREPARING", 1e9)
    plain = model.trace(tokens)
    assert not taken
    monkeypatch.setattr(products, "_WORTH_PREPARING", 0)
    fast = model.trace(tokens)
    assert len(taken) == 7 * model.n_layers + 1  # q, k, v, o, gate, up, down; and the unembedding
    assert_close(fast.logits, plain.logits, 1e-5)
