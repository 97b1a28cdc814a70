"""How good is the cheap gradient? Its cosine and norm ratio against the exact one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from banach.backward import JFB, Implicit, Mode
from banach.diagnose.frozen import network_map, unchanging, undisturbed
from banach.latent import Latent, Space, detach
from banach.network import check_loss
from banach.solve import Solution, Tolerance, solve
from banach.solve.context import rounding


@dataclass(frozen=True)
class Agreement:
    """`cosine = <cheap, exact> / (|cheap| |exact|)`, `ratio = |cheap| / |exact|`; NaN where a gradient is zero."""

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
    """Compare the gradient of loss(net(d)) by a cheap mode with the exact one. No `.grad` is touched.

    The cheap gradient is taken where the network's own solver stops, as in training; the exact one at the fixed
    point, to which the solve goes on from there. Both see the same dropout masks.

    Args:
        net: the ImplicitNetwork.
        d: data; a tuple holds several inputs of Q.
        loss: takes the output, returns one number.
        z0: where the network's own solve starts; None: at `net.start`.
        backward: the cheap mode; None: the network's own.
        exact: the exact mode; None: `Implicit`, tight. If it misses its tolerance, an `AdjointWarning` says so.
        tolerance: of the fixed point; None: tight.

    Returns:
        Descent, over all weights and by part.

    Raises:
        ValueError: if no weight requires a gradient, or the loss is not one number that depends on them.
    """
    modes: Any = (backward or getattr(net, "backward", JFB()),)  # network_map refuses other modules
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
    """Run `descent_check` for several modes; they share the fixed point and the exact gradient, which cost most.

    Args:
        modes: the cheap modes.
        net, d, loss, z0, exact, tolerance: as in `descent_check`.
    Returns:
        One Descent per mode.
    """
    with undisturbed(), torch.enable_grad():
        at, weights, S = network_map(net, d, z0, gradient=True), _trained_weights(net), unchanging(net.S)
        rtol = max(1e-10, 8 * rounding(Space.of(at.u, coupled=at.coupled)))
        tight = tolerance or Tolerance(atol=0.0, rtol=rtol, max_steps=500, norm=net.tolerance.norm)
        final = solve(at.T, at.u, net.solver, inputs=at.inputs, tolerance=tight, coupled=at.coupled)
        exact = exact or Implicit(tolerance=Tolerance(atol=0.0, rtol=rtol, max_steps=1000))

        def gradient(mode: Mode, u: Latent) -> tuple[float, tuple[Tensor, ...]]:
            value = check_loss(loss(S(mode.attach(at.T, detach(u), at.inputs, coupled=at.coupled))))
            grads = torch.autograd.grad(value, list(weights), retain_graph=True, materialize_grads=True)
            return float(value.detach()), grads

        true = gradient(exact, final.value)[1]
        cheap = [gradient(mode, at.u) for mode in modes]
    made, owned = [], set().union(*weights.values())
    for mode, (value, grads) in zip(modes, cheap, strict=True):
        whole = _agreement(weights, grads, true, owned)
        parts = {name: _agreement(weights, grads, true, {name}) for name in "QRS" if name in owned}
        made.append(Descent(whole.cosine, whole.ratio, parts, value, mode, exact, final))
    return tuple(made)


def _trained_weights(net: Any) -> dict[Tensor, set[str]]:
    """Return the trainable weights, each once, with the parts that use it: tied weights belong to several."""
    owners: dict[Tensor, set[str]] = {}
    for name in ("Q", "R", "S"):
        part = getattr(net, name)
        for weight in part.parameters() if isinstance(part, nn.Module) else ():
            if weight.requires_grad:
                owners.setdefault(weight, set()).add(name)
    if not owners:
        raise ValueError("a gradient needs weights that require one, got none in Q, R and S")
    return owners


def _agreement(
    weights: Mapping[Tensor, set[str]], cheap: Sequence[Tensor], exact: Sequence[Tensor], parts: set[str]
) -> Agreement:
    """Return that of the weights of these parts, as if they were one long vector, summed in float64."""
    rows = zip(weights.values(), cheap, exact, strict=True)
    pairs = [[x.flatten().cpu().double() for x in (a, b)] for owners, a, b in rows if owners & parts]
    a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
    lengths = float(a.norm()), float(b.norm())
    cosine = float(a @ b) / (lengths[0] * lengths[1]) if all(lengths) else float("nan")
    return Agreement(cosine, lengths[0] / lengths[1] if lengths[1] else float("nan"))
