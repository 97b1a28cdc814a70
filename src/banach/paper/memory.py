"""The paper's diagram of backpropagation schemes, measured: memory and time of one step against the depth.

Claim: "Traditional backpropagation requires memory capacity proportional to depth (which is implausible for large
K). [...] JFB uses a single backward step, which avoids both large memory capacity requirements and solving a
Jacobian-type equation."

Settings: a fixed map, R of the SVHN network without batch norm and with fresh weights, at random Q(d), in fp32; K
steps from u = 0, then the gradient of the mean square of u in the weights of R. Unrolled: all K steps are
recorded. Checkpointed: one latent per step is kept, and the rest computed again. Jacobian-based: K steps without
recording, then conjugate gradients on the normal equations to a relative 1e-3. JFB: K steps without recording,
then one that is recorded. Memory is the peak beyond weights and data: max_memory_allocated on a GPU, live tensor
storage on a CPU.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from banach import models
from banach.backward import JFB, Implicit, Mode, NormalCG, Unroll
from banach.network import ImplicitNetwork, fixed_point
from banach.paper.study import Findings, Options, Row, Study
from banach.solve import Tolerance
from banach.train.precision import arithmetic

CLAIM = "memory grows with depth for plain backpropagation alone; JFB avoids that and the Jacobian-type equation"


@dataclass(frozen=True, kw_only=True)
class Plan:
    model: str
    batch: int
    depths: tuple[int, ...]
    repeats: int


FULL = Plan(model="svhn", batch=100, depths=(1, 2, 5, 10, 20, 50, 100, 200), repeats=10)
QUICK = Plan(model="digits", batch=16, depths=(1, 2, 4, 8, 16), repeats=3)
ADJOINT = Tolerance(atol=0, rtol=1e-3, max_steps=500)


@dataclass(frozen=True)
class Scheme:
    """How a step of depth K goes: steps that are solved without recording, then a mode."""

    solved: Callable[[int], int]
    mode: Callable[[int, Any], Mode]


SCHEMES: Mapping[str, Scheme] = {
    "JFB": Scheme(lambda depth: depth, lambda depth, report: JFB()),
    "Jacobian-based": Scheme(
        lambda depth: depth, lambda depth, report: Implicit(NormalCG(), ADJOINT, report=report)
    ),
    "unrolled": Scheme(lambda depth: 0, lambda depth, report: Unroll(depth)),
    "unrolled, checkpointed": Scheme(lambda depth: 0, lambda depth, report: Unroll(depth, checkpoint=True)),
}


def run(options: Options) -> Findings:
    plan = QUICK if options.quick else FULL
    R, v = _map(plan, options.torch_device)
    with arithmetic("fp32", v.device):  # TF32 could not solve the adjoint equation to a relative 1e-3
        found = {(name, depth): _measure(name, depth, R, v, plan) for name in SCHEMES for depth in plan.depths}
    rows = [_row(name, depth, plan, found) for name, depth in found]
    figures = {"memory": partial(_figure, plan, found)}
    return Findings("memory", CLAIM, rows, _notes(plan, found, v), figures, plan)


STUDY = Study("memory", CLAIM, run)


@dataclass(frozen=True)
class Measured:
    """One scheme at one depth: peak bytes, median seconds, J-products per sample (None: autograd makes them)."""

    bytes: int
    seconds: float
    products: float | None


Found = Mapping[tuple[str, int], Measured]


def _map(plan: Plan, device: torch.device) -> tuple[Any, Tensor]:
    """R with fresh weights, and Q(d) drawn at random: the same ones every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        net: Any = models.build(plan.model, batch_norm=False)
        assert isinstance(net, ImplicitNetwork)
        with torch.no_grad():
            v = net.Q(torch.randn(plan.batch, *models.get(plan.model).image))
    return net.R.to(device), v.to(device)


