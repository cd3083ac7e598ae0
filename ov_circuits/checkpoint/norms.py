"""LayerNorm and RMSNorm as the checkpoint's architecture has them, with gains that count as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ov_circuits.checkpoint.layout import Architecture, qk_norm_shapes
from ov_circuits.checkpoint.stores import TensorStore
from ov_circuits.errors import CircuitsError


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm or RMSNorm with its gain and bias; of kind None, nothing at all.

    Attributes:
        kind: ``LayerNorm``, ``RMSNorm``, or None where the stream is read as it is.
        gain: what counts: Gemma's is 1 + w, and one without parameters is one.
    """

    kind: str | None
    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"] | None
    eps: float

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Normalised rows, gain and bias applied."""
        return x if self.kind is None else normalised(x, self.kind, self.eps, self.gain, self.bias)

    def frozen(self, x: Float[Tensor, " d_model"], direction: Float[Tensor, " d_model"]) -> FrozenNorm:
        """The norm at the scale that it has on x, read along a direction of its output; float64."""
        if self.kind is None:
            return FrozenNorm(direction.double(), 0.0, 1.0)
        return _frozen(x, direction, self.kind, self.eps, self.gain, self.bias)

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """The sigma by which rows are divided."""
        if self.kind is None:
            return torch.ones_like(x[..., :1])
        if self.kind == "LayerNorm":
            x = x - x.mean(dim=-1, keepdim=True)
        return (x.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()

    def read_back(
        self, x: Float[Tensor, "*batch d_model"], direction: Float[Tensor, "*directions d_model"]
    ) -> Float[Tensor, "*directions d_model"]:
        """Along what the norm's *input* is read when its output is read along ``direction``, at the scale that it has on x."""
        return self.read_unscaled(direction) / self.scale(x)

    def read_unscaled(self, direction: Float[Tensor, "*directions d_model"]) -> Float[Tensor, "*directions d_model"]:
        """:meth:`read_back` but for the scale: the gain is in it, and a LayerNorm's mean."""
        read = self.gain.to(direction.dtype) * direction
        return read - read.mean(dim=-1, keepdim=True) if self.kind == "LayerNorm" else read

    def carry(
        self, x: Float[Tensor, "*batch d_model"], part: Float[Tensor, "*parts d_model"]
    ) -> Float[Tensor, "*parts d_model"]:
        """What a part of the sum x becomes, at the scale that the norm has on the whole of x; the bias is no part's."""
        if self.kind == "LayerNorm":
            part = part - part.mean(dim=-1, keepdim=True)
        return part * self.gain.to(part.dtype) / self.scale(x)

    @classmethod
    def read(cls, store: TensorStore, name: str | None, architecture: Architecture) -> Norm:
        """The norm of that name; None names none.

        Raises:
            CircuitsError: its gain is not there.
        """
        if name is None:
            return cls(
                None,
                torch.ones(architecture.d_model, device=store.device, dtype=torch.float32),
                None,
                architecture.norm_eps,
            )
        gain, bias = read_gain(store, name, architecture, architecture.d_model)
        return cls(architecture.norm, gain, bias, architecture.norm_eps)


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """A norm held at one scale is linear: ``norm(x) . direction = sum_c c . self.direction + constant`` for x = sum_c c.

    Attributes:
        direction: along which the norm's input is read, float64: mean, gain and scale are in it.
        constant: what the norm's bias contributes.
        scale: the sigma that was held.
    """

    direction: Float[Tensor, " width"]
    constant: float
    scale: float


