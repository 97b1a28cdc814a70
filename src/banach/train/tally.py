"""Sums over an epoch that stay on the device: the host asks once, at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from banach.fast import Reached
from banach.solve import Solution


@dataclass(frozen=True)
class Totals:
    """Means and maxima over the samples of an epoch; the last five are None where no fixed point was sought."""

    loss: float
    accuracy: float
    depth: float | None
    max_depth: int | None
    residual: float | None
    max_residual: float | None
    converged: float | None


class Tally:
    """Adds up loss, hits, depth, residual and convergence, a handful of kernels a step, no host round trip."""

    def __init__(self, device: torch.device) -> None:
        # Samples, loss, hits; then solved samples, depth, residual, converged, not finite.
        self.sums = torch.zeros(8, dtype=torch.float64, device=device)
        self.most = torch.zeros(2, dtype=torch.float64, device=device)  # depth, residual
        self.nonfinite = 0  # samples that left the finite numbers, once it was read

    def reset(self) -> None:
        """Back to zero, in place: a captured step goes on adding to these very tensors."""
        self.sums.zero_()
        self.most.zero_()

    def add(self, loss: Tensor, output: Tensor, labels: Tensor, found: Solution | Reached | None) -> None:
        """One batch: its mean loss, its answers, and what the solve found."""
        count = labels.new_full((), len(labels))
        hits = (output.argmax(1) == labels).sum()
        parts = [count, loss * len(labels), hits]
        if found is not None:
            # Without a step there is no residual: infinity would only hide those of other batches.
            residual = torch.where(found.steps > 0, found.residual, torch.zeros_like(found.residual))
            parts += [count, found.steps.sum(), residual.double().sum(), found.converged.sum()]
            parts.append(found.nonfinite.sum())
            most = torch.stack([found.steps.max(), residual.max()]).double()
            torch.maximum(self.most, most, out=self.most)
        self.sums[: len(parts)] += torch.stack([part.detach().double() for part in parts])

    def read(self) -> Totals:
        """The means, asked of the device in one go."""
        numbers = torch.cat([self.sums, self.most]).tolist()
        count, loss, hits, solved, depth, residual, converged, nonfinite, *most = numbers
        self.nonfinite = int(nonfinite)
        if not count:
            raise ValueError("nothing was added up: there is no mean of no samples")
        shares = (loss / count, hits / count)
        if not solved:
            return Totals(*shares, None, None, None, None, None)
        sought = most[0] > 0  # the explicit twin takes no step, so it has no residual and meets no tolerance
        return Totals(
            *shares,
            depth=depth / solved,
            max_depth=int(most[0]),
            residual=residual / solved if sought else None,
            max_residual=most[1] if sought else None,
            converged=converged / solved if sought else None,
        )
