"""What torch.func refuses in R is differentiated by plain autograd; what neither takes is refused with advice."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backward.cells_backward import ADJOINT, Cell, check_exact, gradient, network
from backward.systems_backward import METHODS
from banach import (
    GMRES,
    Implicit,
    NormalCG,
    Tolerance,
    Unroll,
    diagnose,
)
from banach.backward import Mode
from networks import OnceSine
from problems import normal


class Attention(nn.Module):
    """Torch's fast attention has a derivative, and that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        h = u + v
        return 0.5 * torch.tanh(self.attention(h, h, h, need_weights=False)[0] + v)


def test_attention_in_R() -> None:
    x = normal(3, 5, 3, seed=2)
    net = network(Attention, Implicit(tolerance=Tolerance(atol=0, rtol=1e-11)))
    check_exact(net, x)
    v, u = net.Q(x).detach(), net.latent(x)[0].detach()
    J = torch.autograd.functional.jacobian(lambda u: net.R(u, v[:1]), u[:1]).reshape(30, 30)
    sigma = diagnose.measure_contraction(net, x).sigma[0]
    assert float(sigma) == pytest.approx(float(torch.linalg.matrix_norm(J, 2)), rel=1e-3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        found: Tensor = self.lstm(u[:, None] + v[:, None])[0][:, 0]
        return 0.5 * found


class Compressed(Cell):
    """Its matrix is CSR, which has no strides."""

    def __init__(self) -> None:
        super().__init__()
        self.A = (0.3 * normal(6, 6, seed=4)).relu().to_sparse_csr()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return super().forward((self.A @ u.T).T, v)


class OldSine(OnceSine):
    """Its derivative can be differentiated."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


class Sine(Cell):
    function: Any = OldSine

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * self.function.apply(self.linear(u) + v)


class Once(Sine):
    function: Any = OnceSine


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("make", [Cell, Recurrent, Sine, Compressed], ids=["hook", "LSTM", "old function", "CSR"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # CSR is beta; its invariants are not checked
def test_what_torch_func_does_not_take_is_differentiated_by_plain_autograd(make: Any, method: Any) -> None:
    net, calls = network(make, Implicit(method, ADJOINT)), list[int]()
    if make is Cell:
        net.R.register_full_backward_hook(lambda *_: calls.append(1))
    check_exact(net)
    assert bool(calls) is (make is Cell)


class FailingSine(OldSine):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        def fail(_: Tensor) -> None:
            raise RuntimeError("my own trouble")

        if g.requires_grad:
            g.register_hook(fail)
        return OldSine.backward(ctx, g)


class Failing(Sine):
    """Its error was tried again until Python's stack ended, 489 evaluations of T later."""

    function: Any = FailingSine


class Checkpointed(Cell):
    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, u, v, use_reentrant=False)
        return found


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network(Cell, Implicit(tolerance=ADJOINT), Q=nn.Flatten())
        self.inner.S = nn.Identity()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.4 * torch.tanh(self.inner(u + v) + v)


INSTEAD: list[tuple[Any, str, Mode]] = [
    (Once, r"second derivatives of T, .* use Implicit\(GMRES\(\)\)", Implicit(GMRES(), ADJOINT)),
    (Failing, "^my own trouble$", Implicit(GMRES(), ADJOINT)),
    (Outer, r"NormalCG around an R .* GMRES\(\) and Anderson\(\) do not", Implicit(GMRES(), ADJOINT)),
    (Checkpointed, "T holds a checkpoint, or hooks on saved tensors, such as save_on_cpu", Unroll(100)),
]


@pytest.mark.parametrize(("make", "message", "instead"), INSTEAD, ids=["once", "error", "inner", "checkpoint"])
def test_normal_cg_says_what_to_use_instead(make: Any, message: str, instead: Mode) -> None:
    net = network(make, Implicit(NormalCG(), ADJOINT))
    with pytest.raises(RuntimeError, match=message):
        gradient(net)
    net.backward = instead
    check_exact(net)
