"""Figures of training: sums on the device, their totals, one Epoch per epoch, and the History of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from banach.provenance import numbers, plain
from banach.solve import Solution


@dataclass(frozen=True)
class Totals:
    """Means and maxima over samples; the last five are None if no fixed point was computed.

    A network that counts `evaluations` has a depth without a fixed point: those of its forward pass.
    """

    loss: float
    accuracy: float
    depth: float | None
    max_depth: int | None
    residual: float | None
    max_residual: float | None
    converged: float | None


class MetricSums:
    """Sums of loss, hits, depth, residual and convergence: a few kernels per step, no host sync before `read`."""

    def __init__(self, device: torch.device) -> None:
        # Samples, loss, hits; then solved samples, depth, residual, converged, not finite.
        self.sums = torch.zeros(8, dtype=torch.float64, device=device)
        self.most = torch.zeros(2, dtype=torch.float64, device=device)  # depth, residual
        self.nonfinite = 0  # samples with a nonfinite residual, set by `read`

    def reset(self) -> None:
        """Set all sums to zero, in place: a captured step adds to these tensors."""
        self.sums.zero_()
        self.most.zero_()

    def add(self, loss: Tensor, output: Tensor, labels: Tensor, solution: Solution | None) -> None:
        """Add one batch: its mean loss, its output, and its `Solution`, or None."""
        count = labels.new_full((), len(labels))
        parts = [count, loss * len(labels), (output.argmax(1) == labels).sum()]
        if solution is not None:
            # Without a step there is no residual: infinity would hide those of other batches.
            residual = torch.where(solution.steps > 0, solution.residual, torch.zeros_like(solution.residual))
            parts += [count, solution.steps.sum(), residual.double().sum(), solution.converged.sum()]
            parts.append(solution.nonfinite.sum())
            most = torch.stack([solution.steps.max(), residual.max()]).double()
            torch.maximum(self.most, most, out=self.most)
        self.sums[: len(parts)] += torch.stack([part.detach().double() for part in parts])

    def add_evaluations(self, net: Any, samples: int) -> int:
        """Add the depth of a batch for a network that counts its `evaluations`, such as an `ODENet`.

        Returns:
            The evaluations of its backward pass, each of which is one J-product per sample.
        """
        made = getattr(net, "evaluations", None)
        if made is None:
            return 0
        self.sums[4] += samples * made.forward
        self.most[0].clamp_(min=made.forward)
        return int(made.backward)

    def read(self) -> Totals:
        """Return the means, with one host sync."""
        figures = torch.cat([self.sums, self.most]).tolist()
        count, loss, hits, solved, depth, residual, converged, nonfinite, *most = figures
        self.nonfinite = int(nonfinite)
        if not count:
            raise ValueError("cannot average over no samples; add a batch first")
        shares = (loss / count, hits / count)
        if not solved:
            depths = (depth / count, int(most[0])) if depth else (None, None)
            return Totals(*shares, depths[0], depths[1], None, None, None)
        if not most[0]:  # the explicit twin takes no step, so it has no residual and meets no tolerance
            return Totals(*shares, 0.0, 0, None, None, None)
        share = converged / solved if math.isfinite(loss) else math.nan  # a NaN output is no answer
        return Totals(*shares, depth / solved, int(most[0]), residual / solved, most[1], share)


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "None": (type(None),),
}


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch. Train figures are those seen while training; validation uses the averaged weights, if any.

    Depth, residual and the share of converged samples are of the training solves, and None for a network without a
    fixed point. Validation is None if nothing is held out. `sigma` is the largest singular value of dT/du that the
    monitor measured on a few images, None if it is off. `products` counts J-products. `memory` is the peak on a
    GPU in bytes, None elsewhere. `warm_up`: the first epoch of a process, so `seconds` includes set-up.
    """

    epoch: int
    loss: float
    accuracy: float
    validation_loss: float | None
    validation_accuracy: float | None
    lr: float
    depth: float | None
    max_depth: int | None
    residual: float | None
    max_residual: float | None
    converged: float | None
    validation_depth: float | None
    validation_converged: float | None
    sigma: float | None
    products: int
    seconds: float
    memory: int | None
    warm_up: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; NaN and infinity are strings, since JSON has neither."""
        values: dict[str, Any] = plain(dataclasses.asdict(self))
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Epoch:
        """Return what `to_dict` wrote. Older files have no `warm_up`.

        Raises:
            TypeError: if a field is missing, unknown or of another type.
            ValueError: if a string is not a number.
        """
        epoch = Epoch(**{"warm_up": values.get("epoch") == 1} | numbers(values))
        for field in dataclasses.fields(epoch):
            value, kinds = getattr(epoch, field.name), str(field.type).split(" | ")
            if not any(type(value) in _KINDS[kind] for kind in kinds):
                raise TypeError(f"{field.name} must be {field.type}, got {str(value)[:60]!r}")
        return epoch


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
