"""Pieces people build Q, R and S from: layers that behave inside a fixed point."""

from banach.nn.affine import operator_norm
from banach.nn.attention import MultiheadAttention, scaled_dot_product_attention
from banach.nn.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d, convert_dropout
from banach.nn.lipschitz import Lipschitz, lipschitz_
from banach.nn.monotone import ForwardBackward, MonotoneLinear
from banach.nn.scaled import Scaled, ScaledInput
from banach.nn.streams import TwoStream

__all__ = [
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "ForwardBackward",
    "Lipschitz",
    "MonotoneLinear",
    "MultiheadAttention",
    "Scaled",
    "ScaledInput",
    "TwoStream",
    "convert_dropout",
    "lipschitz_",
    "operator_norm",
    "scaled_dot_product_attention",
]
