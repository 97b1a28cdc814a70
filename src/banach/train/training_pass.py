"""TrainingPass: a forward pass in training mode that records no gradient, one CUDA graph per size of batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from banach.fast import FixedDepth, Graphs, Reached, unchanged
from banach.train.precision import at_least_fp32, autocast

Made = tuple[Tensor, torch.cuda.CUDAGraph, Tensor, Reached]


class TrainingPass:
    """x -> (scores in at least fp32, Reached), by a network whose iteration finds its own depth.

    Dropout draws and batch norm updates as if the network itself had been called: a capture changes neither the
    buffers nor the random state, and every replay draws on. Elsewhere than on a GPU it runs as it is.
    """

    def __init__(self, network: FixedDepth, precision: str) -> None:
        if network.whole is None:
            raise ValueError("a training pass needs an R that a kernel iterates, got another; call the network")
        self.network, self.precision = network, precision
        self._graphs: Graphs | None = None
        self._made: dict[Any, Made] = {}

    @torch.no_grad()
    def __call__(self, x: Tensor) -> tuple[Tensor, Reached]:
        if x.device.type != "cuda":
            return self._forward(x)
        key = (x.shape, x.stride(), x.dtype)
        if key not in self._made:
            self._made[key] = self._capture(x)
        buffer, graph, output, found = self._made[key]
        buffer.copy_(x)
        graph.replay()
        return output.clone(), _copy(found)  # the next replay writes over them

    def _forward(self, x: Tensor) -> tuple[Tensor, Reached]:
        with autocast(self.precision, x.device):
            output, found = self.network(x, 0)
        return at_least_fp32(output), found

    def _capture(self, x: Tensor) -> Made:
        buffer, made = x.clone(), list[tuple[Tensor, Reached]]()
        if self._graphs is None:
            self._graphs = Graphs(x.device)

        def body() -> None:
            made[:] = [self._forward(buffer)]

        with torch.random.fork_rng([x.device]), unchanged(self.network.net.buffers()):
            self._graphs.warm_up(body)
            graph = self._graphs.capture(body)
        output, found = made[0]
        return buffer, graph, output, found


def _copy(found: Reached) -> Reached:
    numbers = found.residual, found.converged, found.nonfinite, found.steps
    residual, converged, nonfinite, steps = (part.clone() for part in numbers)
    return Reached(residual, converged, nonfinite, steps, None)
