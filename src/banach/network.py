"""fixed_point() and ImplicitNetwork: Q, then solve, then attach, then S."""

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from banach.backward import JFB, Implicit, Mode, Neumann, Unroll
from banach.latent import Latent, detach, leaves, map_leaves
from banach.nn.dropout import check_dropout
from banach.nn.layers import check_sharded, modules_of, special_layers, uses_batch_statistics, watch_over
from banach.nn.passes import Pass, PlainPass, forward_pass
from banach.solve import Map, NotConverged, Picard, Solution, Solver, Tolerance, solve
from banach.solve.warning import warn_unconverged

# Words of errors about shapes: such an error of the first evaluation may come from z0.
_SHAPE_WORDS = ("shape", "size", "channel", "dimension", "indices", "unpack", "'str'", "structure", "z0 must")
_SHAPE_ADVICE = "here z0 is zeros shaped like Q(d): where u and Q(d) differ, pass start=, which makes z0 from Q(d)"
_CALLED = "R is called as R(u, Q(d)): put a module of one argument into one whose forward(u, v) combines u and v"


def fixed_point(
    T: Map,
    z0: Latent,
    *,
    inputs: tuple[Any, ...] = (),
    solver: Solver = Picard(),
    tolerance: Tolerance = Tolerance(),
    backward: Mode = JFB(),
    coupled: bool = False,
    solution: bool = False,
    throw: bool = False,
) -> Any:
    """Return z with z = T(z, *inputs), differentiable by `backward` in everything T reads but z0.

    Args:
        T: the map, called as T(z, *inputs); must keep z's shape.
        z0: starting latent, a tensor or a nest of tensors that share axis 0 (the batch).
        inputs: tensors for T, besides what it closes over.
        solver: `Picard()`, `Anderson()` or `Broyden()`.
        tolerance: when to stop.
        backward: `JFB()`, `Neumann(k)`, `Unroll(k)` or `Implicit()`.
        coupled: T mixes the samples of a batch, which then stops as one.
        solution: also return the `Solution`.
        throw: raise unless every sample converged.
    Returns:
        The latent, or (latent, Solution).
    Raises:
        NotConverged: if `throw` is True and a sample did not converge.
    Warns:
        ConvergenceWarning: if host checks saw samples that did not converge.
    """
    _check_mode(backward)
    found = solve(T, z0, solver, inputs=inputs, tolerance=tolerance, coupled=coupled, throw=throw)
    if found.failures:
        owner = unwrap(T.func if isinstance(T, partial) else T)
        owner = getattr(owner, "__code__", owner)  # a lambda is a new function in every turn of a loop
        found = warn_unconverged(found, T, tuple(inputs), coupled=coupled, owner=owner)
    z = backward.attach(T, found.value, tuple(inputs), coupled=coupled)
    return (z, found) if solution else z


def check_loss(value: Any) -> Tensor:
    """Return what a loss gave as a tensor without axes; refuse what is not one number that weights change."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss must turn outputs into one number, got {got}; take its mean, as a tensor")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError("loss must depend on the network's weights, got a constant; do not detach the output")
    return value.reshape(())


def as_inputs(d: Any) -> tuple[Any, ...]:
    """Return the arguments of Q: a tuple is several inputs, anything else is one."""
    return d if type(d) is tuple else (d,)


def zeros(v: Latent) -> Latent:
    """The start of the paper's Algorithm 1: a latent of zeros, shaped like Q(d)."""
    return torch.zeros_like(v) if isinstance(v, Tensor) else map_leaves(torch.zeros_like, v)


def is_coupled(net: Any, layers: list[nn.Module] | None = None) -> bool:
    """Return True if samples share statistics, so that a batch stops as one. `layers`: those of R that may mix."""
    return uses_batch_statistics(net.R, layers) if net.coupled is None else bool(net.coupled)


