"""evaluate(): loss, accuracy and depth of a network on a split, each image once; Scorer captures it on a GPU."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from banach.backward import JFB, Implicit, Neumann
from banach.data import Augmentation, Batches, Images
from banach.data.loader import Batch, Loader
from banach.fast.body import FastNetwork
from banach.fast.capture import CapturedCalls, reason_of
from banach.fast.inference import CompiledNetwork
from banach.fast.plan import plan, runs_graphs
from banach.fast.step import at_least_fp32, run_network
from banach.network import ImplicitNetwork, as_inputs
from banach.solve import ConvergenceWarning, Solution, Status
from banach.solve.warning import warn_user
from banach.train.distributed import Ranks, released
from banach.train.metrics import Compared, MetricSums, Objective, Totals
from banach.train.precision import arithmetic, autocast

Scores = tuple[Tensor, Solution | None]
AT_A_TIME = 512  # images per captured batch in eval mode; batches are powers of two


class Scorer:
    """x -> (scores in at least fp32, Solution or None), without gradients, in the mode that the network is in.

    On a GPU a network is captured at the first call, and again when its tolerance, solver,
    a part, a module's mode or the address of a weight has changed. In eval mode `CompiledNetwork` predicts; in
    training mode only an R that the kernels know is captured. Everything else goes through the network itself. So
    does, with one warning, what cannot be captured: `reason` then says why. With several `ranks`, all of them
    evaluate together: each scores its part of every batch.
    """

    def __init__(self, net: Any, precision: str = "fp32", *, fast: bool = True, ranks: Ranks = Ranks()) -> None:
        self.net, self.precision, self.ranks = net, precision, ranks
        self.reason: str | None = None if fast and ranks.count == 1 else "fast is off"
        self._made: dict[bool, tuple[Any, Callable[[Tensor], Scores] | None]] = {}  # by mode: state, program

    @torch.no_grad()
    def __call__(self, x: Tensor, *more: Tensor) -> Scores:
        program = None if more else self._program(x.device)
        if program is not None:
            try:
                return program(x)
            except Exception as error:  # a user's network may do anything
                self.reason = reason_of(error)
                self._made.clear()
                text = "the evaluation could not be captured as a CUDA graph and runs eagerly"
                warn_user(f"{text}: {self.reason}", UserWarning)
        return scores(self.net, (x, *more), self.precision)

    def captures(self, device: torch.device) -> bool:
        """Return True if images are scored by CUDA graphs, in the mode that the network is in."""
        return self._program(device) is not None

    def batch_size(self, asked: int, device: torch.device) -> int:
        """Return how many images to score at a time. In training mode scores depend on it: then as asked."""
        if self.net.training or not self.captures(device):
            return asked
        # Without gradients there is room for more images than in training, but how many is unknown.
        return min(AT_A_TIME, 1 << (8 * asked - 1).bit_length())

    def _program(self, device: torch.device) -> Callable[[Tensor], Scores] | None:
        """Return the program for the network as it is, None if there is none."""
        if self.reason is not None or not runs_graphs(device) or not isinstance(self.net, ImplicitNetwork):
            return None
        mode, now = self.net.training, _state(self.net)
        if mode not in self._made or self._made[mode][0] != now:
            self._made.pop(mode, None)  # frees its memory before the next one needs some
            self._made[mode] = now, self._in_training(device) if mode else self._in_evaluation(device)
        return self._made[mode][1]

    def _in_evaluation(self, device: torch.device) -> Callable[[Tensor], Scores] | None:
        how = plan(self.net, device, self.precision, training=False)
        if not how.graph or not how.own_loop:
            return None
        predict = CompiledNetwork(self.net, bf16=self.precision == "bf16")

        def program(x: Tensor) -> Scores:
            output, found = predict(x, solution=True)
            return at_least_fp32(output), found

        return program

    def _in_training(self, device: torch.device) -> Callable[[Tensor], Scores] | None:
        """Dropout draws and batch norm updates as if the network had been called."""
        net = copy.copy(self.net)  # modules are shared
        if type(net.backward) in (Neumann, Implicit):
            net.backward = JFB()  # the same value, and the mode that FastNetwork takes apart
        # Not as bf16, which autocast does: fused blocks draw other dropout masks, and bf16 weights need a refresh.
        how = plan(net, device, "tf32" if self.precision == "tf32" else "fp32")
        if not (how.graph and how.own_loop and how.kernel):
            return None
        network, calls = FastNetwork(net, how), CapturedCalls(net.buffers())

        def forward(x: Tensor) -> Scores:
            with autocast(self.precision, x.device):
                output, found = network(x)
            return at_least_fp32(output), found

        def program(x: Tensor) -> Scores:
            output, found = calls((x.shape, x.stride(), x.dtype), forward, (x,), len(x))
            names = ("residual", "converged", "nonfinite", "steps")
            kept = {name: getattr(found, name).clone() for name in names}  # the next replay overwrites the tensors
            return output.clone(), replace(found, **kept, value=())

        return program


def scores(net: Any, x: Tensor | tuple[Tensor, ...], precision: str = "fp32") -> Scores:
    """Return the network's output in at least fp32 and the Solution, None for one without fixed point."""
    d = as_inputs(x)
    with autocast(precision, d[0].device):
        output, found = run_network(net, d)
    return at_least_fp32(output), found


