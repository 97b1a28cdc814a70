"""TrainStep: a user's own training step as one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from banach.fast.depth import DepthControl, Ladder
from banach.fast.fixed import FixedDepth, Reached
from banach.fast.fuse import wrapped
from banach.fast.graph import unchanged
from banach.fast.programs import Programs, optimizer_tensors, reset_optimizer
from banach.network import ImplicitNetwork


class TrainStep:
    """step(images, labels) -> loss: forward, loss, backward and optimizer as one CUDA graph.

    The depth is chosen from the residuals of earlier steps, so that the tolerance of the network is met in nearly
    all of them, or found by a kernel that knows R; `reached` is what the last one came to. The tensors it returns
    belong to the graph: the next step writes over them. The batch must keep its shape. Give an optimizer that can
    be captured, such as `torch.optim.Adam(..., fused=True, capturable=True)`. `bf16` computes under autocast;
    `compile` compiles Q, R, S and the loss first.
    """

    def __init__(
        self,
        net: ImplicitNetwork,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Tensor], Tensor],
        *,
        bf16: bool = False,
        compile: bool = False,
    ) -> None:
        if not any(p.is_cuda for p in net.parameters()):
            raise ValueError("TrainStep captures CUDA graphs: move the network to a CUDA GPU first, net.cuda()")
        self.net, self.optimizer, self.bf16 = net, optimizer, bf16
        wrap: Any = wrapped if compile else (lambda part: part)
        self.loss = wrap(loss)
        self.network = FixedDepth(net, wrap, half=bf16)
        self.programs: Programs | None = None
        self.reached: Reached | None = None
        self.result: dict[int, tuple[Tensor, Reached]] = {}

    def __call__(self, d: Tensor, y: Tensor) -> Tensor:
        if self.programs is None:
            self.programs = self._begin(d, y)
        self.d.copy_(d)
        self.y.copy_(y)
        loss, self.reached = self.result[self.programs.run()]
        return loss

    def _begin(self, d: Tensor, y: Tensor) -> Programs:
        self.d, self.y = d.clone(), y.clone()
        fresh = not self.optimizer.state
        after: Callable[[], None] = (lambda: reset_optimizer(self.optimizer)) if fresh else (lambda: None)
        return Programs(
            d.device, self._body, first_control(self.network, d, self._autocast), self._changing, after
        )

    def _body(self, depth: int) -> Tensor | None:
        self.optimizer.zero_grad(set_to_none=True)
        self.network.refresh()
        with self._autocast():
            output, reached = self.network(self.d, depth)
        output = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
        loss = self.loss(output, self.y)
        loss.backward()
        self.network.collect()
        self.optimizer.step()
        self.result[depth] = (loss.detach(), reached)
        return reached.excess

    def _autocast(self) -> Any:
        return torch.autocast(self._kind, dtype=torch.bfloat16, enabled=self.bf16)

    @property
    def _kind(self) -> str:
        return next(self.net.parameters()).device.type

    def _changing(self) -> Iterator[Tensor]:
        yield from self.net.parameters()
        yield from self.net.buffers()
        yield from optimizer_tensors(self.optimizer)


def first_control(network: FixedDepth, d: Any, autocast: Callable[[], Any]) -> DepthControl | None:
    """A control that starts at what the network needs now, asked once; None where there is no depth to choose."""
    net = network.net
    if net.tolerance.max_steps == 0 or network.whole is not None:
        return None
    with torch.no_grad(), autocast(), unchanged(net.buffers()):
        found = net(d, solution=True)[1]
    return DepthControl(Ladder.up_to(net.tolerance.max_steps), int(found.steps.max()) + 1)