class ImplicitNetwork(nn.Module):
    """N(d) = S(u*),  u* = R(u*, Q(d)).

    Q(d) is computed once per pass; with several inputs, `net(tokens, mask)` calls Q(tokens, mask). The fixed point
    is found without autograd, then `backward` attaches the gradient. Whether one is attached follows
    `torch.is_grad_enabled()`, never `training`. Batch norm in R updates its statistics once per pass, and in train
    mode couples the batch. No gradient reaches `start` or `z0`. With `tolerance.max_steps = 0` this is the
    explicit twin S(R(z0, Q(d))).

    Args:
        Q: module or function from data to latent. What a function reads is not in `net.parameters()`; a module is.
        R: module or function of (u, Q(d)), whose fixed point in u is found.
        S: module or function from latent to output.
        solver: `Picard()`, `Anderson()` or `Broyden()`. This and the next two may be assigned later.
        tolerance: when to stop.
        backward: `JFB()`, `Neumann(k)`, `Unroll(k)` or `Implicit()`.
        start: start(Q(d)) gives z0. The default is zeros shaped like Q(d); pass it where u is shaped otherwise.
        coupled: samples share statistics, so the batch stops as one. None: look for batch norm in R.
        compact: converged samples leave the batch (ignored where samples are coupled).
    Warns:
        ConvergenceWarning: if host checks saw samples that did not converge.
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

    def forward(self, *d: Any, z0: Latent | None = None, solution: bool = False, throw: bool = False) -> Any:
        """Return S(u*), or (S(u*), Solution).

        Args:
            d: the inputs of Q, called as Q(*d).
            z0: starting latent; None: `start(Q(*d))`.
            solution: also return the `Solution`.
            throw: raise `NotConverged` unless every sample converged.
        """
        u, found = self.latent(*d, z0=z0, throw=throw)
        y = self.S(u)
        return (y, found) if solution else y

    def latent(self, *d: Any, z0: Latent | None = None, throw: bool = False) -> tuple[Latent, Solution]:
        """Return u = R(u*, Q(*d)) with its gradient, and the `Solution`."""
        R, mode = self.R, self.backward
        _check_mode(mode)
        modules = modules_of(R)
        special = special_layers(modules)
        if special:
            products = torch.is_grad_enabled() and isinstance(mode, Implicit)
            check_sharded(special, fixed_depth=not self.tolerance.steps_per_check, products=products)
            check_dropout(R, special)
        v = self.Q(*d)
        leaves(v, "Q(d)")  # refuses None, which is no latent, by this name
        coupled = is_coupled(self, special)
        # Modes that record R in the forward pass do not evaluate it in the backward pass.
        later = not (type(mode) in (JFB, Neumann) or (type(mode) is Unroll and not mode.checkpoint))
        this_pass = forward_pass(R, modules, plain=not special, evaluates_later=later)
        with watch_over(R), this_pass:
            compact = self.compact and not coupled
            found = self._solve(this_pass, v, z0, coupled=coupled, compact=compact, throw=throw)
            if found.failures:
                found = warn_unconverged(found, this_pass.evaluate_in_solve, (v,), coupled=coupled, owner=R)
            u = mode.attach(this_pass.evaluate, found.value, (v,), coupled=coupled)
        return u, found

    def _solve(
        self, this_pass: Pass | PlainPass, v: Latent, z0: Latent | None, *, compact: bool, **options: Any
    ) -> Solution:
        default_start = z0 is None and self.start is zeros
        try:
            if default_start:
                z0 = zeros(v)
            elif z0 is None:
                with torch.no_grad():
                    z0 = self.start(detach(v))
            elif isinstance(v, Tensor):
                _check_start(leaves(z0), v)
            inputs: tuple[Any, ...] = (v,)
            if compact and this_pass.masks is not None:  # indices, by which masks are selected with the batch
                first = leaves(z0)[0]
                inputs = v, torch.arange(first.shape[0], device=first.device)
            T, tolerance = this_pass.evaluate_in_solve, self.tolerance
            return solve(T, z0, self.solver, inputs=inputs, tolerance=tolerance, compact=compact, **options)
        except (TypeError, ValueError, RuntimeError, LookupError) as error:
            # What batch norm says of one sample is not about shapes.
            said = str(error).replace("1 value per channel", "").replace("input size", "")
            about_shapes = isinstance(error, KeyError) or any(word in said for word in _SHAPE_WORDS)
            if default_start and about_shapes and not isinstance(error, NotConverged):
                error.add_note(_SHAPE_ADVICE)
            if isinstance(error, TypeError) and "positional argument" in str(error):
                error.add_note(_CALLED)
            raise

    def extra_repr(self) -> str:
        return f"solver={self.solver}, tolerance={self.tolerance}, backward={self.backward}"


def _check_start(parts: list[Tensor], v: Tensor) -> None:
    if any(leaf.shape[:1] != v.shape[:1] for leaf in parts):
        given = f"Q(d) of shape {tuple(v.shape)} and z0 of {[tuple(leaf.shape) for leaf in parts]}"
        raise ValueError(f"z0 must hold one latent for each sample of Q(d), got {given}")
    for leaf in () if torch.is_autocast_enabled(v.device.type) else parts:
        if leaf.dtype != v.dtype or leaf.device != v.device:
            got = f"got {leaf.dtype} on {leaf.device}, expected {v.dtype} on {v.device}"
            raise TypeError(f"z0 must have the dtype and device of Q(d): {got}; write z0.to(dtype, device)")


def _check_mode(backward: Mode) -> None:
    if isinstance(backward, type) or not hasattr(backward, "attach"):
        raise TypeError(f"backward must be a mode such as JFB() or Neumann(5), got {backward!r}")
