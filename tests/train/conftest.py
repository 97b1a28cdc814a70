"""A simulated GPU, for tests of what is captured on a real one."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from banach.fast import CompiledNetwork
from fast.simulated import simulate_gpu


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CompiledNetwork]:
    """Simulate a GPU without kernels; return the networks that were compiled for evaluation."""
    found: list[CompiledNetwork] = []

    def make(*args: Any, **options: Any) -> CompiledNetwork:
        found.append(CompiledNetwork(*args, **options))
        return found[-1]

    simulate_gpu(monkeypatch, kernels=False)
    monkeypatch.setattr(sys.modules["banach.train.evaluate"], "CompiledNetwork", make)
    return found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU whose kernels know R."""
    simulate_gpu(monkeypatch, kernels=True)
