"""Old place of Tally, Totals."""

from banach.train.metrics import Tally, Totals  # noqa: F401  # TODO(merge): old name
