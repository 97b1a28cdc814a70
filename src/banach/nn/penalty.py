"""Penalties: observe() shows the map and iterates of a pass; on the size of J = dT/du, and on the iterates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from banach import checks
from banach.backward import Mode
from banach.backward.jacobian import plain_attention, plain_vjp, typed
from banach.latent import Latent, Space, detach, leaves
from banach.nn.passes import on_copies
from banach.solve import Map, Solver
from banach.solve.context import assigned, rounding
from banach.solve.solver import Memory, Point


class Observed:
    """What `observe` saw of the last pass in its block: T, the fixed point z, and the iterates that were chosen.

    T has the dropout masks of the pass and starts from the same buffers; evaluating it writes nothing.
    `jacobian_penalty(seen.T, seen.z, seen.inputs, coupled=seen.coupled)` penalises the pass. In the block it is
    the backward mode of the network and, to keep iterates, its solver: it notes what it is given and calls theirs.
    """

    T: Map
    z: Latent
    inputs: tuple[Any, ...]
    coupled: bool

    def __init__(self, net: Any, steps: Sequence[int]) -> None:
        self.S, self.steps = net.S, frozenset(steps)
        self._solver: Solver = net.solver
        self._mode: Mode = net.backward
        self._rows: list[Tensor] = []

    @property
    def iterates(self) -> list[Latent]:
        """The chosen iterates that the solver went on from, in order. One that converged stays as it is."""
        space = Space.of(self.z, coupled=self.coupled)
        return [space.nest(rows) for rows in self._rows]

    def attach(self, T: Map, z_star: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False) -> Latent:
        self.T, self.z, self.inputs, self.coupled = T, z_star, tuple(inputs), coupled
        return self._mode.attach(T, z_star, inputs, coupled=coupled)

    @property
    def memory(self) -> int:
        return getattr(self._solver, "memory", 1)

    @property
    def steps_before_loop(self) -> int:
        return max(self.steps) + 1  # steps that a captured solve takes one by one, since iterates are kept

    def start(self, z: Tensor) -> Memory:
        self._rows.clear()
        return self._solver.start(z)

    def step(self, memory: Memory, at: Point) -> tuple[Tensor, Memory]:
        if at.step - 1 in self.steps:  # at evaluation k + 1 it is shown z_k
            self._rows.append(at.z)
        return self._solver.step(memory, at)

    def __getattr__(self, name: str) -> Any:
        if "z" in vars(self):
            raise AttributeError(name)
        raise AttributeError(f"{name}: no pass was observed; call the network inside the block of observe()")


@contextmanager
def observe(net: Any, steps: Sequence[int] = ()) -> Iterator[Observed]:
    """Observe the forward pass of a network inside the block, which gives the same output and gradient.

        with observe(net, steps=(2, 5)) as seen:
            y = net(d)
        loss = cross_entropy(y, labels)
        loss = loss + jacobian_penalty(seen.T, seen.z, seen.inputs, coupled=seen.coupled).mean()
        loss = loss + fixed_point_correction(seen, lambda y: cross_entropy(y, labels))

    Args:
        net: the ImplicitNetwork; of a wrapped one the inner network (`ddp.module`), and call the wrapper.
        steps: numbers of iterates to keep, z_k after k steps. Those that a solve does not reach are left out.
    """
    check_network(net)
    for step in steps:
        checks.whole("every step", step, 1)
    if steps and net.compact:
        raise ValueError("expected a network whose batch stays whole, got compact=True; set net.compact = False")
    seen = Observed(net, steps)
    with assigned([(net, "solver", seen if steps else net.solver), (net, "backward", seen)]):
        yield seen


def fixed_point_correction(seen: Observed, loss: Callable[[Any], Tensor], *, gamma: float = 0.8) -> Tensor:
    """Return the losses at the chosen iterates z_1 .. z_n of a pass, weighted by their distance from the end.

        sum_i gamma^(n + 1 - i) loss(S(T(z_i))),   to be added to loss(S(u*)), which has the weight 1

    Each has the gradient of its one evaluation of T, as JFB. It teaches T to be near the answer after few steps.
    S runs on copies of its buffers, which the pass itself has updated once; its dropout draws masks for every
    iterate. (Bai et al., CVPR 2022.)

    Args:
        seen: a pass observed with `steps`.
        loss: of an output, the mean over the batch.
        gamma: above 0, at most 1.

    Returns:
        A tensor without axes; zero if the solve reached none of the steps.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma must be above 0 and at most 1, got {gamma}")
    iterates = seen.iterates
    left = zip(range(len(iterates), 0, -1), iterates, strict=True)
    losses = (gamma**n * loss(on_copies(seen.S, seen.T(z, *seen.inputs))) for n, z in left)
    return sum(losses, start=leaves(seen.z)[0].new_zeros(()))


