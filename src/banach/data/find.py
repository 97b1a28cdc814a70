"""Old place of find() and roots()."""

from banach.data.files import find, roots  # noqa: F401  # TODO(merge): old name
