"""TensorBoard: the figures of every epoch, for watching a run in a browser."""

from __future__ import annotations

import os
import warnings
from typing import Any

from banach.train.metrics import Epoch

MISSING = "TensorBoard is not written: tensorboard is missing; run: pip install 'banach[app]'"

# Field of an Epoch: its name in TensorBoard, where the part before the slash is a group.
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

    Earlier files in the folder, from before an interruption, are hidden: write every epoch again, so that each
    occurs once.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        writer = _writer()
        if writer is None:
            raise RuntimeError(MISSING)
        self._writer = writer(os.fspath(folder), purge_step=1)  # epochs are counted from 1

    def write(self, epoch: Epoch) -> None:
        """Write the figures of one epoch to the disk; figures that are None are left out."""
        for field, tag in TAGS.items():
            value = getattr(epoch, field)
            if value is not None:
                self._writer.add_scalar(tag, float(value), epoch.epoch)
        self._writer.flush()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()


def open_board(folder: str | os.PathLike[str]) -> Board | None:
    """Return a `Board`, or None if tensorboard is not installed."""
    return None if _writer() is None else Board(folder)


def _writer() -> Any:
    """Return torch's SummaryWriter, None if it cannot be imported."""
    with warnings.catch_warnings():
        # Its imports use what newer versions of Python, protobuf and NumPy deprecate.
        modules = r"tensorboard|torch\.utils\.tensorboard|google|pkg_resources"
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=modules)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
    return SummaryWriter