def check_network(net: Any) -> None:
    """Raise a TypeError for what has no Q, R and S."""
    if not all(hasattr(net, name) for name in ("Q", "R", "S", "solver", "tolerance", "backward")):
        got = f"net must be an ImplicitNetwork, got {type(net).__name__}"
        raise TypeError(f"{got}; of a wrapped network give the inner one (net.module)")


def jacobian_penalty(T: Map, z: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False) -> Tensor:
    """Estimate |J|_F^2 / n, the mean squared singular value of J = dT/dz at z, without bias.

        |J' e|^2 / n,   E e e' = I,   n the entries of a sample's latent (coupled: of the batch's)

    J = c I has the penalty c^2, whatever the size of the latent and of the batch. Entries of e are +1 or -1
    (Rademacher), drawn from the global generator: of all vectors with independent entries these have the least
    variance. Costs one evaluation of T and one product with J'. The gradient goes through that product (double
    backward), so T is evaluated with the plain form of torch's attention, whose fast kernels do not support that.
    If T holds another operation that does not, use `finite_difference_penalty`.

    Args:
        T: the map; called as T(z, *inputs). To penalise a network with the dropout masks and batch-norm buffers of
            its own forward pass, see `observe`.
        z: where J is taken, usually the fixed point. No gradient reaches it.
        inputs: further arguments of T, such as (Q(d),). The gradient reaches them, and the parameters of T.
        coupled: True if T mixes samples: then J is that of the whole batch.

    Returns:
        (batch,): one value per sample. Coupled samples share one value. Add `weight * penalty.mean()` to a loss.
    """
    space = Space.of(z, coupled=coupled)
    with plain_attention():
        value, pull = plain_vjp(lambda x: typed(T(x, *inputs), space), z)
    # The vector asks for a gradient too: else `once_differentiable` would be silently wrong, not refuse.
    e = _signs(space.rows(value)).requires_grad_(torch.is_grad_enabled())
    return space.spread(space.rows(pull(space.nest(e))[0]).square().mean(1))


def finite_difference_penalty(
    T: Map, z: Latent, inputs: tuple[Any, ...] = (), *, coupled: bool = False, h: float | None = None
) -> Tensor:
    """Estimate |J|_F^2 / n as `jacobian_penalty` does, by a difference that needs no double backward.

        |(T(z + h e) - T(z)) / h|^2 / n

    Costs two evaluations of T. One draw differs from |J e|^2 / n by O(h). The mean over draws differs from
    |J|_F^2 / n by O(h^2) only, since terms that are odd in e cancel. Rounding adds about (eps |T(z)| / h)^2.

    Args:
        T, z, inputs, coupled: as in `jacobian_penalty`.
        h: the step; None is sqrt(eps) * max(1, RMS(z)) for each sample, eps the rounding of the arithmetic that T
            is computed in: 3e-4 in float32, 0.09 under bfloat16 autocast.

    Returns:
        (batch,): one value per sample. Coupled samples share one value.
    """
    z = detach(z)
    space = Space.of(z, coupled=coupled)
    rows = space.rows(z, "z")
    size = rows.square().mean(1, keepdim=True).sqrt().clamp(min=1)
    step = rounding(space) ** 0.5 * size if h is None else checks.above_zero("h", h)
    moved = space.rows(T(space.nest(rows + step * _signs(rows)), *inputs))
    return space.spread(((moved - space.rows(T(z, *inputs))) / step).square().mean(1))


def _signs(like: Tensor) -> Tensor:
    """A vector of independent signs, which needs no host sync, so that it can be captured."""
    return torch.empty_like(like).bernoulli_(0.5).mul_(2).sub_(1)
