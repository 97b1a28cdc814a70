"""Dropout and attention that keep one mask per pass, so that the map that is iterated stays the same map."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from banach.nn.layers import modules_of
from banach.nn.passes import pass_of


class _OneMask:
    """x * m / (1 - p), with m drawn once per pass; outside a pass like PyTorch's own.

    The mask belongs to the layer: called at two places in R, it drops the same entries at both, so give each
    place its own layer.
    """

    one_mask_per_pass = True
    spatial = 0  # axes of a channel, which is dropped whole; 0: entries are dropped one by one

    def forward(self, x: Tensor) -> Tensor:
        now = pass_of(self)
        if now is None:
            return super().forward(x)  # type: ignore[misc]
        if self.spatial and x.dim() != self.spatial + 2:
            expected = f"{type(self).__name__} inside R takes a batch of {self.spatial + 2} axes"
            raise ValueError(f"{expected}, got shape {tuple(x.shape)}")
        return now.dropped(x, self, x.shape[:2] + (1,) * self.spatial if self.spatial else x.shape)


class Dropout(_OneMask, nn.Dropout):
    """`torch.nn.Dropout` with one mask per forward pass, for its solve and its gradient."""


class Dropout1d(_OneMask, nn.Dropout1d):
    """`torch.nn.Dropout1d` with one mask per forward pass, for its solve and its gradient."""

    spatial = 1


class Dropout2d(_OneMask, nn.Dropout2d):
    """`torch.nn.Dropout2d` with one mask per forward pass, for its solve and its gradient."""

    spatial = 2


class Dropout3d(_OneMask, nn.Dropout3d):
    """`torch.nn.Dropout3d` with one mask per forward pass, for its solve and its gradient."""

    spatial = 3


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    dropout: nn.Module | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return D(softmax(scale Q K' + mask)) V, as `torch.nn.functional.scaled_dot_product_attention` does.

    The dropout D is a layer, such as `banach.nn.Dropout(0.1)`, so that inside R it keeps one mask per pass. In
    train mode the weights are computed in full; in eval mode PyTorch's fused kernels are called.

    Args:
        query, key, value: (batch, ..., length, features); axis 0 must be the batch.
        attn_mask: bool (True: may attend) or float (added to the scores); broadcasts to the weights.
        dropout: the layer that drops weights, or None. Give each place in R its own layer.
        is_causal: mask later positions; excludes `attn_mask`.
        scale: factor of the scores; None is 1 / sqrt(features).

    Raises:
        ValueError: if both `attn_mask` and `is_causal` are given.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("expected attn_mask or is_causal, got both; put the causal mask into attn_mask")
    if dropout is None or not dropout.training or getattr(dropout, "p", 1) == 0:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _added(~attn_mask, query.dtype)
    return dropout(_weights(query, key, attn_mask, scale)) @ value


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with one mask of its attention weights per pass, outside a pass PyTorch's own.

    The mask belongs to the layer: called at two places in R, it drops the same weights at both.
    """

    one_mask_per_pass = True

    @property
    def p(self) -> float:
        """The probability with which a weight is dropped."""
        return float(self.dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        now = pass_of(self)
        if now is None:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal only says that attn_mask is causal: expected that mask, got None")
        axis = 0 if query.dim() == 3 and self.batch_first else 1  # of the batch
        given = (query, key, value) if query.dim() == 3 else (x.unsqueeze(1) for x in (query, key, value))
        q, k, v = self._projected(*(x.movedim(axis, 0) for x in given))
        added = self._mask(attn_mask, key_padding_mask, k.shape[2], q.dtype)
        weights = now.dropped(_weights(q, k, added), self)
        output = F.linear((weights @ v).transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        output = output.movedim(0, axis)
        shown = weights.mean(1) if average_attn_weights and need_weights else weights
        if query.dim() == 2:
            output, shown = output.squeeze(1), shown.squeeze(0)
        return output, shown if need_weights else None

    def _projected(self, *inputs: Tensor) -> list[Tensor]:
        """Queries, keys and values, (batch, heads, length, features), with what the options add to the keys."""
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        q, k, v = (F.linear(*parts) for parts in zip(inputs, weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(len(v), -1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return [x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v)]

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, keys: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Both masks as one that is added to the scores. Keys that an option added are never masked."""
        parts = []
        if attn_mask is not None:
            heads = (1, 1) if attn_mask.dim() == 2 else (-1, self.num_heads)
            parts.append(attn_mask.reshape(*heads, *attn_mask.shape[-2:]))
        if padding is not None:
            parts.append(padding.reshape(-1, 1, 1, padding.shape[-1]))
        whole = [F.pad(_added(part, dtype), (0, keys - part.shape[-1])) for part in parts]
        return sum(whole[1:], whole[0]) if whole else None


def _weights(query: Tensor, key: Tensor, added: Tensor | None, scale: float | None = None) -> Tensor:
    """softmax(scale Q K' + added), one row per query; zeros where no key may be attended to, as in PyTorch."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if added is None:
        return torch.softmax(scores, -1)
    none = (added == -math.inf).all(-1, keepdim=True)
    return torch.softmax((scores + added).masked_fill(none, 0.0), -1).masked_fill(none, 0.0)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to scores: -inf where a bool mask is True; a float mask is one already."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


_TWINS: dict[type, Any] = {
    getattr(nn, own.__name__): own for own in (Dropout, Dropout1d, Dropout2d, Dropout3d, MultiheadAttention)
}


def convert_dropout(module: nn.Module) -> nn.Module:
    """Give every dropout layer and nn.MultiheadAttention in the module one mask per pass, in place.

    Reaches the layers inside nn.TransformerEncoderLayer and other containers. They change their class and nothing
    else: weights, hooks and state_dict stay as they are. Subclasses of the layers are left alone, since their
    forward is not known.

    Args:
        module: R, or a part of it.
    Returns:
        The module.
    """
    for layer in module.modules():
        layer.__class__ = _TWINS.get(type(layer), type(layer))
    return module


def check_dropout(R: Any, modules: list[nn.Module] | None = None) -> None:
    """Refuse a train-mode layer in R that draws at random at every evaluation. `modules`: those of R, if known.

    The layers of a plain function cannot be seen from here: see `banach.nn.layers.Watch`.
    """
    for layer in modules or modules_of(R):
        if not layer.training or hasattr(type(layer), "one_mask_per_pass"):
            continue
        for kind, draws, advice in _RANDOM:
            if isinstance(layer, kind) and draws(layer):
                name = next(f"R.{name}".rstrip(".") for name, module in R.named_modules() if module is layer)
                raise RuntimeError(
                    f"{name} is {type(layer).__name__}, which draws new random numbers at every evaluation, so "
                    f"there is no fixed point to find: {advice}"
                )


_CONVERT = "call banach.nn.convert_dropout(R); a class that it skips must be, or derive from, a layer of banach.nn"
_LAYERS = "set its dropout to 0, and put banach.nn.Dropout between modules of one layer each"
# Kinds of layers, whether one draws at random, and what to use instead.
_RANDOM: tuple[tuple[type, Callable[[Any], bool], str], ...] = (
    (nn.modules.dropout._DropoutNd, lambda m: m.p > 0, _CONVERT),
    (nn.MultiheadAttention, lambda m: m.dropout > 0, _CONVERT),
    (nn.RNNBase, lambda m: m.dropout > 0, _LAYERS),
    (nn.RReLU, lambda m: m.lower < m.upper, "use nn.LeakyReLU"),
)
