"""No derivative is taken through a solve, in forward mode neither: `attach` gives the derivative of z*."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def without_derivatives(function: F) -> F:
    """Make the function run without recording gradients and without carrying tangents.

    The same as `torch.no_grad()` and `without_tangents()`, at a fraction of their time.
    """

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return function(*arguments, **named)
        recorded, carried = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        torch._C._set_grad_enabled(False)
        torch._C._set_fwd_grad_enabled(False)
        try:
            return function(*arguments, **named)
        finally:
            torch._C._set_grad_enabled(recorded)
            torch._C._set_fwd_grad_enabled(carried)

    return cast(F, run)


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
