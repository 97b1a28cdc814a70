"""A frozen network: Q, R and S as functions that leave weights, buffers and random numbers as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from banach.latent import Latent, Space, detach
from banach.network import as_inputs
from banach.nn.buffers import on_copies
from banach.nn.dropout import check_dropout
from banach.nn.layers import uses_batch_statistics
from banach.nn.passes import Pass
from banach.nn.penalty import check_network
from banach.solve import Map, Solution, Tolerance, solve
from banach.solve.context import rounding


@dataclass(frozen=True, eq=False)
class NetworkMap:
    """T(u) = R(u, Q(d)) of a network on one batch, and the u at which its own solver stopped.

    `contraction_factor(m.T, m.u, m.inputs, coupled=m.coupled)` measures it. Every evaluation of T sees the
    same buffers and dropout masks and writes nothing back.
    """

    T: Map
    u: Latent
    inputs: tuple[Any, ...]
    coupled: bool
    z0: Latent = field(repr=False)
    solution: Solution = field(repr=False)


def network_map(net: Any, d: Any, z0: Latent | None = None) -> NetworkMap:
    """Return the map that `net(d, z0=z0)` iterates, and where it ends. The network is not changed.

    Args:
        net: the ImplicitNetwork.
        d: data; a tuple holds several inputs of Q.
        z0: where the solve starts; None: at `net.start`.
    """
    with undisturbed(net, d), torch.no_grad():
        frozen = Frozen(net)
        v = frozen.Q(*plain(as_inputs(d)))
        z0, found = frozen.find(v, z0)
        frozen.T(found.value, v)  # draws the masks, had the solve evaluated nothing
    return NetworkMap(frozen.T, found.value, (v,), frozen.coupled, z0, found)


class Frozen:
    """The parts of a network as functions that change nothing, for one pass.

    Q, S and start run on copies of their buffers and from the same random state at every call; R runs in a pass
    that is never entered, so nothing is written back. Buffers that a plain function closes over are out of reach.
    """

    def __init__(self, net: Any) -> None:
        check_network(net)
        check_dropout(net.R)
        self.net = net
        self.Q, self.S, self.start = unchanging(net.Q), unchanging(net.S), unchanging(net.start)
        self.T: Map = Pass(net.R).evaluate
        self.coupled: bool = uses_batch_statistics(net.R) if net.coupled is None else net.coupled

    def find(
        self, v: Latent, z0: Latent | None = None, *, tolerance: Tolerance | None = None
    ) -> tuple[Latent, Solution]:
        """Return z0, and what the solver found from it, to the given tolerance or the network's own."""
        with torch.no_grad():
            z0 = self.start(detach(v)) if z0 is None else plain(z0)
        tolerance = tolerance or self.net.tolerance
        return z0, solve(self.T, z0, self.net.solver, inputs=(v,), tolerance=tolerance, coupled=self.coupled)

    def settle(
        self, d: Any, z0: Latent | None = None, *, tolerance: Tolerance | None = None
    ) -> tuple[Latent, Solution, Solution]:
        """Return Q(d), where the network's own solver stops, and the fixed point to `tolerance` (None: tight)."""
        v = self.Q(*plain(as_inputs(d)))
        z0, found = self.find(v, z0)
        final = self.find(v, found.value, tolerance=tolerance or self.tight(z0))[1]
        with torch.no_grad():
            self.T(final.value, v)  # draws the masks, had the solves evaluated nothing
        return v, found, final

    def tight(self, z: Latent) -> Tolerance:
        """As near to the fixed point as the arithmetic reasonably goes, in the network's own norm."""
        rtol = close(Space.of(z, coupled=self.coupled))
        return Tolerance(atol=0.0, rtol=rtol, max_steps=500, norm=self.net.tolerance.norm)


def close(space: Space) -> float:
    """A relative tolerance for reference values: 1e-10, or eight roundings of the arithmetic."""
    return max(1e-10, 8 * rounding(space))


def unchanging(part: Callable[..., Any]) -> Callable[..., Any]:
    """`part` on copies of its buffers; the global random state is put back after every call."""

    def call(*arguments: Any) -> Any:
        with _forked(part, arguments):
            return on_copies(part, *arguments)

    return call


@contextmanager
def undisturbed(*owners: Any) -> Iterator[None]:
    """Put the random state of every device of `owners` back afterwards. Turns inference mode off."""
    inference = torch.is_inference_mode_enabled()
    with _forked(*owners), torch.inference_mode(False) if inference else nullcontext():
        yield


def plain(nest: Any) -> Any:
    """Return the nest without gradient; tensors made in inference mode are copied, since autograd refuses them."""
    # Not map_leaves: data may hold any object that Q understands.
    return tree_map_only(
        Tensor, lambda leaf: leaf.detach().clone() if leaf.is_inference() else leaf.detach(), nest
    )


def _forked(*owners: Any) -> Any:
    devices = {tensor.device for owner in owners for tensor in _tensors(owner) if tensor.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    indices = sorted({device.index or 0 for device in devices if device.type == kind})
    return torch.random.fork_rng(indices, device_type=kind)


def _tensors(owner: Any) -> list[Tensor]:
    if isinstance(owner, nn.Module):
        return [*owner.parameters(), *owner.buffers()]
    return [leaf for leaf in tree_leaves(owner) if isinstance(leaf, Tensor)]
