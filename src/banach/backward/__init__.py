"""DIFFERENTIATE at u*: a mode turns a fixed point without a gradient into T(u*) with one."""

from banach.backward.implicit import Implicit
from banach.backward.jfb import JFB
from banach.backward.krylov import GMRES, NormalCG
from banach.backward.mode import Mode
from banach.backward.neumann import Neumann
from banach.backward.unroll import Unroll

__all__ = ["GMRES", "JFB", "Implicit", "Mode", "Neumann", "NormalCG", "Unroll"]
