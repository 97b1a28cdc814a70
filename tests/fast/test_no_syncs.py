"""Captured steps on the meta device: a read by the host, a tensor on the CPU or a wrong loop is an error there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from banach import GMRES, Anderson, Broyden, Implicit, Neumann, NormalCG, Picard, Tolerance, Unroll
from banach.fast import Extras, TrainStep
from banach.solve.context import loops_by
from banach.train.metrics import MetricSums
from banach.train.state import Average
from fast.simulated import EagerGraphs, simulate_gpu
from train.parts_train import plain_network

FIXED = Tolerance(atol=0, rtol=1e-6, max_steps=4, check_every=0)
META = torch.device("meta")


class OnDevice(TorchDispatchMode):
    """Refuses tensors on the CPU: a CUDA graph would keep their values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        here = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor) and x.numel()]
        assert all(x.is_meta for x in here), func
        return out


def loop(body: Any, active: Tensor, steps: Tensor, *, cycle: int, max_steps: int, stop_at: int = 0) -> None:
    """In place of a while node: the body once, as in a capture."""
    assert (active.dtype, active.device, active.is_contiguous()) == (torch.bool, META, True)
    assert (steps.dtype, steps.device, steps.shape) == (torch.int32, META, ())
    assert cycle < max_steps
    body()


class MetaGraphs(EagerGraphs):
    def _run(self, program: Any, _: Any) -> Any:
        with loops_by(loop), OnDevice():
            return program()

    def warm_up(self, program: Any) -> None:
        self._run(program, loop)  # once: operations are slow on this device

    def capture(self, program: Any) -> Any:
        result = self._run(program, loop)
        return SimpleNamespace(replay=lambda: result)


def move(samples: Any, z: Tensor, Tz: Tensor, *_: Any) -> None:
    z.copy_(Tz)


def move_all(samples: Any, parts: Any, *_: Any) -> None:
    for pair in parts:
        move(samples, *pair)


def name(value: Any) -> str | None:
    return None if isinstance(value, int) else f"{type(value).__name__} {getattr(value, 'order', '')}".strip()


MODES = [
    *(Neumann(2), Unroll(2, 0.5), Unroll(2, checkpoint=True)),
    *(Implicit(method) for method in (NormalCG(), Picard(), Anderson(2), Broyden(2))),
    *(Implicit(method, order=2) for method in (NormalCG(), Picard())),
    *(Implicit(method, FIXED, order=order) for method in (NormalCG(), GMRES(), Anderson(2)) for order in (1, 2)),
]


@pytest.mark.parametrize("kernels", [False, True], ids=["solve", "kernels"])
@pytest.mark.parametrize("solver", [Picard(), Picard(0.3), Anderson(3), Broyden(3)], ids=name)
def test_a_captured_loop_reads_nothing(solver: Any, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything that may be part of a step. Halves of a batch are loops in a loop."""
    take_a_step({"solver": solver}, kernels, monkeypatch)


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_a_captured_backward_pass_reads_nothing(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take_a_step({"backward": mode}, False, monkeypatch)


def take_a_step(options: dict[str, Any], kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = torch.is_autocast_enabled
    simulate_gpu(monkeypatch, kernels=kernels)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: kind != ("meta",) and enabled(*kind))
    monkeypatch.setattr("banach.fast.step.Graphs", MetaGraphs)
    monkeypatch.setattr("banach.fast.iteration.LARGE", 1)
    monkeypatch.setattr("banach.kernels.picard_step", move_all)
    monkeypatch.setattr("banach.kernels.anderson_step", move)
    net: Any = plain_network(Tolerance(rtol=1e-3, max_steps=50), **options).to(META)
    extras = Extras(accumulate=2, clip=1.0, average=Average(net, 0.9), metrics=MetricSums(META))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
    step = TrainStep(net, sgd, F.cross_entropy, extras=extras)
    for _ in range(2):
        step(torch.empty(16, 64, device=META), torch.empty(16, dtype=torch.int64, device=META))
    assert step.reason is None
    assert step.reached is not None
    assert step.reached.steps.is_meta
