"""TensorBoard: the figures of every epoch, for those who watch a run in a browser."""

from __future__ import annotations

import os
import warnings
from types import TracebackType
from typing import Any

from banach.train.history import Epoch

MISSING = "TensorBoard is not written: tensorboard is missing; run: pip install 'banach[app]'"

# Field of an Epoch: its name in TensorBoard, where what stands before the slash is one group.
TAGS = {
    "loss": "loss/train",
    "validation_loss": "loss/validation",
    "accuracy": "accuracy/train",
    "validation_accuracy": "accuracy/validation",
    "depth": "depth/mean",
    "max_depth": "depth/max",
    "validation_depth": "depth/validation",
    "residual": "residual/mean",
    "max_residual": "residual/max",
    "converged": "converged/train",
    "validation_converged": "converged/validation",
    "sigma": "contraction/sigma",
    "lr": "cost/lr",
    "products": "cost/products",
    "seconds": "cost/seconds",
    "memory": "cost/memory",
}


class Board:
    """Writes epochs to an event file in `folder`; use it in a `with`.

    What stands there already, from before an interruption, is hidden: write every epoch again, so that none is
    missing and none is there twice.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        writer = _writer()
        if writer is None:
            raise RuntimeError(MISSING)
        # Epochs are counted from 1. On an empty folder there is nothing to hide, and this says so harmlessly.
        self._writer = writer(os.fspath(folder), purge_step=1)

    def write(self, epoch: Epoch) -> None:
        """The figures of one epoch, on the disk when this returns; those it does not have are left out."""
        for field, tag in TAGS.items():
            value = getattr(epoch, field)
            if value is not None:
                self._writer.add_scalar(tag, float(value), epoch.epoch)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_board(folder: str | os.PathLike[str]) -> Board | None:
    """A `Board`, or None where tensorboard is not installed: then `MISSING` is what to say."""
    return None if _writer() is None else Board(folder)


def _writer() -> Any:
    """torch's SummaryWriter, None where it cannot be had."""
    with warnings.catch_warnings():
        # Its imports use what newer Pythons, protobufs and numpys deprecate; that is for its authors to mend.
        warnings.filterwarnings(
            "ignore",
            category=DeprecationWarning,
            module=r"tensorboard|torch\.utils\.tensorboard|google|pkg_resources",
        )
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
    return SummaryWriter
