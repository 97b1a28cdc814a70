"""What training tells: one Epoch per epoch, and the History of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from banach.provenance import plain


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch. Train figures are those seen while training; validation is with the averaged weights if any.

    Depth, residual and the share of samples converged are of the training solves, and None for a network that
    has no fixed point. Validation is None where nothing is held out. `sigma` is the largest singular value of
    dT/du the monitor saw on a few images, None where it is off. `products` counts J-products. `memory` is the peak
    in bytes on a GPU, None elsewhere. `warm_up`: the first that a process trained, at the start or resumed, so
    `seconds` has more than training in it.
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

    @property
    def validated(self) -> float:
        """The validation accuracy of an epoch that has one."""
        if self.validation_accuracy is None:
            raise ValueError("nothing was validated; give fit() validation images")
        return self.validation_accuracy

    def to_dict(self) -> dict[str, Any]:
        """Plain values; NaN and infinity are strings, since JSON has neither."""
        values: dict[str, Any] = plain(dataclasses.asdict(self))
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Epoch:
        """What `to_dict` wrote."""
        read: dict[str, Any] = {key: float(v) if isinstance(v, str) else v for key, v in values.items()}
        return Epoch(**{"warm_up": read.get("epoch") == 1} | read)  # which older files do not say


@dataclass(frozen=True)
class History:
    """The epochs that are done. `finished` is False where a signal (`stopped_by`) ended the run before its end."""

    epochs: tuple[Epoch, ...]
    finished: bool
    stopped_by: int | None = None

    @property
    def last(self) -> Epoch:
        if not self.epochs:
            raise ValueError("no epoch is done yet; the history is empty")
        return self.epochs[-1]
