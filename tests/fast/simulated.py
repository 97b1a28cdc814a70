"""A simulated GPU: the plan says that graphs and kernels run, and on the CPU they run eagerly in plain torch."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import banach.train.evaluate  # noqa: F401

PLAN: Any = sys.modules["banach.fast.plan"]


def simulate_gpu(monkeypatch: pytest.MonkeyPatch, *, kernels: bool) -> None:
    """Make `plan` take the CPU for a GPU, with or without kernels."""
    for name in ("banach.fast.plan", "banach.train.evaluate"):
        monkeypatch.setattr(sys.modules[name], "runs_graphs", lambda device: True)
    monkeypatch.setattr(PLAN, "_no_kernel", lambda net, device: "" if kernels else "simulated")
