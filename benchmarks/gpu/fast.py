"""banach's fast path, and the explicit twin on the same path: the whole step as one CUDA graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from banach import ImplicitNetwork
from banach.fast import Reached, TrainStep, align_state, prefers_channels_last
from benchmarks.gpu.peers import Contender, register
from benchmarks.gpu.step import Seen, Setting, Step, Warm, without_steps


class Fast(Step):
    """banach.fast.TrainStep: Picard at a depth from the ladder, JFB, Adam, captured."""

    captured = True
    compile = False

    def __init__(self, net: ImplicitNetwork, setting: Setting) -> None:
        super().__init__(net, setting)
        if prefers_channels_last(net, setting.precision):
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        recipe = setting.point.recipe
        options: Any = {"fused": True, "capturable": True} if setting.device.type == "cuda" else {}
        self.optimizer = torch.optim.Adam(
            net.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, **options
        )
        loss = partial(F.cross_entropy, label_smoothing=self.smoothing)
        self.step = TrainStep(net, self.optimizer, loss, bf16=setting.precision == "bf16", compile=self.compile)

    def load(self, warm: Warm) -> None:
        super().load(warm)
        for state in self.optimizer.state.values():  # counted on the device, so that the count can be captured
            state["step"] = state["step"].to(self.setting.device)
        align_state(self.optimizer)

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = self.step(images, labels)
        if self.step.reason is not None:  # what runs as it is has a row of its own
            raise RuntimeError(f"the step was not captured: {self.step.reason}")
        reached = self.step.reached
        assert reached is not None
        self.seen = Seen(reached.steps[:1].clone(), residual=self._residual(reached))
        return loss

    def _residual(self, reached: Reached) -> Tensor:
        """Relative to the latent where the point's eps is; of a solve that says only whether it met it, that."""
        eps = self.setting.point.eps
        if not self.setting.point.relative:
            return reached.residual[:1].clone()  # batch norm makes all samples one: they stop together
        if reached.excess is None:
            return torch.where(reached.converged.all(), eps, float("inf"))
        return reached.excess[0] * eps


class FastCompiled(Fast):
    """The same with Q, R and S compiled."""

    compile = True


class Ladder(FastCompiled):
    """The same as if no kernel knew R, like a user's own: depths from a ladder, by what earlier steps reached."""

    def __init__(self, net: ImplicitNetwork, setting: Setting) -> None:
        hide_form(net.R)
        super().__init__(net, setting)


class PlainLadder(Ladder):
    compile = False


def hide_form(R: Any) -> None:
    """Give R a class of its own whose `forward` no kernel knows; it computes the same."""
    known = type(R)

    class Own(known):  # type: ignore[misc, valid-type]
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            out: Tensor = known.forward(self, u, v)
            return out

    R.__class__ = Own


class FastTwin(Fast):
    """The explicit twin on the same path."""

    def __init__(self, net: ImplicitNetwork, setting: Setting) -> None:
        super().__init__(without_steps(net), setting)


class FastTwinCompiled(FastTwin):
    compile = True


def _no_cuda() -> str | None:
    return None if torch.cuda.is_available() else "needs CUDA"


def register_all() -> None:
    """Add the contenders of this file to those of `peers`."""
    register(Contender("banach-captured", Fast, "ours", (), missing=_no_cuda))
    register(Contender("banach-fast", FastCompiled, "ours", (), missing=_no_cuda))
    register(Contender("banach-ladder", Ladder, "ladder", (), settle=40, missing=_no_cuda))
    register(Contender("explicit-captured", FastTwin, "twin", (), missing=_no_cuda))
    register(Contender("explicit-fast", FastTwinCompiled, "twin", (), missing=_no_cuda))
