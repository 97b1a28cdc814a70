"""MEASURE, never change: contraction, convergence, quality of the cheap gradient, the paper's theory."""

from banach.diagnose.contraction import (
    Contraction,
    contraction_factor,
    error_bound,
    is_coupled,
    measure_contraction,
    observed_rate,
)
from banach.diagnose.dense import Linearised, linearise
from banach.diagnose.descent import Agreement, Descent, descent_check, descent_checks
from banach.diagnose.frozen import NetworkMap, network_map
from banach.diagnose.monitor import ContractionMonitor, ContractionReading, ContractionWarning
from banach.diagnose.sensitivity import Sensitivity, measure_sensitivity
from banach.diagnose.summary import suggested_order, verdict
from banach.diagnose.theory import (
    Conditioning,
    Corollary,
    Identity,
    Lemma,
    Theorem,
    conditioning,
    corollary,
    identity,
    lemma,
    theorem,
)
from banach.solve import mixes_samples

__all__ = [
    "Agreement",
    "Conditioning",
    "Contraction",
    "ContractionMonitor",
    "ContractionReading",
    "ContractionWarning",
    "Corollary",
    "Descent",
    "Identity",
    "Lemma",
    "Linearised",
    "NetworkMap",
    "Sensitivity",
    "Theorem",
    "conditioning",
    "contraction_factor",
    "corollary",
    "descent_check",
    "descent_checks",
    "error_bound",
    "identity",
    "is_coupled",
    "lemma",
    "linearise",
    "measure_contraction",
    "measure_sensitivity",
    "mixes_samples",
    "network_map",
    "observed_rate",
    "suggested_order",
    "theorem",
    "verdict",
]
