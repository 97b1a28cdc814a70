"""TensorBoard: the figures of every epoch, for watching a run in a browser."""

from __future__ import annotations

import os

from banach.train.metrics import Epoch


class Board:
    """Writes epochs to an event file in `folder`; use it in a `with`.

    The file is opened at the first write. The same and later epochs in earlier files, which an interrupted run
    left, are hidden: each epoch occurs once.

    Raises:
        RuntimeError: if tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            missing = "TensorBoard is not written: tensorboard is missing; run: pip install 'banach[app]'"
            raise RuntimeError(missing) from None
        self._folder, self._make = os.fspath(folder), SummaryWriter
        self._writer: SummaryWriter | None = None

    def write(self, epoch: Epoch) -> None:
        """Write the figures of one epoch to the disk; figures that are None are left out."""
        writer = self._writer = self._writer or self._make(self._folder, purge_step=epoch.epoch)
        for field, value in vars(epoch).items():
            if isinstance(value, dict):
                tags = {f"{name}/{tag(field).rpartition('/')[2]}": one for name, one in value.items()}
            else:
                tags = {} if value is None or field in ("epoch", "warm_up") else {tag(field): value}
            for name, one in tags.items():
                writer.add_scalar(name, float(one), epoch.epoch)
        writer.flush()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()


def tag(field: str) -> str:
    """Return the name of a figure in TensorBoard, by group: "validation_loss" is "loss/validation"."""
    kind, _, group = field.rpartition("_")
    return f"{group}/{kind or 'train'}"
