"""Products by the library that is fastest for them on the machine.

torch's ``@`` goes to MKL, which leaves AVX-512 unused on processors that are not Intel's. oneDNN does not: its linear layer, as
torch's own compiler calls it, is 2.3 times as fast for large float32 products, with errors of the same size. For Gram
matrices, many small products and large float64 ones, numpy's OpenBLAS is faster: 1.8, 1.4 and 1.1 to 1.5 times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ov_circuits.linalg.threads import numpy_threads

# All that oneDNN gains is in AVX-512. With AVX2 it is a tenth faster than MKL, and adds up a thousand terms of one sign with
# four times MKL's error, which moved composition scores by more than a millionth.
_GAINS = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"

# Multiplications below which oneDNN's preparations cost more than it saves.
_WORTH_PREPARING = 700_000


def times_transpose(x: Float[Tensor, "*batch m k"], y: Float[Tensor, "n k"]) -> Float[Tensor, "*batch m n"]:
    """``x @ y.mT``. The order of the sums is the library's own."""
    if not _for_onednn(x, y):
        return x @ y.mT
    if x.ndim == 2 and len(x) < len(y):  # oneDNN arranges its second factor anew: the smaller one
        return _onednn_linear(y, x).mT
    return _onednn_linear(x, y)


def row_gram(x: Float[Tensor, "*batch r d"]) -> Float[Tensor, "*batch r r"]:
    """``x @ x.mT``, of which numpy works out one half (BLAS syrk): symmetric to the last bit."""
    if not _for_numpy(x):
        return x @ x.mT
    rows = _one_stride(x).numpy()
    with _as_torch():
        return torch.from_numpy(np.matmul(rows, rows.swapaxes(-1, -2)))


def product(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y``, for large float64 matrices; leading dimensions are batches, as there."""
    if not _for_numpy(x, y):
        return x @ y
    with _as_torch():
        return torch.from_numpy(np.matmul(_one_stride(x).numpy(), _one_stride(y).numpy()))


def many_products(x: Float[Tensor, "batch m k"], y: Float[Tensor, "batch k n"], out: Tensor) -> Tensor:
    """``torch.bmm(x, y, out=out)`` for small matrices."""
    if not _for_numpy(x, y, out):
        return torch.bmm(x, y, out=out)
    with _as_torch():
        np.matmul(_one_stride(x).numpy(), _one_stride(y).numpy(), out=out.numpy())
    return out


def _for_numpy(*factors: Tensor) -> bool:
    return all(type(x) is Tensor and x.device.type == "cpu" and not x.requires_grad for x in factors) and all(
        x.dtype in (torch.float32, torch.float64) and not x.is_neg() for x in factors
    )


@contextmanager
def _as_torch() -> Iterator[None]:
    """numpy with torch's number of threads and no warning about NaN or infinity, which are the weights' own."""
    with numpy_threads(torch.get_num_threads()), np.errstate(all="ignore"):
        yield


def _one_stride(x: Tensor) -> Tensor:
    """The matrix where its rows or columns lie together, a copy of it where neither does: numpy would loop over that."""
    return x if 1 in x.stride()[-2:] else x.contiguous()


class FastLinears(TorchFunctionMode):
    """A context in which large linear layers (``F.linear``, and ``addmm`` as in GPT-2's Conv1D) run by oneDNN; no gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func is torch.nn.functional.linear:
            return self._linear(*args)
        if not kwargs and func is torch.addmm:
            bias, x, y = args
            return self._linear(x, y.mT, bias)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _linear(x: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
        # oneDNN reads a bias of any other shape as if it were this one: beyond its end, in silence.
        usual = bias is None or (_for_onednn(bias) and bias.shape == W.shape[:1])
        if usual and _for_onednn(x, W) and x.numel() * W.shape[0] >= _WORTH_PREPARING:
            return _onednn_linear(x, W, bias)
        return torch.nn.functional.linear(x, W, bias)


def _onednn_linear(x: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``.

    Weights with gaps between their rows are copied: oneDNN would take two thousand times as long for them. So is a bias with
    gaps, which it would take for one without.
    """
    whole = W if W.is_contiguous() or W.mT.is_contiguous() else W.contiguous()
    bias = None if bias is None else bias.contiguous()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, whole, bias, "none", [], "")
    return result


def _for_onednn(*factors: Tensor) -> bool:
    # No shards of a distributed tensor; nor views whose sign torch has yet to turn, which only torch knows of.
    plain = all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_neg() for x in factors)
    return (
        _GAINS
        and plain
        and all(x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() for x in factors)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in factors))
    )
