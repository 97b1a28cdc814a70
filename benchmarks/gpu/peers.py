"""The contenders: what a user would write or install instead, and banach as it stands without its fast path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from banach import ImplicitNetwork
from benchmarks import rival
from benchmarks.gpu.deq import EuclideanTorchDEQ, PixelTorchDEQ
from benchmarks.gpu.precision import PRECISIONS, possible
from benchmarks.gpu.step import Seen, Setting, Step, Warm, fresh, without_steps, worst_pixel


class Plain(Step):
    """The paper's algorithm as its authors wrote it, in plain eager PyTorch.

    Q is computed without recording; u <- R(u, Q(d)) until the worst pixel moves by at most eps, which the host
    asks at every step; then Q is computed a second time, recorded, and R once more at the u that was found.
    (With dropout in Q the second Q differs from the first. That is what the authors' code does, and its price.)
    """

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad(), self.autocast():
            u = self.find(self.net.Q(images))
        with self.autocast():
            return self.net.S(self.net.R(u, self.net.Q(images)))

    def find(self, v: Tensor) -> Tensor:
        point = self.setting.point
        u, depth, residual = self.start(v), 0, float("inf")
        while residual > point.eps and depth < point.max_steps:
            before, u = u, self.net.R(u, v)
            residual = worst_pixel(u, before).item()
            depth += 1
        self.seen = Seen(depth, residual=residual)
        return u


class Unrolled(Step):
    """Autograd through the whole loop, at the depth that the plain loop needs: given, not asked for."""

    def forward(self, images: Tensor) -> Tensor:
        with self.autocast():
            v = self.net.Q(images)
            before = u = self.start(v)
            for _ in range(self.setting.depth):
                before, u = u, self.apply_R(u, v)
            self.seen = Seen(self.setting.depth, iterates=(u.detach(), before.detach()))
            return self.net.S(self.apply_R(u, v))

    def apply_R(self, u: Tensor, v: Tensor) -> Tensor:
        return self.net.R(u, v)

    def passes(self, depth: float) -> tuple[float, float]:
        return depth + 1, depth + 1


class Checkpointed(Unrolled):
    """The same, keeping one latent per step and computing the rest of each step again in the backward pass."""

    def apply_R(self, u: Tensor, v: Tensor) -> Tensor:
        # R draws no random numbers, so their state need not be kept.
        return checkpoint(self.net.R, u, v, use_reentrant=False, preserve_rng_state=False)


class Eager(Step):
    """banach.ImplicitNetwork as it comes: Picard, JFB, the point's tolerance, a host check at every step."""

    def forward(self, images: Tensor) -> Tensor:
        with self.autocast():
            output, found = self.net(images, solution=True)
        residual = found.residual
        if self.setting.point.relative:  # only whether it was met is known here
            residual = torch.where(found.converged, 0.0, 2 * self.setting.point.eps)
        self.seen = Seen(found.steps, residual=residual)
        return output


class Explicit(Step):
    """The explicit twin S(R(0, Q(d))): the same network, eager, with no step of a solver."""

    def __init__(self, net: ImplicitNetwork, setting: Setting) -> None:
        super().__init__(without_steps(net), setting)

    def forward(self, images: Tensor) -> Tensor:
        with self.autocast():
            return self.net(images)


@dataclass(frozen=True)
class Contender:
    """A name, how its step is made, and the precisions it is tried in; the fastest that meets eps is reported.

    `precisions=()` is the point's own. `role` is "peer" for those that solve to the tolerance another way,
    "fixed" for unrolling at a given depth, "twin" for explicit networks, "ours" for banach, "ladder" for banach
    with an R that its kernels do not know. `settle` steps go
    before anything is timed. `missing()` says in a sentence why it cannot run here, or None.
    """

    name: str
    make: Callable[[ImplicitNetwork, Setting], Step]
    role: str
    precisions: tuple[str, ...] = PRECISIONS
    settle: int = 5
    missing: Callable[[], str | None] = lambda: None

    def tried(self, setting: Setting) -> tuple[str, ...]:
        wanted = self.precisions or (setting.point.precision,)
        return tuple(name for name in wanted if name in possible(setting.device)) or ("fp32",)

    def build(self, setting: Setting, warm: Warm | None = None) -> Step:
        """The step on a fresh network, or on a copy of one in training."""
        step = self.make(fresh(setting), setting)
        if warm is not None:
            step.load(warm)
        return step


def _no_torchdeq() -> str | None:
    return None if rival.available() else rival.ABSENT


_CONTENDERS: dict[str, Contender] = {}


def register(contender: Contender) -> Contender:
    """Add a contender, or put another in the place of one with that name."""
    _CONTENDERS[contender.name] = contender
    return contender


def contenders() -> dict[str, Contender]:
    """All of them by name, in the order of the table."""
    return dict(_CONTENDERS)


register(Contender("plain", Plain, "peer"))
register(Contender("torchdeq", PixelTorchDEQ, "peer", missing=_no_torchdeq))
register(Contender("torchdeq-euclidean", EuclideanTorchDEQ, "peer", missing=_no_torchdeq))
register(Contender("unroll", Unrolled, "fixed"))
register(Contender("unroll-checkpoint", Checkpointed, "fixed"))
register(Contender("explicit", Explicit, "twin"))
register(Contender("banach-eager", Eager, "ours"))
