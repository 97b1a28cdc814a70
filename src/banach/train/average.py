"""Old place of Average."""

from banach.train.state import Average  # noqa: F401  # TODO(merge): old name
