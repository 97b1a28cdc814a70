"""The map of a network, and its parts as functions that leave weights, buffers and random numbers as they were."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from banach.latent import Latent, detach
from banach.network import as_inputs, is_coupled
from banach.nn.dropout import check_dropout
from banach.nn.passes import Pass, on_copies
from banach.nn.penalty import check_network
from banach.solve import Map, Solution, mixing, solve


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


def network_map(net: Any, d: Any, z0: Latent | None = None, *, gradient: bool = False) -> NetworkMap:
    """Return the map that `net(d, z0=z0)` iterates, and where it ends. The network is not changed.

    Q and start run on copies of their buffers and from the same random state at every call; R runs in a pass that
    is never entered, so nothing is written back. Buffers that a plain function closes over are out of reach.

    Args:
        net: the ImplicitNetwork.
        d: data; a tuple holds several inputs of Q.
        z0: where the solve starts; None: at `net.start`.
        gradient: Q(d) has a gradient.
    """
    check_network(net)
    check_dropout(net.R)
    with undisturbed(), torch.no_grad():
        with torch.set_grad_enabled(gradient):
            v = unchanging(net.Q)(*plain(as_inputs(d)))
        T: Map = Pass(net.R).evaluate
        z0 = unchanging(net.start)(detach(v)) if z0 is None else plain(z0)
        coupled = is_coupled(net)
        found = solve(T, z0, net.solver, inputs=(v,), tolerance=net.tolerance, coupled=coupled)
        T(found.value, v)  # draws the masks, had the solve evaluated nothing
    return NetworkMap(T, found.value, (v,), coupled, z0, found)


def unchanging(part: Callable[..., Any]) -> Callable[..., Any]:
    """`part` on copies of its buffers; the global random state is put back after every call."""
    return _forked()(partial(on_copies, part))


def mixes_samples(T: Map, z: Latent, inputs: tuple[Any, ...] = ()) -> bool:
    """Return `banach.solve.mixes_samples(...)`; if T is a module, it runs on copies of its buffers."""
    with undisturbed():
        return mixing.mixes_samples(unchanging(T), plain(z), plain(inputs))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put the random state back afterwards. Turns inference mode off."""
    with _forked(), torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        yield


def _forked() -> Any:
    """Put the random state of the host, and of every GPU that is in use, back after a block or every call."""
    kind = "mps" if torch.backends.mps.is_available() else "xpu" if torch.xpu.is_initialized() else "cuda"
    used = kind != "cuda" or torch.cuda.is_initialized()
    return torch.random.fork_rng(range(getattr(torch, kind).device_count()) if used else (), device_type=kind)


def plain(nest: Any) -> Any:
    """Return the nest without gradient; tensors made in inference mode are copied, since autograd refuses them."""
    # Not map_leaves: data may hold any object that Q understands.
    return tree_map_only(Tensor, lambda leaf: (leaf.clone() if leaf.is_inference() else leaf).detach(), nest)
