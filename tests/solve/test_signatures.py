"""The public names, their signatures and defaults, and that settings and results do not change."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from banach import RMS, Anderson, Broyden, Euclidean, Picard, Solution, Tolerance, solve

Z = torch.zeros(2, 3)


def half(z: Tensor) -> Tensor:
    return z / 2


def defaults(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


def keyword_only(function: Any) -> list[str]:
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]


def test_signatures() -> None:
    options = {
        "inputs": (),
        "tolerance": Tolerance(),
        "coupled": False,
        "compact": False,
        "record": False,
        "on_step": None,
        "throw": False,
    }
    required = inspect.Parameter.empty
    assert defaults(solve) == {"T": required, "z0": required, "solver": Picard(), **options}
    assert keyword_only(solve) == list(options)
    settings = {"atol": 1e-4, "rtol": 0.0, "max_steps": 50, "norm": RMS(), "check_every": None}
    assert defaults(Tolerance) == settings
    assert keyword_only(Tolerance) == list(settings)
    assert defaults(Picard) == {"damping": 0.0}
    assert next(iter(defaults(Anderson).items())) == ("memory", 5)
    assert next(iter(defaults(Broyden))) == "memory"
    assert Anderson(3).memory == Broyden(3).memory == 3


def test_settings_and_results_are_frozen() -> None:
    found: Solution = solve(half, Z)
    for thing, name in ((Tolerance(), "atol"), (Picard(), "damping"), (found, "value")):
        with pytest.raises(AttributeError):
            setattr(thing, name, 1)
    assert RMS() != Euclidean()
    assert Tolerance(norm=RMS()) == Tolerance()