@dataclass(frozen=True, eq=False)
class QKNorm:
    """The norm of a layer's queries or keys.

    Attributes:
        kind: ``LayerNorm`` or ``RMSNorm``.
        gain: each head's part, [head, d_head].
        bias: likewise, or None.
        eps: the config's.
        whole: it is taken over all heads' coordinates at once (OLMo 2), not over each head's.
    """

    kind: str
    gain: Float[Tensor, "head d_head"]
    bias: Float[Tensor, "head d_head"] | None
    eps: float
    whole: bool

    def __call__(self, x: Float[Tensor, "head pos d_head"]) -> Float[Tensor, "head pos d_head"]:
        """Normalised queries or keys of all heads."""
        rows = x.transpose(0, 1)
        gain, bias = self.gain, self.bias
        if self.whole:
            rows, gain, bias = rows.flatten(1), gain.flatten(), None if bias is None else bias.flatten()
        return normalised(rows, self.kind, self.eps, gain, bias).reshape(x.transpose(0, 1).shape).transpose(0, 1)

    def frozen(
        self, x: Float[Tensor, "head d_head"], head: int, direction: Float[Tensor, " d_head"]
    ) -> tuple[Float[Tensor, "head d_head"], float]:
        """The norm at the scale that it has on one position's queries (or keys) x, read along a direction of one head's.

        Returns:
            ``read`` and ``constant``: the number is ``(x * read).sum() + constant``. Where the norm is a head's own, ``read`` is
            zero for all others.
        """
        asked = torch.zeros_like(x, dtype=torch.float64)
        asked[head] = direction.double()
        over = slice(None) if self.whole else slice(head, head + 1)
        gain, bias = self.gain[over].flatten(), None if self.bias is None else self.bias[over].flatten()
        found = _frozen(x[over].flatten(), asked[over].flatten(), self.kind, self.eps, gain, bias)
        read = torch.zeros_like(asked)
        read[over] = found.direction.view_as(x[over])
        return read, found.constant

    def of(self, heads: slice) -> QKNorm:
        """The norm of some heads."""
        return replace(self, gain=self.gain[heads], bias=None if self.bias is None else self.bias[heads])

    @classmethod
    def read(cls, store: TensorStore, name: str, architecture: Architecture, layer: int, heads: int) -> QKNorm:
        """The norm of queries (or keys) of ``heads`` heads in a layer.

        Raises:
            CircuitsError: its gain is not there.
        """
        a = architecture
        read = [read_gain(store, tensor, a, shape[-1]) for tensor, shape in qk_norm_shapes(name, a, layer, heads)]
        gains = torch.cat([gain.flatten() for gain, _ in read]).unflatten(0, (-1, a.d_head))
        biases = [bias.flatten() for _, bias in read if bias is not None]
        bias = torch.cat(biases).unflatten(0, (-1, a.d_head)).expand(heads, -1) if biases else None
        return cls(a.norm, gains.expand(heads, -1), bias, a.norm_eps, a.qk_norm == "projection")


def read_gain(store: TensorStore, name: str, architecture: Architecture, width: int) -> tuple[Tensor, Tensor | None]:
    """A norm's gain as it counts and, where it has one, its bias.

    Raises:
        CircuitsError: the gain is not there.
    """
    if architecture.norm_gain == "none":
        return torch.ones(width, device=store.device, dtype=torch.float32), None
    bias = f"{name}.bias"
    gain = need(store, f"{name}.weight")
    return gain + 1 if architecture.norm_gain == "offset" else gain, store.read(bias) if bias in store else None


def need(store: TensorStore, name: str) -> Tensor:
    """A tensor that cannot be done without.

    Raises:
        CircuitsError: the checkpoint does not hold it.
    """
    if name not in store:
        raise CircuitsError(
            f"the checkpoint has no tensor {name}, so its first MLP cannot be computed: use source 'embed'"
        )
    return store.read(name)


def normalised(x: Tensor, kind: str, eps: float, gain: Tensor, bias: Tensor | None) -> Tensor:
    """Rows through a LayerNorm or RMSNorm, in the precision of the rows."""
    gain, bias = gain.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if kind == "LayerNorm":
        x = F.layer_norm(x, (x.shape[-1],), eps=eps) * gain
    else:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * gain
    return x if bias is None else x + bias


def _frozen(x: Tensor, direction: Tensor, kind: str, eps: float, gain: Tensor, bias: Tensor | None) -> FrozenNorm:
    x, direction = x.double(), direction.double()
    read = gain.double() * direction
    if kind == "LayerNorm":
        x, read = x - x.mean(), read - read.mean()
    scale = float((x.square().mean() + eps).sqrt())
    constant = 0.0 if bias is None else float(bias.double() @ direction)
    return FrozenNorm(read / scale, constant, scale)
