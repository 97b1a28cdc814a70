"""A GPU that is made believe, for tests of what is captured on a real one."""

from __future__ import annotations

from typing import Any

import pytest

from banach.fast import CompiledNetwork, whole
from banach.train import scorer


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CompiledNetwork]:
    """As if this were a GPU, where programs are not captured but run as they are; those that were made."""
    found: list[CompiledNetwork] = []

    def make(*args: Any, **options: Any) -> CompiledNetwork:
        found.append(CompiledNetwork(*args, **options))
        return found[-1]

    monkeypatch.setattr(scorer, "_on_gpu", lambda device: True)
    monkeypatch.setattr(scorer, "CompiledNetwork", make)
    return found


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernels knew R here: their plain twin takes their place."""
    monkeypatch.setattr(whole, "_has_kernel", lambda net: True)
