"""Old place of Stop, stop_on_signals."""

from banach.train.run import Stop, stop_on_signals  # noqa: F401  # TODO(merge): old name
