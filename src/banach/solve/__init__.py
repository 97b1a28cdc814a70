"""FIND u*: a solver proposes, the loop evaluates. No autograd in this room."""

from banach.solve.anderson import Anderson
from banach.solve.broyden import Broyden
from banach.solve.loop import solve
from banach.solve.mixing import Fault, mixes_samples
from banach.solve.picard import Picard
from banach.solve.solution import NotConverged, Solution, Status
from banach.solve.solver import Map, Memory, Point, Solver
from banach.solve.tolerance import RMS, Euclidean, Norm, Tolerance, WorstPixel
from banach.solve.warning import AdjointWarning, ConvergenceWarning

__all__ = [
    "RMS", "AdjointWarning", "Anderson", "Broyden", "ConvergenceWarning", "Euclidean", "Fault", "Map", "Memory",
    "Norm", "NotConverged", "Picard", "Point", "Solution", "Solver", "Status", "Tolerance", "WorstPixel",
    "mixes_samples", "solve",
]  # fmt: skip
