"""A layer's MLP from the checkpoint's own tensors: what it adds to the residual stream for what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ov_circuits.checkpoint.families import Architecture, Family, MLPRole
from ov_circuits.checkpoint.stores import TensorStore
from ov_circuits.errors import CircuitsError

Activation = Callable[[Tensor], Tensor]

# Under the names of transformers' table. Others are looked up there, which imports it.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


@dataclass(frozen=True, eq=False)
class Linear:
    """``x @ W + b``: W [n_in, n_out], b [n_out] or None."""

    W: Float[Tensor, "n_in n_out"]
    b: Float[Tensor, " n_out"] | None

    def __call__(self, x: Float[Tensor, "*batch n_in"]) -> Float[Tensor, "*batch n_out"]:
        """What a row of the residual stream (or of hidden units) becomes."""
        out = x @ self.W
        return out if self.b is None else out + self.b


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm or RMSNorm with its gain and bias."""

    kind: str
    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"] | None
    eps: float

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Normalised rows, gain and bias applied."""
        if self.kind == "LayerNorm":
            return F.layer_norm(x, (x.shape[-1],), self.gain, self.bias, self.eps)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * self.gain

    def frozen(self, x: Float[Tensor, " d_model"], direction: Float[Tensor, " d_model"]) -> FrozenNorm:
        """The norm at the scale that it has on x, read along a direction of its output; float64."""
        x, direction = x.double(), direction.double()
        read = self.gain.double() * direction
        if self.kind == "LayerNorm":
            x, read = x - x.mean(), read - read.mean()
        scale = float((x.square().mean() + self.eps).sqrt())
        constant = 0.0 if self.bias is None else float(self.bias.double() @ direction)
        return FrozenNorm(read / scale, constant, scale)

    @classmethod
    def read(cls, store: TensorStore, name: str, architecture: Architecture) -> Norm:
        """The norm of that name."""
        bias = f"{name}.bias"
        return cls(
            architecture.norm,
            need(store, f"{name}.weight"),
            store.read(bias) if bias in store else None,
            architecture.norm_eps,
        )


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """A norm held at one scale is linear: ``norm(x) . direction = sum_c c . self.direction + constant`` for x = sum_c c.

    Attributes:
        direction: along which the norm's input is read, [d_model], float64: mean, gain and scale are in it.
        constant: what the norm's bias contributes.
        scale: the sigma that was held.
    """

    direction: Float[Tensor, " d_model"]
    constant: float
    scale: float


@dataclass(frozen=True, eq=False)
class MLP:
    """One layer's MLP with the norm it reads through, raw weights."""

    norm: Norm
    gate: Linear | None
    into: Linear
    out: Linear
    activation: Activation

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """What it adds to the raw residual stream x [..., d_model]."""
        normed = self.norm(x)
        if self.gate is None:
            return self.out(self.activation(self.into(normed)))
        return self.out(self.activation(self.gate(normed)) * self.into(normed))

    @classmethod
    def read(
        cls, store: TensorStore, family: Family, architecture: Architecture, config: Mapping[str, Any], layer: int
    ) -> MLP:
        """A layer's MLP; ``store`` is under the family's names.

        Raises:
            CircuitsError: the checkpoint does not hold it, or its activation is unknown.
        """

        def linear(role: MLPRole) -> Linear:
            projection = family.mlp[role]
            need(store, f"{projection.name.format(layer=layer)}.weight")
            return Linear(projection.weight(store, layer), projection.bias(store, layer))

        key, default = family.activation
        return cls(
            norm=Norm.read(store, family.mlp_norm.format(layer=layer), architecture),
            gate=linear("gate") if "gate" in family.mlp else None,
            into=linear("in"),
            out=linear("out"),
            activation=_activation(str(config.get(key) or default)),
        )


def need(store: TensorStore, name: str) -> Tensor:
    """A tensor that an MLP cannot do without.

    Raises:
        CircuitsError: the checkpoint does not hold it.
    """
    if name not in store:
        raise CircuitsError(
            f"the checkpoint has no tensor {name}, so its first MLP cannot be computed: use source 'embed'"
        )
    return store.read(name)


def _activation(name: str) -> Activation:
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise CircuitsError(f"the config names the activation {name!r}, which transformers does not know either")
    return ACT2FN[name]
