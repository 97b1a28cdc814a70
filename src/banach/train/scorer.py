"""Scorer: a network's scores without gradients, by programs that are captured once, where they can be."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from banach.backward import JFB, Implicit, Neumann
from banach.fast import CompiledNetwork, FixedDepth, Reached
from banach.fast.graph import why_not_captured
from banach.network import ImplicitNetwork, is_as_written
from banach.nn.passes import uses_batch_statistics
from banach.solve import Picard, Solution
from banach.train.precision import at_least_fp32, autocast
from banach.train.training_pass import TrainingPass

Scores = tuple[Tensor, Solution | Reached | None]
AT_A_TIME = 512  # images for a program in eval mode, whose batches are powers of two


class Scorer:
    """x -> (scores in at least fp32, what the solve found or None), in the mode that the network is in.

    On a GPU a network that iterates by Picard is captured when it is first asked, and once more when its
    tolerance, its solver, a part, a module's mode or the place of a weight has changed; values of weights may
    change. In eval mode this is by `CompiledNetwork`, so the steps of an R that the kernels do not know are whole
    stages; in training mode only an R that they know is captured. All else goes through the network itself, and
    so does, with one warning, what cannot be captured: `reason` then says why.
    """

    def __init__(self, net: Any, precision: str = "fp32", *, fast: bool = True) -> None:
        self.net, self.precision = net, precision
        self.reason: str | None = None if fast else "fast is off"
        self._made: dict[bool, tuple[Any, Callable[[Tensor], Scores] | None]] = {}  # by mode: for what, and what

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Scores:
        if self.captures(x.device):
            try:
                program = self._program()
                if program is not None:
                    return program(x)
            except Exception as error:  # whatever a user's network does that a capture cannot hold
                self.reason = why_not_captured(error)
                self._made.clear()
                warnings.warn(f"images go through the network step by step: {self.reason}", stacklevel=7)
        return scores(self.net, x, self.precision)

    def captures(self, device: torch.device) -> bool:
        """Is a program looked for, in the mode that the network is in?"""
        return self.reason is None and _on_gpu(device) and _is_known(self.net)

    def batch_size(self, asked: int, device: torch.device) -> int:
        """Images at a time, for who does not mind. Scores in training mode depend on it: then what was asked."""
        if self.net.training or not self.captures(device):
            return asked
        # Without gradients there is room for more images than in training, but how many nobody knows.
        return min(AT_A_TIME, 1 << (8 * asked - 1).bit_length())

    def itself(self) -> Scorer:
        """The scorer that captures nothing."""
        return Scorer(self.net, self.precision, fast=False)

    def _program(self) -> Callable[[Tensor], Scores] | None:
        """The program for the network as it is, None where there is none."""
        mode, now = self.net.training, _state(self.net)
        if mode not in self._made or self._made[mode][0] != now:
            self._made.pop(mode, None)  # its memory is free before the next one needs some
            self._made[mode] = now, self._in_training() if mode else self._in_evaluation()
        return self._made[mode][1]

    def _in_evaluation(self) -> Callable[[Tensor], Scores]:
        compiled = CompiledNetwork(self.net, bf16=self.precision == "bf16")

        def program(x: Tensor) -> Scores:
            output, found = compiled(x, solution=True)
            return at_least_fp32(output), found

        return program

    def _in_training(self) -> Callable[[Tensor], Scores] | None:
        net = copy.copy(self.net)  # modules are shared
        net.backward = JFB()  # the same value, and the mode that FixedDepth takes apart
        network = FixedDepth(net)
        return None if network.whole is None else TrainingPass(network, self.precision)


def scores(net: Any, x: Tensor, precision: str = "fp32") -> tuple[Tensor, Solution | None]:
    """The network's output in at least fp32, and what the solve found, None for one without a fixed point."""
    found: Solution | None = None
    with autocast(precision, x.device):
        output = net(x, solution=True) if isinstance(net, ImplicitNetwork) else net(x)
    if isinstance(net, ImplicitNetwork):
        output, found = output
    return at_least_fp32(output), found


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _is_known(net: Any) -> bool:
    """Is N(d) = S(R(z, Q(d))) with z by Picard's iteration and, in eval mode, each sample on its own?

    Unroll is left out: its value lies further on from z.
    """
    return (
        is_as_written(net)
        and type(net.solver) is Picard
        and type(net.backward) in (JFB, Neumann, Implicit)
        and (net.training or not _is_mixed(net))
    )


def _is_mixed(net: ImplicitNetwork) -> bool:
    """Does a sample's answer in eval mode depend on others, or on parts that are in training mode all the same?"""
    return bool(net.coupled) or uses_batch_statistics(net.R) or any(module.training for module in net.modules())


def _state(net: Any) -> tuple[Any, ...]:
    """What a capture holds fast: tensors by their place in memory, not by their values."""
    return (
        *(net.tolerance, net.solver, net.start, net.coupled),
        *(id(part) for part in (net.Q, net.R, net.S)),
        *((id(module), module.training) for module in net.modules()),
        *((tensor.data_ptr(), tensor.dtype, tensor.stride()) for tensor in (*net.parameters(), *net.buffers())),
    )
