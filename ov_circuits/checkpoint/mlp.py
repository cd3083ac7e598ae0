"""A layer's MLP from the checkpoint's own tensors: what it adds to the residual stream for what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ov_circuits.checkpoint.layout import Architecture, Family, MLPRole
from ov_circuits.checkpoint.norms import Norm, need
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
class MLP:
    """One layer's MLP with the norm it reads through, raw weights.

    Attributes:
        norm: the reading norm.
        gate, into, out: its matrices; ``gate`` is None in an MLP without one.
        activation: f.
        post_norm: the norm that its output passes before it is added (of kind None as a rule).
        scale: what its output is multiplied by before it is added (1 as a rule).
    """

    norm: Norm
    gate: Linear | None
    into: Linear
    out: Linear
    activation: Activation
    post_norm: Norm
    scale: float

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """What it adds to the raw residual stream x [..., d_model]."""
        normed = self.norm(x)
        hidden = self.into(normed)
        hidden = self.activation(hidden) if self.gate is None else self.activation(self.gate(normed)) * hidden
        written = self.post_norm(self.out(hidden))
        return written if self.scale == 1 else written * self.scale

    @classmethod
    def read(
        cls, store: TensorStore, family: Family, architecture: Architecture, config: Mapping[str, Any], layer: int
    ) -> MLP:
        """A layer's MLP; ``store`` is under the family's names.

        Raises:
            CircuitsError: the layer has no single MLP, the checkpoint does not hold it, or its activation is unknown.
        """
        if family.no_mlp is not None:
            raise CircuitsError(
                f"this {family.name} model's first MLP cannot be computed ({family.no_mlp}): use source 'embed'"
            )

        def linear(role: MLPRole) -> Linear:
            projection = family.mlp[role]
            need(store, f"{projection.name.format(layer=layer)}.weight")
            return Linear(projection.weight(store, layer, architecture), projection.bias(store, layer, architecture))

        def norm(name: str | None) -> Norm:
            return Norm.read(store, None if name is None else name.format(layer=layer), architecture)

        key, default = family.activation
        activation = str(config.get(key) or default)
        return cls(
            norm=norm(family.mlp_norm),
            gate=linear("gate") if "gate" in family.mlp else None,
            into=linear("in"),
            out=linear("out"),
            activation=_activation(family.legacy_activations.get(activation, activation)),
            post_norm=norm(family.mlp_post_norm),
            scale=architecture.residual_scale,
        )


def _activation(name: str) -> Activation:
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise CircuitsError(f"the config names the activation {name!r}, which transformers does not know either")
    return ACT2FN[name]
