"""The contenders of the training-step benchmark: what a user would write or install instead, and banach.

Every contender is one whole training step: zero_grad, forward, cross entropy, backward, Adam with the recipe's
rates. All start from the same network in training. Peers run as their users run them, and tuned: channels_last,
fused Adam, compiled Q, R and S, and the evaluations of the loop in CUDA graphs (mode="reduce-overhead").
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from banach import JFB, ImplicitNetwork, Picard
from banach.fast import TrainStep
from banach.fast.step import autocast
from benchmarks.libraries import torchdeq_layer
from benchmarks.points import Point

Change = Callable[[ImplicitNetwork], None]


@dataclass(frozen=True)
class Setting:
    """What a contender is built for."""

    point: Point
    precision: str
    device: torch.device
    seed: int = 0
    compile: bool = False  # the parts of tuned contenders


class Step:
    """step(inputs, labels) -> loss. A contender writes `forward`, which returns the output, and `reached`."""

    captured = False  # replayed from a graph: its memory shows at the capture alone

    def __init__(self, net: ImplicitNetwork, setting: Setting, *, tuned: bool = False) -> None:
        self.net, self.setting = net, setting
        cuda = setting.device.type == "cuda"
        if (tuned or self.captured) and setting.point.data is None:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        fused, capturable, recipe = cuda and (tuned or self.captured), cuda and self.captured, setting.point.recipe
        rates: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
        self.optimizer = torch.optim.Adam(net.parameters(), **rates, fused=fused, capturable=capturable)
        self.loss = partial(F.cross_entropy, label_smoothing=recipe.label_smoothing)
        self.tuned = tuned and setting.compile
        self.Q, self.R, self.S = (self.compiled(part) for part in (net.Q, net.R, net.S))

    def compiled(self, part: nn.Module, **how: Any) -> Callable[..., Any]:
        """Return a part compiled for fixed shapes, if this contender is tuned."""
        return torch.compile(part, dynamic=False, **how) if self.tuned else part

    def forward(self, d: Tensor) -> Tensor:
        raise NotImplementedError

    def reached(self) -> tuple[float, float, float]:
        """Return the last step's depth, that of its mean sample, and its largest residual over the threshold.

        The last is at most 1 where eps is met, NaN without a solver. May launch kernels: not among timed steps.
        """
        raise NotImplementedError

    def gradients(self, d: Tensor, y: Tensor) -> Tensor:
        """Return the loss; the gradients are in the parameters."""
        self.optimizer.zero_grad()
        output = self.forward(d)
        loss = self.loss(output if output.dtype == torch.float64 else output.float(), y)
        loss.backward()
        return loss.detach()

    def __call__(self, d: Tensor, y: Tensor) -> Tensor:
        loss = self.gradients(d, y)
        self.optimizer.step()
        return loss

    def load(self, weights: Any, moments: Any) -> None:
        """Go on from a network in training. The optimizer keeps its own options; its moments are copies."""
        self.net.load_state_dict(weights)
        own = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": copy.deepcopy(moments["state"]), "param_groups": own})
        for p, state in self.optimizer.state.items():
            for name, value in state.items():  # fused Adam wants the moments in the memory format of the weights
                if isinstance(value, Tensor) and value.shape == p.shape:
                    state[name] = torch.empty_like(p, dtype=value.dtype).copy_(value)
                else:  # steps are counted on the device by fused Adam alone; elsewhere each would be a host sync
                    state[name] = value.to(p.device if self.optimizer.defaults["fused"] else "cpu")

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.setting.precision == "bf16", self.setting.device)


def zeros(v: Any) -> Any:
    """Return u0 = 0, in fp32 under autocast, as the authors start."""
    return tree_map(lambda t: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)), v)


class Plain(Step):
    """A loop in plain PyTorch: u <- R(u, Q(d)) until the worst residual is at most eps, then R once with autograd.

    The host checks at every step. As the authors wrote it (`twice`), Q is computed without autograd for the loop,
    and once more with autograd.
    """

    twice = False

    def forward(self, d: Tensor) -> Tensor:
        with self.autocast():
            v = None if self.twice else self.Q(d)
        # Blocks of their own: R with autograd must not find the weights that autocast cached without it.
        with torch.no_grad(), self.autocast():
            u = self.find(self.Q(d) if self.twice else tree_map(Tensor.detach, v))
        with self.autocast():
            output: Tensor = self.S(self.R(u, self.Q(d) if self.twice else v))
            return output

    def find(self, v: Any) -> Any:
        point = self.setting.point
        u, self.depth, self.excess = zeros(v), 0, float("inf")
        while self.excess > 1 and self.depth < point.max_steps:
            before, u = u, self.evaluate(u, v)
            self.excess = point.excess(u, before).item()
            self.depth += 1
        return u

    def reached(self) -> tuple[float, float, float]:
        return self.depth, self.depth, self.excess

    def evaluate(self, u: Any, v: Any) -> Any:
        return self.R(u, v)


class Authors(Plain):
    twice = True


class Graphs(Plain):
    """The evaluations of R in the loop are replayed CUDA graphs."""

    def evaluate(self, u: Any, v: Any) -> Any:
        if not self.tuned:
            return self.R(u, v)
        torch.compiler.cudagraph_mark_step_begin()
        return tree_map(Tensor.clone, self.R_of_loop(u, v))  # the next replay overwrites what this one returned

    @cached_property
    def R_of_loop(self) -> Callable[..., Any]:
        return self.compiled(self.net.R, mode="reduce-overhead")


class TorchDEQ(Step):
    """TorchDEQ 0.1.0: its Picard solver, its one-step gradient, its public options.

    Its test is the largest 2-norm of a row's residual. For the paper's networks the state is one row per pixel, so
    that this is the authors' test. In channels_last the rows are a view, and nothing is copied.
    """

    def __init__(self, net: ImplicitNetwork, setting: Setting, *, tuned: bool = False) -> None:
        super().__init__(net, setting, tuned=tuned)
        point = setting.point
        mode = "rel" if point.relative else "abs"
        self.deq = torchdeq_layer(solver="picard", max_steps=point.max_steps, tol=point.eps, mode=mode)
        self.by_pixel = not point.own

    def forward(self, d: Tensor) -> Tensor:
        with self.autocast():
            v = self.Q(d)
            if self.by_pixel:
                v = v.contiguous(memory_format=torch.channels_last)
            self.steps = 0
            T = lambda *state: self.to_state(self.evaluate(self.to_latent(state, v), v))  # noqa: E731
            found = self.deq(T, self.to_state(zeros(v)))
            output: Tensor = self.S(self.to_latent(found if isinstance(v, tuple) else (found,), v))
            return output

    def evaluate(self, u: Any, v: Any) -> Any:
        """Return R(u, v). The last evaluation without autograd is the last step of the solve."""
        if torch.is_grad_enabled():
            # An older PyTorch would use the bf16 weights of the evaluations without autograd again.
            torch.clear_autocast_cache()
            return self.R(u, v)
        self.steps, self.iterates = self.steps + 1, (self.R(u, v), u)
        return self.iterates[0]

    def reached(self) -> tuple[float, float, float]:
        return self.steps, self.steps, float(self.setting.point.excess(*self.iterates))

    def to_state(self, u: Any) -> Any:
        return u.permute(0, 2, 3, 1).reshape(-1, u.shape[1]) if self.by_pixel else u

    def to_latent(self, state: Any, v: Any) -> Any:
        """Return what TorchDEQ passes to its map, a tuple of tensors, as R takes it."""
        if isinstance(v, tuple):
            return tuple(state)
        if not self.by_pixel:
            return state[0]
        batch, channels, height, width = v.shape
        return state[0].view(batch, height, width, channels).permute(0, 3, 1, 2)


class Eager(Step):
    """banach.ImplicitNetwork, called eagerly: Picard, JFB, the point's tolerance."""

    def forward(self, d: Tensor) -> Tensor:
        with self.autocast():
            output, self.found = self.net(d, solution=True)
        return output

    def reached(self) -> tuple[float, float, float]:
        if self.net.tolerance.max_steps == 0:
            return 0.0, 0.0, float("nan")
        found, point, steps = self.found, self.setting.point, self.found.steps.double()
        excess = torch.where(found.converged, 0.0, torch.inf) if point.relative else found.residual / point.eps
        return float(steps.max()), float(steps.mean()), float(excess.max())


