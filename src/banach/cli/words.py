"""Old place of banach.train.words."""

from banach.train.words import *  # noqa: F403  # TODO(merge): old name
