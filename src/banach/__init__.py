"""banach: implicit networks in PyTorch. `solve` finds a fixed point, `attach` differentiates at it.

Names are imported when they are first used, so `import banach` does not import torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from banach import diagnose as diagnose
    from banach import nn as nn
    from banach.backward import GMRES, JFB, Implicit, Mode, Neumann, NormalCG, Unroll
    from banach.diagnose import ContractionMonitor, ContractionWarning, contraction_factor, descent_check
    from banach.export import export
    from banach.fast import compile
    from banach.network import ImplicitNetwork, fixed_point
    from banach.solve import (
        RMS, AdjointWarning, Anderson, Broyden, ConvergenceWarning, Euclidean, NotConverged, Picard, Solution,
        Solver, Status, Tolerance, WorstPixel, solve,
    )  # fmt: skip

__version__ = "0.1.0"

# Not `nn` and `diagnose`: a star import must not replace torch's nn.
__all__ = [
    "GMRES", "JFB", "RMS", "AdjointWarning", "Anderson", "Broyden", "ContractionMonitor", "ContractionWarning",
    "ConvergenceWarning", "Euclidean", "Implicit", "ImplicitNetwork", "Mode", "Neumann", "NormalCG",
    "NotConverged", "Picard", "Solution", "Solver", "Status", "Tolerance", "Unroll", "WorstPixel", "compile",
    "contraction_factor", "descent_check", "export", "fixed_point", "solve",
]  # fmt: skip

_ROOMS = ("solve", "backward", "network", "diagnose", "export", "fast")  # the first that has a name is its room
_MODULES = ("data", "diagnose", "fast", "kernels", "models", "nn", "train")


class _Lazy(ModuleType):
    """This package, with its names imported at first use (PEP 562).

    `solve` and `export` are functions here, and also modules: importing one sets the attribute to the module,
    which this class undoes.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"banach.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'banach' has no attribute {name!r}")
        rooms = (importlib.import_module(f"banach.{room}") for room in _ROOMS)
        value = next(getattr(room, name) for room in rooms if hasattr(room, name))
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("solve", "export") and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__, *_MODULES})


sys.modules[__name__].__class__ = _Lazy