def _measure(name: str, depth: int, R: Any, v: Tensor, plan: Plan) -> Measured:
    products: list[int] = []
    scheme = SCHEMES[name]
    # check_every=0: exactly so many steps, also where the iteration has long arrived.
    tolerance = Tolerance(atol=0, max_steps=scheme.solved(depth), check_every=0)
    mode = scheme.mode(depth, lambda count, residual, status: products.append(count))

    def step() -> None:
        R.zero_grad(set_to_none=True)
        u: Any = fixed_point(R, torch.zeros_like(v), inputs=(v,), tolerance=tolerance, backward=mode)
        u.square().mean().backward()

    step()  # warms up
    seconds = statistics.median(_seconds(step, v.device) for _ in range(plan.repeats))
    R.zero_grad(set_to_none=True)
    made = products[-1] / len(v) if products else (0.0 if isinstance(mode, JFB) else None)
    return Measured(peak_bytes(step, v.device), seconds, made)


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    begun = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """The most memory that a step holds beyond what there was before it."""
    if device.type != "cuda":
        with LiveBytes() as live:
            step()
        return live.peak
    _wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    _wait(device)
    return torch.cuda.max_memory_allocated(device) - before


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made while it is on and still alive, by storage, and the most there were at once.

    On a CPU the backward pass runs in the same thread, and is seen. What a kernel takes and gives back within one
    call is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._known:
                self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        weakref.finalize(storage, self._drop, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _row(name: str, depth: int, plan: Plan, found: Found) -> Row:
    one = found[name, depth]
    return {
        "scheme": name,
        "depth": depth,
        "paper": _SAYS[name] if depth == plan.depths[-1] else None,
        "peak MB": one.bytes / 1e6,
        f"against depth {plan.depths[0]}": one.bytes / found[name, plan.depths[0]].bytes,
        "milliseconds": 1e3 * one.seconds,
        "time against JFB": one.seconds / found["JFB", depth].seconds,
        "J-products per sample": one.products,
    }


_SAYS = {
    "JFB": "fixed memory, no equation",
    "Jacobian-based": "fixed memory, an equation",
    "unrolled": "memory proportional to depth",
    "unrolled, checkpointed": None,
}


def growth(name: str, plan: Plan, found: Found) -> float:
    """Bytes that one more step costs, over the deeper half of the depths."""
    first, last = plan.depths[len(plan.depths) // 2], plan.depths[-1]
    return (found[name, last].bytes - found[name, first].bytes) / (last - first)


def _notes(plan: Plan, found: Found, v: Tensor) -> list[str]:
    latent = v.numel() * v.element_size()
    grows = ", ".join(f"{name} {growth(name, plan, found) / latent:.2f}" for name in SCHEMES)
    how = "torch.cuda.max_memory_allocated" if v.device.type == "cuda" else "live tensor storage"
    return [
        f"R of {plan.model} without batch norm, fresh weights, v drawn at random",
        f"a batch of {plan.batch} latents has {latent / 1e6:.3g} MB",
        f"peak beyond weights and data, by {how}; milliseconds are the median of {plan.repeats} steps",
        f"one more step of depth costs, in batches of latents: {grows}",
        f"adjoint equations to a relative {ADJOINT.rtol:g}, whatever the depth",
    ]


def _figure(plan: Plan, found: Found) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    space, pace = figure.subplots(1, 2)
    for name in SCHEMES:
        space.plot(plan.depths, [found[name, k].bytes / 1e6 for k in plan.depths], marker=".", label=name)
        pace.plot(plan.depths, [1e3 * found[name, k].seconds for k in plan.depths], marker=".")
    space.set(xlabel="depth K", ylabel="peak MB of a step", xscale="log", yscale="log")
    pace.set(xlabel="depth K", ylabel="milliseconds of a step", xscale="log", yscale="log")
    for axes in (space, pace):
        axes.grid(alpha=0.3)
    space.legend(fontsize="small")
    figure.suptitle(f"One training step on R of {plan.model}, batch {plan.batch}")
    return figure
