"""evaluate(): loss, accuracy and depth of a network on a split, each image once; Scorer captures it on a GPU."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from banach import checks
from banach.data import Batches, Images
from banach.data.loader import Batch, Loader
from banach.fast.capture import HeldFixed, reason_of
from banach.fast.inference import CompiledNetwork
from banach.fast.plan import arithmetic, plan, runs_graphs
from banach.fast.step import at_least_fp32, autocast, run_network
from banach.network import ImplicitNetwork, check_loss
from banach.solve import ConvergenceWarning, Solution, Status
from banach.solve.context import assigned
from banach.solve.warning import warn_user
from banach.train.distributed import Ranks
from banach.train.metrics import NONFINITE, Compared, MetricSums, Objective, Totals

AT_A_TIME = 512  # images per captured batch; batches are powers of two


class Scorer:
    """x -> (scores in at least fp32, Solution or None), without gradients, in the mode that the network is in.

    On a GPU a network in eval mode is captured at the first call, and again when its tolerance, solver, a part or
    the address of a weight has changed. Everything else goes through the network itself; so does, with one
    warning, what cannot be captured: `reason` says why. Each of several `ranks` scores its part of every batch.
    """

    def __init__(self, net: Any, precision: str = "fp32", *, fast: bool = True, ranks: Ranks = Ranks()) -> None:
        self.net, self.precision, self.ranks = net, precision, ranks
        self.reason: str | None = None if fast and ranks.count == 1 else "fast is off"
        self._made: tuple[Any, CompiledNetwork | None] = None, None  # for which state of the network

    @torch.no_grad()
    def __call__(self, x: Tensor, *more: Tensor) -> tuple[Tensor, Solution | None]:
        predict = None if more else self.captured(x.device)
        if predict is not None:
            try:
                output, found = predict(x, solution=True)
                return at_least_fp32(output), found
            except Exception as error:  # a user's network may do anything
                self.reason, self._made = reason_of(error), (None, None)
                text = "the evaluation could not be captured as a CUDA graph and runs eagerly"
                warn_user(f"{text}: {self.reason}", UserWarning)
        with autocast(self.precision == "bf16", x.device):
            output, found = run_network(self.net, (x, *more))
        return at_least_fp32(output), found

    def captured(self, device: torch.device) -> CompiledNetwork | None:
        """Return what scores images by CUDA graphs, in the mode that the network is in, or None."""
        net = self.net
        if self.reason or net.training or not runs_graphs(device) or not isinstance(net, ImplicitNetwork):
            return None
        known, made = self._made
        if made.outdated if made else known is None or known.changed():
            made, self._made = None, (None, None)  # frees its memory before the next one needs some
            how = plan(net, device, self.precision, training=False)
            made = CompiledNetwork(net, bf16=self.precision == "bf16") if how.graph and how.own_loop else None
            self._made = HeldFixed(net), made
        return self._made[1]


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
    checks.whole("batch_size", batch_size, 1)
    scorer = Scorer(net, precision, fast=False) if scorer is None else scorer
    if scorer.net is not net or scorer.precision != precision:
        got = f"{'this' if scorer.net is net else 'another'} network in {scorer.precision}"
        raise ValueError(f"expected a Scorer(net, {precision!r}) of this network, got one of {got}")
    device = next((weight.device for weight in net.parameters()), torch.device("cpu"))
    held = data if isinstance(data, Images) else Loader(data, device)
    modes = [(module, "training", module.training) for module in net.modules()]  # parts may differ
    with assigned(modes), ExitStack() as stack:
        stack.callback(net.train, net.training)
        net.eval()
        return measure(scorer, held, batch_size, objective=Objective.of(loss, metrics))


@torch.no_grad()
def measure(scorer: Scorer, data: Images | Loader, batch_size: int, objective: Objective = Objective()) -> Totals:
    """Evaluate in the mode that the network is in."""
    device = data.device

    def once(scorer: Scorer) -> MetricSums:
        sums, size = MetricSums(device, objective.metrics), batch_size
        if scorer.captured(device):  # without gradients there is room for more
            size = min(AT_A_TIME, 1 << (8 * size - 1).bit_length())
        with arithmetic(scorer.precision, device):
            for *d, targets in _batches(data, size, scorer.ranks):
                output, found = scorer(*d)
                sums.add(check_loss(objective.loss(output, targets)), output, targets, found)
                sums.add_evaluations(scorer.net, len(targets))
        scorer.ranks.add(sums)
        if hasattr(scorer.net, "reshard"):  # a pass without backward pass keeps the gathered weights of R
            scorer.net.reshard()
        return sums

    sums = once(scorer)
    totals = sums.read()
    if not scorer.captured(device):
        return totals  # the network itself has warned of samples that did not converge
    if bool(sums.sums[NONFINITE]) or not math.isfinite(totals.loss):
        # The network itself warns of samples that diverge, and a kernel that failed gives no answer.
        return once(Scorer(scorer.net, scorer.precision, fast=False)).read()
    if totals.converged is not None and totals.converged < 1 and scorer.net.tolerance.check_every != 0:
        text = f"the fixed point was not found for all samples: {Status.MAX_STEPS.value}"
        warn_user(f"{text}; try more max_steps or a larger tolerance", ConvergenceWarning)
    return totals


def _batches(data: Images | Loader, size: int, ranks: Ranks) -> Iterator[Batch]:
    """Yield batches; those of images have at most this size, and an image for every rank: all call the network."""
    if isinstance(data, Loader):
        yield from data.epoch()
        return
    if len(data) < ranks.count:
        raise ValueError(f"{ranks.count} ranks cannot share {len(data)} images; start fewer processes")
    fits = (n for n in range(size, 0, -1) if (len(data) % n or n) >= ranks.count)
    batches = Batches(data, next(fits, len(data)), shuffle=False, part=(ranks.rank, ranks.count))
    yield from batches.epoch()
