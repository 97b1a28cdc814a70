"""Old place of Session."""

from banach.cli.train import Session, figures  # noqa: F401  # TODO(merge): old name
