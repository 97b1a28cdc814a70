"""While nodes, without the CUDA driver that runs them."""

import importlib
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def test_a_loop_is_launched_on_the_device_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the current device was another one, it ran on that one's stream, which waits for nothing here."""
    launches: list[Any] = []
    entered: list[Any] = []

    @contextmanager
    def device(one: Any) -> Any:
        entered.append(one)
        yield
        entered.pop()

    def launch(graph: Any, stream: int) -> tuple[int]:
        launches.append((graph, stream, *entered))
        return (0,)

    bindings: Any = SimpleNamespace(driver=SimpleNamespace(cuGraphLaunch=launch), nvrtc=SimpleNamespace())
    for name, module in {"cuda": SimpleNamespace(bindings=bindings), "cuda.bindings": bindings}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "banach.fast.while_node", raising=False)
    made = importlib.import_module("banach.fast.while_node")
    monkeypatch.delitem(sys.modules, "banach.fast.while_node")
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    active = torch.ones(3, dtype=torch.bool)
    node = made.WhileNode([], active, torch.zeros((), dtype=torch.int32), cycle=1, max_steps=9)
    node.executable = "graph"
    node.replay()
    del node.executable  # there is nothing to destroy
    assert launches == [("graph", 7, active.device)]
