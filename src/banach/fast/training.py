"""TrainStep: a user's own training step as one launch."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from banach.fast.depth import DepthControl, Ladder
from banach.fast.fixed import FixedDepth, Reached
from banach.fast.fuse import wrapped
from banach.fast.graph import unchanged, why_not_captured
from banach.fast.programs import Programs, optimizer_tensors, reset_optimizer
from banach.network import ImplicitNetwork, as_inputs
from banach.solve import ConvergenceWarning


class TrainStep:
    """step(inputs, targets) -> loss: forward, loss, backward and optimizer as one CUDA graph.

    `inputs` is a tensor, or a tuple of tensors for a Q that takes several.
    The depth is chosen from the residuals of earlier steps, so that the tolerance of the network is met in nearly
    all of them, or found by a kernel that knows R; `reached` is what the last one came to. The tensors it returns
    belong to the graph: the next step writes over them. The batch must keep its shape and type. Give an optimizer
    that can be captured, such as `torch.optim.Adam(..., fused=True, capturable=True)`; the learning rate of Adam
    and AdamW may then change from step to step. `bf16` computes under autocast; `compile` compiles Q, R, S and the
    loss first. Where a step cannot be captured, as on a CPU, it runs as it is; a warning says why, and `reason`.
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
        if not isinstance(net, ImplicitNetwork):
            raise TypeError(f"TrainStep takes an ImplicitNetwork, got {type(net).__name__}")
        self.net, self.optimizer, self.bf16 = net, optimizer, bf16
        wrap: Any = wrapped if compile else (lambda part: part)
        self.loss = wrap(loss)
        self.network = FixedDepth(net, wrap, half=bf16)
        self.programs: Programs | None = None
        self.reached: Reached | None = None
        self.result: dict[int, tuple[Tensor, Reached]] = {}
        self.reason: str | None = None
        if not any(p.is_cuda for p in net.parameters()):
            self._refuse("a step is captured on a CUDA GPU alone, and no weight is on one")

    def __call__(self, inputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
        d = as_inputs(inputs)
        for name, value in (*(("inputs", one) for one in d), ("targets", targets)):
            if not isinstance(value, Tensor):
                raise TypeError(f"a training step takes a tensor of {name}, got a {type(value).__name__}")
        if self.reason is None and self.programs is None:
            self.programs = self._begin(d, targets)
        if self.programs is None:
            return self._plainly(d, targets)
        if len(d) != len(self.d):
            raise ValueError(f"a captured step takes {len(self.d)} inputs, as at its first call, got {len(d)}")
        self.rates.follow()
        pairs = list(zip((*d, targets), (*self.d, self.y), strict=True))
        for number, (value, kept) in enumerate(pairs):
            _check("inputs" if number < len(d) else "targets", value, kept)
        for value, kept in pairs:
            kept.copy_(value)
        loss, self.reached = self.result[self.programs.run()]
        return loss

    def _begin(self, d: tuple[Tensor, ...], y: Tensor) -> Programs | None:
        self.d, self.y = tuple(one.clone() for one in d), y.clone()
        self.rates = _Rates(self.optimizer, d[0].device)
        fresh = not self.optimizer.state
        after: Callable[[], None] = (lambda: reset_optimizer(self.optimizer)) if fresh else (lambda: None)
        try:
            control = first_control(self.network, d, self._autocast)
            made = Programs(d[0].device, self._body, control, self._changing, after)
            made.prepare()
        except Exception as error:  # whatever a user's network does that a capture cannot hold
            self._refuse(why_not_captured(error))
            del error
            gc.collect()  # else the next backward pass meets what the capture recorded, on another stream
            return None
        return made

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        warnings.warn(f"training steps run as they are, since they cannot be captured: {reason}", stacklevel=4)

    def _body(self, depth: int) -> Tensor | None:
        self.optimizer.zero_grad(set_to_none=True)
        self.network.refresh()
        with self._autocast():
            output, reached = self.network(self.d, depth)
        loss = self._loss(output, self.y)
        loss.backward()
        self.network.collect()
        self.optimizer.step()
        self.result[depth] = (loss.detach(), reached)
        return reached.excess

    def _plainly(self, d: tuple[Tensor, ...], y: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            output, found = self.net(*d, solution=True)
        loss = self._loss(output, y)
        loss.backward()
        self.optimizer.step()
        self.reached = Reached(found.residual, found.converged, found.nonfinite, found.steps, None)
        return loss.detach()

    def _loss(self, output: Any, y: Tensor) -> Tensor:
        half = isinstance(output, Tensor) and output.dtype in (torch.bfloat16, torch.float16)
        return cast(Tensor, self.loss(output.float() if half else output, y))

    def _autocast(self) -> Any:
        return torch.autocast(self._kind, dtype=torch.bfloat16, enabled=self.bf16)

    @property
    def _kind(self) -> str:
        return next(self.net.parameters()).device.type

    def _changing(self) -> Iterator[Tensor]:
        yield from self.net.parameters()
        yield from self.net.buffers()
        yield from optimizer_tensors(self.optimizer)


class _Rates:
    """The learning rates that a captured step reads. `follow` takes up what was set since.

    Of Adam and AdamW they become tensors, which a graph reads anew; another optimizer's numbers are part of it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.groups = optimizer.param_groups
        for group in self.groups:
            takes_tensors = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and group["capturable"]
            if takes_tensors and not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
        self.captured = [group["lr"] for group in self.groups]

    def follow(self) -> None:
        for group, rate in zip(self.groups, self.captured, strict=True):
            if group["lr"] is rate:
                continue
            if isinstance(rate, Tensor):
                rate.fill_(group["lr"])
                group["lr"] = rate
            elif group["lr"] != rate:
                raise ValueError(
                    f"the learning rate {rate:g} is part of the captured step, got {group['lr']:g}; give the "
                    "optimizer a tensor, lr=torch.tensor(...), on the GPU"
                )


def _check(name: str, value: Tensor, first: Tensor) -> None:
    if (value.shape, value.dtype) != (first.shape, first.dtype):
        raise ValueError(
            f"a captured step takes {name} of one shape and type, {tuple(first.shape)} of {first.dtype}, got "
            f"{tuple(value.shape)} of {value.dtype}; leave the last batch out, or make a TrainStep for it"
        )


def first_control(network: FixedDepth, d: Any, autocast: Callable[[], Any]) -> DepthControl | None:
    """A control that starts at what the network needs now, asked once; None where there is no depth to choose."""
    net = network.net
    if net.tolerance.max_steps == 0 or network.whole is not None:
        return None
    with torch.no_grad(), autocast(), unchanged(net.buffers()), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # captured steps record, and do not warn
        found = net(*as_inputs(d), solution=True)[1]
    return DepthControl(Ladder.up_to(net.tolerance.max_steps), int(found.steps.max()) + 1)
