"""A simulated GPU: the plan says that graphs and kernels run, and on the CPU they run eagerly in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import banach.train.evaluate  # noqa: F401

PLAN: Any = sys.modules["banach.fast.plan"]


class Directly:
    """In place of a captured loop: the body itself, at one depth."""

    depth = 12

    def __init__(self, device: Any, body: Callable[[int], Any], *_: Any) -> None:
        self.body = body

    def prepare(self) -> None:
        pass

    def run(self) -> int:
        self.body(self.depth)
        return self.depth


def simulate_gpu(monkeypatch: pytest.MonkeyPatch, *, kernels: bool) -> None:
    """Make `plan` take the CPU for a GPU, with or without kernels."""
    for name in ("banach.fast.plan", "banach.train.evaluate"):
        monkeypatch.setattr(sys.modules[name], "runs_graphs", lambda device: True)
    monkeypatch.setattr(PLAN, "_no_kernel", lambda net, device: "" if kernels else "simulated")
