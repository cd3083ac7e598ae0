"""Large float32 products, by the library that is fastest on the machine.

torch's ``@`` goes to MKL, which leaves AVX-512 unused on processors that are not Intel's. torch's linear layers on MKL-DNN
tensors go to oneDNN, which does not: 2.2 times as fast was seen, with errors of the same size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def times_transpose(x: Float[Tensor, "m k"], y: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """``x @ y.mT``. The order of the sums is the library's own; give the smaller matrix first, as it is copied."""
    if x.dtype == y.dtype == torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available():
        return torch.nn.functional.linear(x.to_mkldnn(), y).to_dense()
    return x @ y.mT
