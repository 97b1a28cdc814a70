"""fixed_point() and ImplicitNetwork: Q, then solve, then attach, then S."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from banach.backward import JFB, Mode, Neumann, Unroll
from banach.kernels.known import is_hooked
from banach.latent import Latent, detach, leaves, map_leaves
from banach.nn.dropout import check_dropout
from banach.nn.hidden import check_hidden
from banach.nn.passes import Pass, uses_batch_statistics
from banach.solve import Map, Picard, Solution, Solver, Status, Tolerance, solve

_CASTS_LAST = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)


def fixed_point(
    T: Map,
    z0: Latent,
    *,
    inputs: tuple[Any, ...] = (),
    solver: Solver = Picard(),
    tolerance: Tolerance = Tolerance(),
    backward: Mode = JFB(),
    coupled: bool = False,
) -> Latent:
    """z = T(z, *inputs) from z0, differentiable by `backward` in everything T reads but z0."""
    _check_mode(backward)
    found = solve(T, z0, solver, inputs=inputs, tolerance=tolerance, coupled=coupled)
    _forget(found)
    _warn_nonfinite(found)
    return backward.attach(T, found.value, tuple(inputs), coupled=coupled)


def zeros(v: Latent) -> Latent:
    """The start of the paper's Algorithm 1: a latent of zeros, shaped like Q(d)."""
    return map_leaves(torch.zeros_like, v)


class ImplicitNetwork(nn.Module):
    """N(d) = S(u*),  u* = R(u*, Q(d)).

    Q(d) is computed once per pass. The fixed point is found without recording, then `backward` attaches the
    gradient. Whether one is attached follows `torch.is_grad_enabled()`, never `training`. Batch norm in R
    updates its statistics once per pass, and in train mode couples the batch (`coupled=None` looks for it).
    `start(Q(d))` gives z0, and so does `z0=`: no gradient reaches either. With `tolerance.max_steps = 0` this
    is the explicit twin S(R(z0, Q(d))).
    """

    Q: Any  # modules or plain functions
    R: Any
    S: Any
    start: Any

    def __init__(
        self,
        Q: Callable[..., Latent],
        R: Callable[..., Latent],
        S: Callable[..., Any],
        *,
        solver: Solver = Picard(),
        tolerance: Tolerance = Tolerance(),
        backward: Mode = JFB(),
        start: Callable[[Latent], Latent] = zeros,
        coupled: bool | None = None,
        compact: bool = False,
    ) -> None:
        super().__init__()
        for name, part in (("Q", Q), ("R", R), ("S", S), ("start", start)):
            if not callable(part):
                raise TypeError(f"{name} must be a module or a function, got {type(part).__name__}")
        self.Q, self.R, self.S, self.start = Q, R, S, start
        self.solver, self.tolerance, self.backward = solver, tolerance, backward
        self.coupled, self.compact = coupled, compact

    def forward(self, d: Any, z0: Latent | None = None, *, solution: bool = False) -> Any:
        u, found = self.latent(d, z0)
        y = self.S(u)
        return (y, found) if solution else y

    def latent(self, d: Any, z0: Latent | None = None) -> tuple[Latent, Solution]:
        """u = R(u*, Q(d)) carrying its gradient, and what the solve found."""
        _check_mode(self.backward)
        check_dropout(self.R)
        check_hidden(self.R)
        v = self.Q(d)
        coupled = uses_batch_statistics(self.R) if self.coupled is None else self.coupled
        compact = self.compact and not coupled
        z0 = self._start(v, z0)
        later, once = _evaluates_later(self.backward), type(self.backward) is JFB
        with Pass(self.R, later=later, once=once) as one:
            # Masks must be cut with the batch: the samples' numbers travel as an input that is cut.
            inputs = (v, _numbers(z0)) if compact and one.masks is not None else (v,)
            found = solve(
                one.iterate,
                z0,
                self.solver,
                inputs=inputs,
                tolerance=self.tolerance,
                coupled=coupled,
                compact=compact,
            )
            _forget(found)
            u = self.backward.attach(one.evaluate, found.value, (v,), coupled=coupled)
        _warn_nonfinite(found)
        return u, found

    def _start(self, v: Latent, z0: Latent | None) -> Latent:
        with torch.no_grad():
            own = self.start(detach(v)) if z0 is None else z0
        if z0 is not None and isinstance(v, Tensor) and not torch.is_autocast_enabled(v.device.type):
            for leaf in leaves(z0):
                if leaf.shape[:1] != v.shape[:1]:
                    raise ValueError(
                        f"z0 must hold one latent for each sample of Q(d): got shape {tuple(leaf.shape)}, "
                        f"expected {v.shape[0]} along the first axis"
                    )
                if leaf.dtype != v.dtype or leaf.device != v.device:
                    raise TypeError(
                        f"z0 must have the dtype and device of Q(d): got {leaf.dtype} on {leaf.device}, expected "
                        f"{v.dtype} on {v.device}; write z0.to(dtype, device)"
                    )
        return own

    def extra_repr(self) -> str:
        return f"solver={self.solver}, tolerance={self.tolerance}, backward={self.backward}"


def is_as_written(net: object) -> bool:
    """Does it answer by `ImplicitNetwork`'s own methods, without hooks? Else no one may call its parts for it."""
    if not isinstance(net, ImplicitNetwork) or is_hooked(net):
        return False
    names = ("__call__", "forward", "latent", "_start")
    own = all(getattr(type(net), name) is getattr(ImplicitNetwork, name) for name in names)
    return own and vars(net).keys().isdisjoint(names)


def _numbers(z0: Latent) -> Tensor:
    first = leaves(z0)[0]
    return torch.arange(first.shape[0], device=first.device)


def _check_mode(backward: Mode) -> None:
    if isinstance(backward, type) or not hasattr(backward, "attach"):
        raise TypeError(f"backward must be a mode such as JFB() or Neumann(5), got {backward!r}")


def _evaluates_later(backward: Mode) -> bool:
    """May R be evaluated in the backward pass? Not by those that record it now."""
    return not (type(backward) in (JFB, Neumann) or (type(backward) is Unroll and not backward.checkpoint))


def _forget(found: Solution) -> None:
    """What was computed from weights without recording, and is remembered: R would get no gradient.

    Autocast remembers casts before torch 2.11; `parametrize.cached()` remembers parametrised weights.
    """
    if not torch.is_grad_enabled():
        return
    if _CASTS_LAST and torch.is_autocast_enabled(found.steps.device.type):
        torch.clear_autocast_cache()
    if parametrize._cache:
        parametrize._cache = {key: kept for key, kept in parametrize._cache.items() if _recorded(kept)}


def _recorded(kept: Tensor | None) -> bool:
    return kept is not None and kept.requires_grad


def _warn_nonfinite(found: Solution) -> None:
    """Said only where the host already knows: this asks the device for nothing."""
    if found.nonfinite_seen:
        count, total = found.nonfinite_seen, len(found.steps)
        warnings.warn(f"{count} of {total} samples: {Status.NONFINITE.value}", RuntimeWarning, stacklevel=3)
