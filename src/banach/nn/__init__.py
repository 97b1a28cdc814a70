"""Pieces people build Q, R and S from: layers that behave inside a fixed point."""

from banach.nn.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d, convert_dropout

__all__ = ["Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "convert_dropout"]
