"""Old place of Work, check_identity, described."""

from banach.train.state import Work, check_identity, described  # noqa: F401  # TODO(merge): old name
