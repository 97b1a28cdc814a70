"""What every contender is: one whole training step, and what its solve came to."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from banach import ImplicitNetwork, models
from benchmarks.gpu import precision
from benchmarks.gpu.points import Point

Warm = tuple[dict[str, Any], dict[str, Any]]  # a network in training: its state, and that of its optimizer


@dataclass(frozen=True)
class Setting:
    """What a contender is built for. `depth` is what a plain loop needs there: fixed depths are given it."""

    point: Point
    precision: str
    device: torch.device
    depth: int = 1
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Seen:
    """What a step leaves behind. Nothing is read here: tensors stay on the device until the clock has stopped.

    Either the last two iterates, or the residual itself. A captured step must hand out copies, since the next
    one writes over its own tensors.
    """

    depth: int | Tensor = 0
    iterates: tuple[Tensor, Tensor] | None = None
    residual: float | Tensor | None = None

    def read(self) -> tuple[float, float]:
        """(depth, residual), the residual in the authors' norm; NaN where nothing was solved."""
        depth = float(self.depth.max()) if isinstance(self.depth, Tensor) else float(self.depth)
        if self.iterates is not None:
            return depth, float(worst_pixel(*self.iterates))
        if isinstance(self.residual, Tensor):
            return depth, float(self.residual.max())
        return depth, float("nan") if self.residual is None else self.residual


def worst_pixel(after: Tensor, before: Tensor) -> Tensor:
    """max over samples and pixels of the 2-norm over the channels, the test of the authors' code; a 0-d tensor."""
    return torch.linalg.vector_norm(after.detach() - before.detach(), dim=1).amax()


class Step:
    """step(images, labels): zero_grad, forward, cross entropy, backward, Adam with the recipe's rates.

    A contender writes `forward`, which returns the network's output and sets `self.seen`.
    """

    captured = False  # are steps replayed from a graph, so that their memory shows at the capture alone?
    recorded_passes = 1  # passes through R that carry a gradient, where that number is fixed

    def __init__(self, net: ImplicitNetwork, setting: Setting) -> None:
        self.net, self.setting = net, setting
        recipe = setting.point.recipe
        self.optimizer = torch.optim.Adam(net.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
        self.smoothing = recipe.label_smoothing
        self.seen = Seen()

    def forward(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def gradients(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss; the gradients are in the parameters."""
        self.optimizer.zero_grad()
        output = self.forward(images)
        output = output if output.dtype == torch.float64 else output.float()
        loss = F.cross_entropy(output, labels, label_smoothing=self.smoothing)
        loss.backward()
        return loss.detach()

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = self.gradients(images, labels)
        self.optimizer.step()
        return loss

    def load(self, warm: Warm) -> None:
        """Go on from a network in training. Everyone starts from the same one, so depths can be compared.

        The optimizer keeps its own options (capturable, fused); its moments are copies, for Adam writes in place.
        """
        self.net.load_state_dict(warm[0])
        own = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": copy.deepcopy(warm[1]["state"]), "param_groups": own})

    def depth(self) -> float:
        """Steps of the solver in the last training step."""
        return self.seen.read()[0]

    def residual(self) -> float:
        """The residual of the last training step's solve."""
        return self.seen.read()[1]

    def passes(self, depth: float) -> tuple[float, float]:
        """How often such a step goes through R at the least: forward, backward."""
        return depth + 1, self.recorded_passes

    def products(self, depth: float) -> float:
        """Products with J' in the backward pass, each over the whole batch: every recorded pass but the last."""
        return self.passes(depth)[1] - 1

    def autocast(self) -> AbstractContextManager[Any]:
        return precision.autocast(self.setting.precision, self.setting.device)

    def start(self, v: Tensor) -> Tensor:
        """u0 = 0, in fp32 under autocast, as the authors start."""
        return torch.zeros_like(v, dtype=torch.promote_types(v.dtype, torch.float32))


def fresh(setting: Setting) -> ImplicitNetwork:
    """The network of the point in train mode: the same weights for the same seed."""
    torch.manual_seed(setting.seed)
    net = models.build(setting.point.model, tolerance=setting.point.tolerance)
    assert isinstance(net, ImplicitNetwork)
    return net.to(setting.device).train()


def without_steps(net: ImplicitNetwork) -> ImplicitNetwork:
    """The explicit twin, S(R(0, Q(d))): the same network and weights."""
    net.tolerance = replace(net.tolerance, max_steps=0)
    return net
