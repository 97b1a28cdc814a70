"""Old place of Epoch, History."""

from banach.train.metrics import Epoch, History  # noqa: F401  # TODO(merge): old name