class Captured(Eager):
    """banach.fast.TrainStep: the whole step as CUDA graphs."""

    captured = True

    def __init__(self, net: ImplicitNetwork, setting: Setting, *, compiled: bool = False) -> None:
        super().__init__(net, setting)
        bf16, compiled = setting.precision == "bf16", compiled and setting.compile
        self.step = TrainStep(net, self.optimizer, self.loss, bf16=bf16, compile=compiled)

    def __call__(self, d: Tensor, y: Tensor) -> Tensor:
        loss = self.step(d, y)
        if d.is_cuda and self.step.reason is not None:  # it would be measured under the wrong name
            raise RuntimeError(f"the step was not captured: {self.step.reason}")
        self.found = self.step.reached
        return loss


def as_twin(net: ImplicitNetwork) -> None:
    """Make a network its explicit twin S(R(0, Q(d))): the same weights, no step of a solver."""
    net.tolerance = replace(net.tolerance, max_steps=0)


def as_designed(net: ImplicitNetwork) -> None:
    """Stop as the authors of rivals do: the batch as one, checked by the host after every step."""
    net.coupled, net.tolerance = True, replace(net.tolerance, check_every=1)


def by_jfb(net: ImplicitNetwork) -> None:
    """Train a rival by JFB, and by damped Picard steps where its own solver is Broyden's."""
    net.backward, net.solver = JFB(), net.solver if isinstance(net.solver, Picard) else Picard(0.5)


