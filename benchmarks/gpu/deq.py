"""TorchDEQ 0.1.0 on the same maps: its solver, its one-step gradient, its public options and nothing else.

Its test is: the largest, over the rows of the state, of the 2-norm of a row's residual, below `f_tol`. A row is
what lies along the first axis, a sample if the state is the latent (B, C, H, W). There are two ways to bring
that to the authors' test, the largest over samples and pixels of the 2-norm over channels, at most eps:

- `PixelTorchDEQ` hands it the state as one row per pixel, (B H W, C), and f_tol = eps. The two tests are then
  the same, to the last step. In channels_last the rows are a view, so nothing is copied. One thing differs: it
  returns for every row the iterate with the least residual, so here the best of every pixel.
- `EuclideanTorchDEQ` hands it the latent as it is, with f_tol = eps. No option gives another norm. A sample's
  norm is at least that of its worst pixel (and at most sqrt(H W) times that), so it never stops too early, and
  takes some steps more, on the layout that it would have been given by a user.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from banach import ImplicitNetwork
from benchmarks.gpu.step import Seen, Setting, Step


class EuclideanTorchDEQ(Step):
    """deq(T, 0) on the latent, one row per sample; then S."""

    def __init__(self, net: ImplicitNetwork, setting: Setting) -> None:
        super().__init__(net, setting)
        self.deq = _layer(setting)

    def forward(self, images: Tensor) -> Tensor:
        with self.autocast():
            v = self.data(images)
            self.seen, self.steps = Seen(), 0

            def T(state: Tensor) -> Tensor:
                return self.to_state(self.evaluate(self.to_latent(state, v), v))

            found = self.deq(T, self.to_state(self.start(v)))[0][-1]
            return self.net.S(self.to_latent(found, v))

    def evaluate(self, u: Tensor, v: Tensor) -> Tensor:
        """R, watched: the last evaluation that is not recorded is the last step of the solve."""
        if torch.is_grad_enabled():
            # An older PyTorch would use the bf16 weights of the unrecorded evaluations again, without a gradient.
            torch.clear_autocast_cache()
            return self.net.R(u, v)
        after = self.net.R(u, v)
        self.steps += 1
        self.seen = Seen(self.steps, iterates=(after, u))
        return after

    def data(self, images: Tensor) -> Tensor:
        return self.net.Q(images)

    def to_state(self, u: Tensor) -> Tensor:
        return u

    def to_latent(self, state: Tensor, v: Tensor) -> Tensor:
        return state


class PixelTorchDEQ(EuclideanTorchDEQ):
    """deq(T, 0) on one row per pixel: its test is then the authors' one."""

    def data(self, images: Tensor) -> Tensor:
        return self.net.Q(images).contiguous(memory_format=torch.channels_last)

    def to_state(self, u: Tensor) -> Tensor:
        return u.permute(0, 2, 3, 1).reshape(-1, u.shape[1])

    def to_latent(self, state: Tensor, v: Tensor) -> Tensor:
        batch, channels, height, width = v.shape
        return state.view(batch, height, width, channels).permute(0, 3, 1, 2)


def _layer(setting: Setting) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its docstrings hold escapes that newer Pythons warn of
        from torchdeq import get_deq
    deq = get_deq(
        core="indexing",
        ift=False,
        grad=1,
        f_solver="fixed_point_iter",
        f_max_iter=setting.point.max_steps,
        f_tol=setting.point.eps,
        f_stop_mode="abs",
    )
    return deq.train()
