"""MEASURE, never change: contraction, convergence, quality of the cheap gradient, the paper's theory."""

from banach.diagnose.contraction import Contraction, contraction_factor, is_coupled, measure_contraction
from banach.diagnose.convergence import error_bound, observed_rate
from banach.diagnose.dense import Linearised, linearise
from banach.diagnose.descent import Agreement, Descent, descent_check, descent_checks
from banach.diagnose.monitor import ContractionMonitor, ContractionWarning, Reading
from banach.diagnose.sensitivity import Sensitivity, measure_sensitivity
from banach.diagnose.still import NetworkMap, network_map
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
    "ContractionWarning",
    "Corollary",
    "Descent",
    "Identity",
    "Lemma",
    "Linearised",
    "NetworkMap",
    "Reading",
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