@dataclass(frozen=True)
class Contender:
    """How a step is made.

    `role`: "peer" solves to the tolerance as users do, "tuned" is a peer at its best, "twin" is explicit, "ours"
    is banach. `change` edits the network.
    """

    make: Callable[[ImplicitNetwork, Setting], Step]
    role: str
    change: Change = lambda net: None
    fast: bool = False  # measured in the point's precision alone

    def build(self, setting: Setting, change: Change = lambda net: None) -> Step:
        """Return the step of a new network, which `change` edits further."""
        net = setting.point.network(setting.device, setting.seed)
        self.change(net)
        change(net)
        return self.make(net, setting)


CONTENDERS = {
    "authors": Contender(Authors, "peer"),
    "plain": Contender(Plain, "peer"),
    "plain-tuned": Contender(partial(Plain, tuned=True), "tuned"),
    "plain-graphs": Contender(partial(Graphs, tuned=True), "tuned"),
    "torchdeq": Contender(TorchDEQ, "peer"),
    "torchdeq-tuned": Contender(partial(TorchDEQ, tuned=True), "tuned"),
    "banach-eager": Contender(Eager, "ours"),
    "banach-captured": Contender(Captured, "ours", fast=True),
    "banach-fast": Contender(partial(Captured, compiled=True), "ours", fast=True),
    "explicit-fast": Contender(partial(Captured, compiled=True), "twin", as_twin, fast=True),
    "exact-eager": Contender(Eager, "peer", as_designed, fast=True),
    "exact-captured": Contender(Captured, "ours", fast=True),
    "jfb-captured": Contender(Captured, "ours", by_jfb, fast=True),
    "jfb-fast": Contender(partial(Captured, compiled=True), "ours", by_jfb, fast=True),
}
