"""Old place of `is_hooked`."""

from banach.nn.layers import is_hooked  # noqa: F401  TODO(merge): old name
