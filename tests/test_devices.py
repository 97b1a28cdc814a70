"""Devices other than a CPU and an NVIDIA GPU, simulated: Apple's GPUs have neither float64 nor eigenvectors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from banach import Implicit, ImplicitNetwork, Tolerance, descent_check
from banach.diagnose import measure_contraction
from banach.nn import ForwardBackward, MonotoneLinear, operator_norm
from banach.nn.monotone import tune_alpha
from banach.solve import loop


class AppleGPU(TorchFunctionMode):
    """Takes tensors on the CPU for ones on such a GPU, but for those that were moved to the CPU or made there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        to_cpu = func is Tensor.cpu or any(x == "cpu" for x in given if isinstance(x, str))
        moved = to_cpu or (func is not Tensor.to and any(hasattr(x, "on_cpu") for x in given))
        if func in (Tensor.double, torch.linalg.eigh) and not moved:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        if func in (Tensor.cpu, Tensor.to):  # another tensor: the first one stays where it is
            args = args[0].view_as(args[0]), *args[1:]
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made) if moved else ():
            if isinstance(x, Tensor):
                x.on_cpu = True  # type: ignore[attr-defined]
        return made


class R(nn.Module):
    """A layer with a full backward hook: torch.func refuses it, so that plain autograd makes the products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.layer.register_full_backward_hook(lambda *_: None)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.layer(u)) + v


def network(R: nn.Module, **options: Any) -> ImplicitNetwork:
    return ImplicitNetwork(nn.Linear(5, 6), R, nn.Linear(6, 3), tolerance=Tolerance(max_steps=200), **options)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_nothing_needs_float64_or_eigenvectors_on_the_device() -> None:
    torch.manual_seed(0)
    net, d, conv = network(R(), backward=Implicit()), torch.randn(4, 5), nn.Conv2d(2, 2, 3)
    monotone = network(ForwardBackward(MonotoneLinear(6), 0.5))

    def measured() -> list[Tensor]:
        net(d).sum().backward()
        cosine = torch.tensor(descent_check(net, d, lambda y: y.square().mean()).cosine)
        alpha = torch.tensor(tune_alpha(monotone, d))
        return [measure_contraction(net, d).sigma, cosine, alpha, operator_norm(conv, 6), net.Q.weight.grad]

    expected = [value.clone() for value in measured()]
    net.zero_grad()
    with AppleGPU():
        found = measured()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_measuring_changes_no_random_numbers_of_an_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []  # what R draws there

    class Drawing(R):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            drawn.append(1)
            return super().forward(u, v)

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device: list(drawn))
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, device: drawn.__setitem__(slice(None), state))
    measure_contraction(network(Drawing()), torch.randn(4, 5))
    assert not drawn


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu"])
def test_every_device_but_a_cpu_takes_several_steps_between_two_checks(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "stride", lambda *_: 50)
    run: Any = SimpleNamespace(tolerance=Tolerance(), on_host=True, damping=0.0, busy=True)
    run.space, run.taken = SimpleNamespace(device=torch.device(device)), 0

    def sprint(*_: Any, **named: Any) -> int:
        run.taken = 50
        return 50

    run.sprint = sprint
    state: Any = None
    loop._run_on_host(run, state, None, None, None, compact=False)
    assert bool(run.taken) is (device == "cpu")
