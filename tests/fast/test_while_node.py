"""While nodes, without the CUDA driver that runs them."""

import importlib
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fast.simulated import PLAN


def give_driver(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Let `cuda.bindings` have a driver of these functions."""
    driver: Any = SimpleNamespace(**functions)
    bindings: Any = SimpleNamespace(driver=driver, nvrtc=SimpleNamespace())
    for name, module in {"cuda": SimpleNamespace(bindings=bindings), "cuda.bindings": bindings}.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("version", "lacking"), [(12030, "a driver of CUDA 12.4"), (13000, "")])
def test_while_nodes_need_a_driver(monkeypatch: pytest.MonkeyPatch, version: int, lacking: str) -> None:
    """Its version was asked of a function that PyTorch does not have: an AttributeError in every plan on a GPU."""
    give_driver(monkeypatch, cuDriverGetVersion=lambda: (0, version))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "raw_cuda_graph", None, raising=False)
    monkeypatch.setattr(PLAN, "device_runtime", lambda: "libcudadevrt.a")
    assert PLAN.while_nodes_lack.__wrapped__() == lacking
    monkeypatch.delitem(sys.modules, "cuda.bindings")  # "cuda" is a file of the user, no package: an error
    assert PLAN.while_nodes_lack.__wrapped__() == "cuda.bindings (pip install cuda-bindings)"


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

    give_driver(monkeypatch, cuGraphLaunch=launch)
    monkeypatch.delitem(sys.modules, "banach.fast.while_node", raising=False)
    made = importlib.import_module("banach.fast.while_node")
    del sys.modules["banach.fast.while_node"]  # for good: a test on a GPU would find this driver in it
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    active = torch.ones(3, dtype=torch.bool)
    node = made.WhileNode([], active, torch.zeros((), dtype=torch.int32), cycle=1, max_steps=9)
    node.executable = "graph"
    node.replay()
    del node.executable  # there is nothing to destroy
    assert launches == [("graph", 7, active.device)]
