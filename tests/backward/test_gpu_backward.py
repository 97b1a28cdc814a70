"""On a GPU: the same gradients, no question to the host at a fixed depth, and passes that can be captured."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from backward.contracts_backward import METHODS, PLAIN, TIGHT, error, name
from backward.systems_backward import Reports
from banach import Implicit, Mode, Status, Tolerance
from problems import contraction, normal

pytestmark = pytest.mark.gpu
FIXED = Tolerance(atol=0, rtol=1e-6, max_steps=12, check_every=0)
every = pytest.mark.parametrize("method", METHODS, ids=str)


def gradients(mode: Mode, device: str, dtype: torch.dtype = torch.float64, gamma: float = 0.8) -> Tensor:
    W = contraction(32, gamma).to(device, dtype).requires_grad_()
    x = normal(8, 32, seed=110).to(device, dtype).requires_grad_()
    value = mode.attach(lambda z, x: torch.tanh(z @ W.T + x), normal(8, 32, seed=111).to(device, dtype), (x,))
    found = torch.autograd.grad(value, (W, x), normal(8, 32, seed=112).to(device, value.dtype))
    return torch.cat([part.flatten() for part in found]).double().cpu()


@pytest.mark.parametrize("mode", [*PLAIN, *(Implicit(method, TIGHT) for method in METHODS)], ids=name)
def test_as_on_the_cpu(mode: Mode) -> None:
    assert error(gradients(mode, "cuda"), gradients(mode, "cpu")) <= 1e-10


@every
def test_tf32_is_called_rounding(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    log = Reports()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gradients(Implicit(method, report=log), "cuda", torch.float32, gamma=0.95)
    assert Status.MAX_STEPS not in log.status[0]
    assert log.products[0] <= 8 * 200
    assert error(found, gradients(Implicit(method, TIGHT), "cpu", gamma=0.95)) <= 1e-2


@every
@pytest.mark.filterwarnings("ignore:the adjoint equation missed")
def test_autocast_forward_and_backward_outside(method: Any) -> None:
    W = contraction(32, 0.8).float().cuda().requires_grad_()
    x = normal(8, 32, seed=110).float().cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        value = Implicit(method).attach(
            lambda z: torch.tanh(torch.nn.functional.linear(z, W) + x), torch.zeros_like(x)
        )
    value.float().sum().backward()
    assert W.grad is not None
    assert W.grad.isfinite().all()


def one_pass(mode: Mode, W: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    value = mode.attach(lambda z, x: torch.tanh(z @ W.T + x), torch.full_like(x, 0.3), (x,))
    return torch.autograd.grad(value.square().sum(), (W, x))


@pytest.mark.parametrize(
    "mode", [*PLAIN, *(Implicit(m, FIXED, order=k) for m in METHODS for k in (1, 2))], ids=name
)
def test_a_captured_pass_replays(mode: Mode) -> None:
    """There is no host sync (a capture would fail), and the replay follows new data."""
    W = contraction(16, 0.7).cuda().requires_grad_()
    x = normal(4, 16, seed=113).cuda().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one_pass(mode, W, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = one_pass(mode, W, x)
    with torch.no_grad():
        x.copy_(normal(4, 16, seed=114))
    graph.replay()
    for a, b in zip(captured, one_pass(mode, W, x), strict=True):
        assert error(a, b) <= 1e-10
