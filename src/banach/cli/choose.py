"""Old place of Settings.choose."""

from banach.train.settings import Settings

choose = Settings.choose  # TODO(merge): old name
