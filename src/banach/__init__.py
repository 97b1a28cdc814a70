"""banach: implicit networks in PyTorch. `solve` finds a fixed point, `attach` differentiates at it."""

from banach import diagnose as diagnose
from banach import nn as nn
from banach.backward import GMRES, JFB, Implicit, Mode, Neumann, NormalCG, Unroll
from banach.diagnose import ContractionMonitor, ContractionWarning, contraction_factor, descent_check
from banach.fast import compile
from banach.network import ImplicitNetwork, fixed_point
from banach.solve import (
    RMS,
    AdjointWarning,
    Anderson,
    Broyden,
    ConvergenceWarning,
    Euclidean,
    NotConverged,
    Picard,
    Solution,
    Solver,
    Status,
    Tolerance,
    WorstPixel,
    solve,
)

__version__ = "0.1.0"

# Not `nn` and `diagnose`: a star import must not replace torch's nn.
__all__ = [
    "GMRES",
    "JFB",
    "RMS",
    "AdjointWarning",
    "Anderson",
    "Broyden",
    "ContractionMonitor",
    "ContractionWarning",
    "ConvergenceWarning",
    "Euclidean",
    "Implicit",
    "ImplicitNetwork",
    "Mode",
    "Neumann",
    "NormalCG",
    "NotConverged",
    "Picard",
    "Solution",
    "Solver",
    "Status",
    "Tolerance",
    "Unroll",
    "WorstPixel",
    "compile",
    "contraction_factor",
    "descent_check",
    "fixed_point",
    "solve",
]