def evaluate(
    net: nn.Module,
    data: Images | Iterable[Any],
    *,
    batch_size: int = 400,
    precision: str = "fp32",
    scorer: Scorer | None = None,
    loss: Compared | None = None,
    metrics: Mapping[str, Compared] | None = None,
) -> Totals:
    """Evaluate a network in eval mode. Its mode is restored.

    Args:
        net: the network, on the device of the images.
        data: images, each used once, without augmentation; or batches (inputs, targets), as `fit` takes them.
        batch_size: images at a time; a scorer that captures chooses its own.
        precision: "fp32", "tf32" or "bf16".
        scorer: a `Scorer` of this network that is kept between evaluations, which is fast on a GPU.
        loss, metrics: as for `fit`; by default cross entropy and accuracy.
    Returns:
        Means over the samples: loss, metrics and, where there is a fixed point, how well it was found.
    Warns:
        ConvergenceWarning: if fixed points were not found.
    """
    scorer = Scorer(net, precision, fast=False) if scorer is None else scorer
    if scorer.net is not net or scorer.precision != precision:
        got = f"{'this' if scorer.net is net else 'another'} network in {scorer.precision}"
        expected = f"this one in {precision}; make a Scorer(net, {precision!r})"
        raise ValueError(f"the scorer is of {got}, expected {expected}")
    device = next((weight.device for weight in net.parameters()), torch.device("cpu"))
    held = data if isinstance(data, Images) else Loader(data, device)
    training = net.training
    net.eval()
    try:
        return measure(scorer, held, batch_size, objective=Objective.of(loss, metrics))
    finally:
        net.train(training)


@torch.no_grad()
def measure(
    scorer: Scorer,
    data: Images | Loader,
    batch_size: int,
    begin: Callable[[], object] = lambda: None,
    *,
    augment: Augmentation | None = None,
    epoch: int = 0,
    objective: Objective = Objective(),
) -> Totals:
    """Evaluate in the mode that the network is in.

    Args:
        scorer, data, batch_size: as for `evaluate`.
        begin: called before the first sample; it may be called twice.
        augment: changes the images, differently in every `epoch`.
        objective: the loss and the metrics.
    """

    def once(scorer: Scorer) -> MetricSums:
        begin()
        size = scorer.batch_size(batch_size, data.device)
        return _sums(scorer, _batches(data, size, scorer.ranks, augment, epoch), data.device, objective)

    sums = once(scorer)
    totals = sums.read()
    if not scorer.captures(data.device):
        return totals  # the network itself has warned of samples that did not converge
    if sums.nonfinite or not math.isfinite(totals.loss):
        # The network itself warns of samples that diverge, and a kernel that failed gives no answer.
        return once(Scorer(scorer.net, scorer.precision, fast=False)).read()
    if totals.converged is not None and totals.converged < 1 and scorer.net.tolerance.check_every != 0:
        text = f"the fixed point was not found for all samples: {Status.MAX_STEPS.value}"
        warn_user(f"{text}; try more max_steps or a larger tolerance", ConvergenceWarning)
    return totals


def _sums(scorer: Scorer, batches: Iterable[Batch], device: torch.device, objective: Objective) -> MetricSums:
    """Score batches, on all ranks."""
    sums = MetricSums(device, objective.metrics)
    with arithmetic(scorer.precision, device):
        for d, targets in batches:
            output, found = scorer(*d)
            sums.add(objective.loss(output, targets), output, targets, found)
            sums.add_evaluations(scorer.net, len(targets))
    scorer.ranks.add(sums)
    released(scorer.net)
    return sums


def _batches(
    data: Images | Loader, size: int, ranks: Ranks, augment: Augmentation | None, epoch: int
) -> Iterator[Batch]:
    """Yield batches; those of images have at most this size, and an image for every rank: all call the network."""
    if isinstance(data, Loader):
        yield from map(data.placed, data.epoch())
        return
    if len(data) < ranks.count:
        raise ValueError(f"{ranks.count} ranks cannot share {len(data)} images; start fewer processes")
    fits = (n for n in range(size, 0, -1) if (len(data) % n or n) >= ranks.count)
    batches = Batches(data, next(fits, len(data)), augment=augment, shuffle=False, part=ranks.part)
    yield from (((images,), labels) for images, labels in batches.epoch(epoch))


def _state(net: Any) -> tuple[Any, ...]:
    """Return what a CUDA graph holds fixed: tensors by their address, not by their values."""
    return (
        *(net.tolerance, net.solver, net.backward, net.start, net.coupled),
        *(id(part) for part in (net.Q, net.R, net.S)),
        *((id(module), module.training, getattr(module, "alpha", None)) for module in net.modules()),
        *((tensor.data_ptr(), tensor.dtype, tensor.stride()) for tensor in (*net.parameters(), *net.buffers())),
    )
