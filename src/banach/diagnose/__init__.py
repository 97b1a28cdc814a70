"""MEASURE, never change: contraction, convergence, quality of the cheap gradient."""

from banach.diagnose.contraction import (
    Contraction, contraction_factor, error_bound, measure_contraction, observed_rate,
)  # fmt: skip
from banach.diagnose.descent import Agreement, Descent, descent_check, descent_checks
from banach.diagnose.frozen import NetworkMap, mixes_samples, network_map
from banach.diagnose.monitor import (
    ContractionMonitor, ContractionReading, ContractionWarning, suggested_order, verdict,
)  # fmt: skip

__all__ = [
    "Agreement", "Contraction", "ContractionMonitor", "ContractionReading", "ContractionWarning", "Descent",
    "NetworkMap", "contraction_factor", "descent_check", "descent_checks", "error_bound", "measure_contraction",
    "mixes_samples", "network_map", "observed_rate", "suggested_order", "verdict",
]  # fmt: skip
