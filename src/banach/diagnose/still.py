"""Old place of the frozen network."""

from banach.diagnose.frozen import Frozen as Still  # noqa: F401  TODO(merge): old name
from banach.diagnose.frozen import undisturbed  # noqa: F401  TODO(merge): old name
