"""How good is the cheap gradient? Its cosine and norm ratio against the exact one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from banach.backward import Implicit, Mode
from banach.diagnose.frozen import Frozen, close, undisturbed
from banach.latent import Latent, Space, detach
from banach.solve import Solution, Tolerance


@dataclass(frozen=True)
class Agreement:
    """cosine = <cheap, exact> / (|cheap| |exact|), ratio = |cheap| / |exact|; NaN where a gradient is zero."""

    cosine: float
    ratio: float


@dataclass(frozen=True, eq=False)
class Descent(Agreement):
    """The agreement over all weights, and over those of Q, R and S apart (`parts`: those that have any).

    -cheap is a descent direction when `cosine` > 0. `solution` is the solve behind the exact gradient: it is
    only as good as that converged.
    """

    parts: Mapping[str, Agreement]
    loss: float
    backward: Mode
    exact: Mode
    solution: Solution = field(repr=False)

    @property
    def descends(self) -> bool:
        return self.cosine > 0


def descent_check(
    net: Any,
    d: Any,
    loss: Callable[[Any], Tensor],
    z0: Latent | None = None,
    *,
    backward: Mode | None = None,
    exact: Mode | None = None,
    tolerance: Tolerance | None = None,
) -> Descent:
    """The gradient of loss(net(d)) by a cheap mode (None: the network's own) against the exact one.

    The cheap gradient is taken where the network's own solver stops, as in training. The exact one (None:
    `Implicit`, tight) is taken at the fixed point: the solve goes on from there to `tolerance` (None: tight).
    Both see the same dropout masks. No `.grad` is touched.
    """
    modes = (backward or net.backward,)
    return descent_checks(net, d, loss, z0, modes=modes, exact=exact, tolerance=tolerance)[0]


def descent_checks(
    net: Any,
    d: Any,
    loss: Callable[[Any], Tensor],
    z0: Latent | None = None,
    *,
    modes: Sequence[Mode],
    exact: Mode | None = None,
    tolerance: Tolerance | None = None,
) -> tuple[Descent, ...]:
    """`descent_check` for several modes: Q(d), the fixed point and the exact gradient, which cost most, once."""
    with undisturbed(net, d):
        frozen = Frozen(net)
        with torch.enable_grad():
            v, found, final = frozen.settle(d, z0, tolerance=tolerance)
        exact = exact or tight_implicit(found.value, frozen.coupled)
        weights = trained_weights(net)
        true = gradient(frozen, v, final.value, (exact, loss), list(weights))[1]
        cheap = [gradient(frozen, v, found.value, (mode, loss), list(weights)) for mode in modes]
    return tuple(
        _descent(weights, one, true, modes=(mode, exact), solution=final)
        for mode, one in zip(modes, cheap, strict=True)
    )


def _descent(
    weights: Mapping[Tensor, set[str]],
    cheap: tuple[float, list[Tensor]],
    true: list[Tensor],
    *,
    modes: tuple[Mode, Mode],
    solution: Solution,
) -> Descent:
    pairs = {weight: (a, b) for weight, a, b in zip(weights, cheap[1], true, strict=True)}
    parts = {
        name: _agreement([pairs[weight] for weight in pairs if name in weights[weight]])
        for name in ("Q", "R", "S")
        if any(name in owners for owners in weights.values())
    }
    whole = _agreement(list(pairs.values()))
    return Descent(whole.cosine, whole.ratio, parts, cheap[0], *modes, solution)


def gradient(
    frozen: Frozen, v: Latent, u: Latent, how: tuple[Mode, Callable[[Any], Tensor]], weights: Sequence[Tensor]
) -> tuple[float, list[Tensor]]:
    """The loss and its gradient in `weights`, attached at u by a mode: how = (mode, loss)."""
    mode, loss = how
    with torch.enable_grad():
        value = loss(frozen.S(mode.attach(frozen.T, detach(u), (v,), coupled=frozen.coupled)))
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"loss must turn the network's output into one number, got {got}; take its mean")
        if not value.requires_grad:
            raise ValueError("loss must depend on the network's weights, got a constant; do not detach the output")
        found = torch.autograd.grad(value.sum(), list(weights), retain_graph=True, materialize_grads=True)
    return float(value.detach()), list(found)


def tight_implicit(u: Latent, coupled: bool) -> Implicit:
    """The exact mode, solved as far as the arithmetic reasonably goes."""
    return Implicit(tolerance=Tolerance(atol=0.0, rtol=close(Space.of(u, coupled=coupled)), max_steps=1000))


def trained_weights(net: Any) -> dict[Tensor, set[str]]:
    """The trainable weights, each once, and the parts that use it: tied weights belong to several."""
    owners: dict[Tensor, set[str]] = {}
    for name in ("Q", "R", "S"):
        part = getattr(net, name)
        for weight in part.parameters() if isinstance(part, nn.Module) else ():
            if weight.requires_grad:
                owners.setdefault(weight, set()).add(name)
    if not owners:
        raise ValueError("a gradient needs weights that require one, got none in Q, R and S")
    return owners


def _agreement(pairs: Sequence[tuple[Tensor, Tensor]]) -> Agreement:
    """Over all pairs (cheap, exact) as if they were one long vector, summed in float64."""
    cheap, exact = (torch.cat([pair[side].flatten().double() for pair in pairs]) for side in (0, 1))
    lengths = float(cheap.norm()), float(exact.norm())
    cosine = float(cheap @ exact) / (lengths[0] * lengths[1]) if all(lengths) else float("nan")
    return Agreement(cosine, lengths[0] / lengths[1] if lengths[1] else float("nan"))
