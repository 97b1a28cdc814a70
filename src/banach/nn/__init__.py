"""Pieces people build Q, R and S from: layers that behave inside a fixed point, and penalties."""

from banach.nn.contractive import Scaled, ScaledInput, TwoStream
from banach.nn.dropout import (
    Dropout, Dropout1d, Dropout2d, Dropout3d, MultiheadAttention, convert_dropout, scaled_dot_product_attention,
)  # fmt: skip
from banach.nn.layers import substitute
from banach.nn.lipschitz import Lipschitz, lipschitz_, operator_norm
from banach.nn.monotone import (
    ForwardBackward, MonotoneLinear, MonotoneWarning, PeacemanRachford, monotonicity, tune_alpha,
)  # fmt: skip
from banach.nn.monotone_conv import MonotoneConv2d
from banach.nn.penalty import (
    Observed, finite_difference_penalty, fixed_point_correction, jacobian_penalty, observe,
)  # fmt: skip

__all__ = [
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "ForwardBackward", "Lipschitz", "MonotoneConv2d",
    "MonotoneLinear", "MonotoneWarning", "MultiheadAttention", "Observed", "PeacemanRachford", "Scaled",
    "ScaledInput", "TwoStream", "convert_dropout", "finite_difference_penalty", "fixed_point_correction",
    "jacobian_penalty", "lipschitz_", "monotonicity", "observe", "operator_norm", "scaled_dot_product_attention",
    "substitute", "tune_alpha",
]  # fmt: skip
