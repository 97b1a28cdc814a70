"""No derivative is taken through a solve, in forward mode neither: `attach` gives the derivative of z*."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_tangents() -> Iterator[None]:
    """Turn forward mode off, as `torch.no_grad` turns off recording. (Dynamo traces no such mode.)"""
    if torch.compiler.is_compiling():
        yield
        return
    before = torch._C._is_fwd_grad_enabled()
    torch._C._set_fwd_grad_enabled(False)
    try:
        yield
    finally:
        torch._C._set_fwd_grad_enabled(before)
