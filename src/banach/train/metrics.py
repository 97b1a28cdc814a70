"""Figures of training: loss and metrics, their sums on the device, one Epoch per epoch, the History of a run."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from banach.provenance import from_plain, plain
from banach.solve import Solution

Compared = Callable[[Any, Tensor], Tensor]  # (output, targets) -> a loss, or the values of a metric


def accuracy(output: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample whether its highest score is that of its label, or of its most probable class."""
    return output.argmax(1) == (labels.argmax(1) if labels.is_floating_point() else labels)


def cross_entropy(output: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross entropy; refuse one output, of which it would be zero, and what it does not take."""
    shape = tuple(getattr(output, "shape", ()))
    if shape[1:2] == (1,):
        got = f"got one output and {targets.dtype} targets; give two outputs for two classes"
        raise ValueError(f"cross entropy needs a score for each class, {got}, or pass loss= for a regression")
    try:
        return F.cross_entropy(output, targets, label_smoothing=label_smoothing)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        got = f"got {shape or type(output).__name__} and {targets.dtype} {tuple(targets.shape)} ({error})"
        text = "cross entropy needs outputs (batch, classes, ...) and int64 class numbers below their number"
        raise ValueError(f"{text}, {got}; change S, or pass loss=") from error


@dataclass(frozen=True)
class Objective:
    """What is minimised and what is measured, by default those of classification.

    A metric returns a value per sample (or per token, pixel, ...), or the mean of these values.
    """

    loss: Compared = cross_entropy
    metrics: Mapping[str, Compared] = field(default_factory=lambda: {"accuracy": accuracy})

    @staticmethod
    def of(loss: Compared | None, metrics: Mapping[str, Compared] | None) -> "Objective":
        """Return the objective; without a loss that of classification, without metrics those of the loss."""
        default = {"accuracy": accuracy} if loss is None else {}
        chosen = cross_entropy if loss is None or loss is F.cross_entropy else loss
        return Objective(chosen, default if metrics is None else metrics)


@dataclass(frozen=True)
class Totals:
    """Means and maxima over samples; depth to converged are None if no fixed point was computed.

    A network that counts `evaluations` has a depth without a fixed point: those of its forward pass. `accuracy` is
    the metric of that name, None if there is none; `metrics` holds all others.
    """

    loss: float
    accuracy: float | None
    depth: float | None
    max_depth: int | None
    residual: float | None
    max_residual: float | None
    converged: float | None
    metrics: dict[str, float] = field(default_factory=dict, hash=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the figures that `plain` wrote.

        Raises:
            TypeError: if a field is missing, unknown or of another type.
            ValueError: if a string is not a number.
        """
        tables = {key: from_plain(value) for key, value in values.items() if isinstance(value, dict)}
        made = cls(**from_plain(values) | tables)
        kinds: dict[str, Any] = {one.name: one.type for one in dataclasses.fields(cls)}
        checked = [(name, value, kinds[name]) for name, value in vars(made).items()]
        checked += [(name, value, float) for table in tables.values() for name, value in table.items()]
        for name, value, wanted in checked:
            parts = wanted.__args__ if isinstance(wanted, UnionType) else (wanted,)
            allowed = {getattr(part, "__origin__", part) for part in parts}
            if type(value) not in allowed and not (type(value) is int and float in allowed):
                raise TypeError(f"{name} must be {getattr(wanted, '__name__', wanted)}, got {str(value)[:60]!r}")
        return made


# `MetricSums.sums`: samples, loss, metrics, then these. Depths are sums of steps; all but the residual are counts.
SOLVED, DEPTH, RESIDUAL, CONVERGED, NONFINITE = range(-5, 0)
COUNTS = [0, SOLVED, DEPTH, CONVERGED, NONFINITE]


class MetricSums:
    """Sums of loss, metrics, depth, residual and convergence: a few kernels per step; only `read` syncs."""

    def __init__(self, device: torch.device, metrics: Mapping[str, Compared] = Objective().metrics) -> None:
        self.metrics = metrics
        self.sums = torch.zeros(7 + len(metrics), dtype=torch.float64, device=device)
        self.most = torch.zeros(2, dtype=torch.float64, device=device)  # depth, residual

    def reset(self) -> None:
        """Set all sums to zero, in place: a captured step adds to these tensors."""
        self.sums.zero_()
        self.most.zero_()

    @torch.no_grad()
    def add(self, loss: Tensor, output: Any, targets: Tensor, solution: Solution | None) -> None:
        """Add one batch: its mean loss, its output, and its `Solution`, or None."""
        count = self.sums.new_full((), len(targets))
        parts = [count, loss * len(targets)]
        for name, of in self.metrics.items():
            values = of(output, targets)
            if not isinstance(values, Tensor):
                raise TypeError(f"the metric {name} must return a tensor, got {type(values).__name__}")
            total = values.sum(dtype=torch.float64)  # of all samples, or their mean
            parts.append(total if values.numel() == len(targets) else total * (len(targets) / values.numel()))
        if solution is not None:
            # Without a step there is no residual: infinity would hide those of other batches.
            residual = torch.where(solution.steps > 0, solution.residual, torch.zeros_like(solution.residual))
            rows = len(solution.steps)  # Q may make several of a sample, such as one per token
            parts += [count if rows == len(targets) else count.new_full((), rows), solution.steps.sum()]
            parts += [residual.double().sum(), solution.converged.sum(), solution.nonfinite.sum()]
            most = torch.stack([solution.steps.max(), residual.max()]).double()
            torch.maximum(self.most, most, out=self.most)
        self.sums[: len(parts)] += torch.stack([part.double() for part in parts])

    def add_evaluations(self, net: Any, samples: int) -> int:
        """Add the depth of a batch for a network that counts its `evaluations`, such as an `ODENet`.

        Returns:
            The evaluations of its backward pass, each of which is one J-product per sample.
        """
        made = getattr(net, "evaluations", None)
        if made is None:
            return 0
        self.sums[DEPTH] += samples * made.forward
        self.most[0].clamp_(min=made.forward)
        return int(made.backward)

    def read(self) -> Totals:
        """Return the means, with one host sync."""
        figures = torch.cat([self.sums, self.most]).tolist()
        count, loss, *measured = figures[:-7]
        solved, depth, residual, converged, _, *most = figures[-7:]
        metrics = {name: total / count for name, total in zip(self.metrics, measured, strict=True)}
        means = (loss / count, metrics.pop("accuracy", None))
        rows = solved or count
        mean, deepest = (depth / rows, int(most[0])) if solved or depth else (None, None)
        if not solved or not most[0]:  # the explicit twin takes no step: it has no residual and meets no tolerance
            return Totals(*means, mean, deepest, None, None, None, metrics)
        share = converged / rows if math.isfinite(loss) else math.nan  # a NaN output is no answer
        return Totals(*means, mean, deepest, residual / rows, most[1], share, metrics)


@dataclass(frozen=True, kw_only=True)
class Epoch(Totals):
    """One epoch: the totals of its training steps, and more. Validation uses the averaged weights, if any.

    Validation is None if nothing is held out. `sigma` is the largest singular value of dT/du that the monitor
    measured on a few images, None if it is off. `products` counts J-products. `memory` is the peak on a GPU in
    bytes, None elsewhere. `warm_up`: the first epoch of a process, so `seconds` includes set-up.
    """

    epoch: int
    validation_loss: float | None
    validation_accuracy: float | None
    lr: float
    validation_depth: float | None
    validation_converged: float | None
    sigma: float | None
    products: int
    seconds: float
    memory: int | None
    warm_up: bool = False
    validation_metrics: dict[str, float] = field(default_factory=dict, hash=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; NaN and infinity are strings, since JSON has neither. Empty tables are left out."""
        values: dict[str, Any] = plain(dataclasses.asdict(self))
        return {name: value for name, value in values.items() if value != {}}


@dataclass(frozen=True)
class History:
    """The epochs that are done. `finished`: all of them. `stopped_by`: the signal that asked to stop, or None."""

    epochs: tuple[Epoch, ...]
    finished: bool
    stopped_by: int | None = None

    @property
    def last(self) -> Epoch:
        if not self.epochs:
            raise ValueError("no epoch is done yet; the history is empty")
        return self.epochs[-1]
