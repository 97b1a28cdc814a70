"""What the backward pass evaluates is R as it was in the forward pass: its weights, its mode, its attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from banach import (
    GMRES,
    JFB,
    Anderson,
    Broyden,
    Implicit,
    ImplicitNetwork,
    Neumann,
    NormalCG,
    Picard,
    Tolerance,
    Unroll,
    diagnose,
    fixed_point,
)
from banach.backward import Mode

TIGHT = Tolerance(atol=1e-13, max_steps=999)
ADJOINT = Tolerance(atol=0, rtol=1e-10, max_steps=200)
LATER: tuple[Mode, ...] = (Implicit(), Unroll(100, checkpoint=True))


class Cell(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.norm(self.linear(u) + v))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def network(R: nn.Module, mode: Mode) -> Any:
    return ImplicitNetwork(nn.Linear(3, 6), R, nn.Linear(6, 2), tolerance=TIGHT, backward=mode).double()


def bare(mode: Mode) -> Any:
    return ImplicitNetwork(nn.Flatten(), Cell(), nn.Identity(), tolerance=TIGHT, backward=mode).double()


def images() -> Tensor:
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def latents() -> Tensor:
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradient(net: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters()])


@pytest.mark.parametrize("mode", [*LATER, Unroll(100), Neumann(100)], ids=str)
@pytest.mark.parametrize("how", ["autograd", "torch.func.grad"])
def test_other_weights_than_the_modules_own(mode: Mode, how: str) -> None:
    """Against a plain loop over the same functional calls, recorded whole."""
    net, x = network(Cell(), mode), images()
    weights = {
        name: (p + 0.3 * torch.randn_like(p)).detach().requires_grad_() for name, p in net.named_parameters()
    }

    def by_hand(w: dict[str, Tensor]) -> Tensor:
        def part(letter: str) -> dict[str, Tensor]:
            return {name[2:]: p for name, p in w.items() if name[0] == letter}

        v = functional_call(net.Q, part("Q"), (x,))
        u = torch.zeros(8, 6, dtype=torch.float64)
        for _ in range(200):
            u = functional_call(net.R, part("R"), (u, v))
        return functional_call(net.S, part("S"), (u,)).square().sum()

    def ours(w: dict[str, Tensor]) -> Tensor:
        return functional_call(net, w, (x,)).square().sum()

    if how == "autograd":
        got = dict(zip(weights, torch.autograd.grad(ours(weights), list(weights.values())), strict=True))
    elif isinstance(mode, Unroll) and mode.checkpoint:
        pytest.skip("torch.func refuses saved tensor hooks, which checkpoints are")
    else:
        got = torch.func.grad(ours)({name: p.detach() for name, p in weights.items()})
    wanted = torch.autograd.grad(by_hand(weights), list(weights.values()))
    for name, value in zip(weights, wanted, strict=True):
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", [JFB(), *LATER], ids=str)
def test_the_mode_of_the_forward_pass_counts(mode: Mode) -> None:
    found = []
    for switch in (False, True):
        torch.manual_seed(0)
        net = network(Cell(norm=True), mode).train()
        loss = net(images()).square().sum()
        if switch:
            net.eval()
        loss.backward()
        assert net.R.norm.training is not switch
        found.append(gradient(net))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("mode", LATER, ids=str)
def test_weights_that_were_changed_in_place_are_refused(mode: Mode) -> None:
    net = network(Cell(), mode)
    loss = net(images()).square().sum()
    with torch.no_grad():
        net.R.linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"linear\.weight was changed in place between the forward"):
        loss.backward()


def test_one_buffer_for_two_passes_is_refused() -> None:
    net, buffer = bare(Implicit()), latents()
    loss = net(buffer).square().sum()
    buffer.mul_(2)
    loss = loss + net(buffer).square().sum()
    with pytest.raises(RuntimeError, match=r"an input of T \(1\) was changed in place between the forward"):
        loss.backward()


def closed(T: Any, x: Any, mode: Mode = Implicit()) -> Tensor:
    return fixed_point(T, torch.zeros_like(latents()), inputs=(x,), tolerance=TIGHT, backward=mode)


def test_changed_inputs_in_a_nest_are_refused() -> None:
    a, x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True), {"x": [latents()]}
    z = closed(lambda z, x: torch.tanh(a * z + x["x"][0]), x)
    x["x"][0].zero_()
    with pytest.raises(RuntimeError, match="was changed in place between"):
        z.sum().backward()


def test_inference_tensors_are_not_counted() -> None:
    with torch.inference_mode():
        x = latents()
    a = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    closed(lambda z, v: torch.tanh(a * z) + v.clone(), x).sum().backward()
    assert a.grad is not None


def test_with_no_steps_T_is_not_evaluated_again() -> None:
    a, x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True), latents()
    z = closed(lambda z, x: a * z + x, x, Implicit(tolerance=Tolerance(max_steps=0, check_every=0)))
    x.zero_()
    z.sum().backward()


@pytest.mark.parametrize("norm", [False, True])
def test_running_statistics_and_accumulated_gradients_are_no_change(norm: bool) -> None:
    net = network(Cell(norm), Implicit()).train()
    weight = net.R.linear.weight
    losses = [net(x).square().sum() for x in (images(), 2 * images())]
    for loss in (*losses, losses[0]):
        loss.backward(retain_graph=True)
    one, two = (torch.autograd.grad(loss, weight)[0] for loss in losses)
    torch.testing.assert_close(weight.grad, 2 * one + two)


def recorded(net: Any) -> Tensor:
    """The gradient of a plain loop, recorded whole."""
    net.zero_grad()
    v = net.Q(images())
    u = torch.zeros_like(v)
    for _ in range(120):
        u = net.R(u, v)
    net.S(u).square().sum().backward()
    return gradient(net)


def test_weights_that_are_made_in_the_pass_are_no_change() -> None:
    cell = Cell()
    cell.linear = nn.LazyLinear(6, dtype=torch.float64)
    net = network(cell, Implicit())
    net(images()).square().sum().backward()
    torch.testing.assert_close(gradient(net), recorded(net), rtol=1e-6, atol=1e-9)


def test_around_an_inner_implicit_network_normal_cg_says_what_to_use() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bare(Implicit(tolerance=ADJOINT))

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return 0.4 * torch.tanh(self.inner(u + v) + v)

    net = network(Outer(), Implicit())
    with pytest.raises(RuntimeError, match=r"NormalCG around an R .* GMRES\(\) and Anderson\(\) do not"):
        net(images()).square().sum().backward()
    net.zero_grad()
    net.backward = Implicit(GMRES(), ADJOINT)
    net(images()).square().sum().backward()
    torch.testing.assert_close(gradient(net), recorded(net), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", [JFB(), Neumann(2), Implicit()], ids=str)
def test_parametrised_weights_that_are_cached_get_their_gradient(mode: Mode) -> None:
    found = []
    for cached in (False, True):
        torch.manual_seed(0)
        cell = Cell()
        spectral_norm(cell.linear)  # in place
        net = network(cell, mode).eval()
        if cached:
            with parametrize.cached():
                net(images()).square().sum().backward()
        else:
            net(images()).square().sum().backward()
        found.append(gradient(net))
    torch.testing.assert_close(found[1], found[0])


def test_a_batch_norm_that_Q_and_R_share() -> None:
    net = network(Cell(norm=True), Neumann(60)).train()
    net.Q = nn.Sequential(net.Q, net.R.norm)
    other = copy.deepcopy(net)
    net(images()).square().sum().backward()
    torch.testing.assert_close(gradient(net), recorded(other), rtol=1e-6, atol=1e-9)


class Attention(nn.Module):
    """Torch's fast attention has a derivative, and that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        h = u + v
        return 0.5 * torch.tanh(self.attention(h, h, h, need_weights=False)[0] + v)


def test_attention_in_R() -> None:
    x = torch.randn(3, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = []
    for mode in (Implicit(tolerance=Tolerance(atol=0, rtol=1e-11)), Unroll(100)):
        torch.manual_seed(0)
        net = network(Attention(), mode)
        net(x).square().sum().backward()
        found.append(gradient(net))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)
    v, u = net.Q(x).detach(), net.latent(x)[0].detach()
    J = torch.autograd.functional.jacobian(lambda u: net.R(u, v[:1]), u[:1]).reshape(30, 30)
    sigma = diagnose.measure_contraction(net, x).sigma[0]
    assert float(sigma) == pytest.approx(float(torch.linalg.matrix_norm(J, 2)), rel=1e-3)


class Checkpointed(Cell):
    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, u, v, use_reentrant=False)
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        found: Tensor = self.lstm(u[:, None] + v[:, None])[0][:, 0]
        return 0.5 * found


class OldSine(torch.autograd.Function):
    """Without setup_context, which torch.func asks for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


class OnceSine(OldSine):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


class Sine(Cell):
    function: Any = OldSine

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * self.function.apply(self.linear(u) + v)


class Once(Sine):
    function: Any = OnceSine


METHODS = [NormalCG(), GMRES(), Picard(), Anderson(), Broyden()]


def hooked(calls: list[int]) -> nn.Module:
    cell = Cell()
    cell.register_full_backward_hook(lambda *_: calls.append(1))
    return cell


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("kind", ["hook", "LSTM", "old function"])
def test_what_torch_func_does_not_take_is_differentiated_by_plain_autograd(kind: str, method: Any) -> None:
    calls: list[int] = []
    makers: dict[str, Any] = {"hook": lambda: hooked(calls), "LSTM": Recurrent, "old function": Sine}
    found = []
    for mode in (Implicit(method, ADJOINT), Unroll(100)):
        torch.manual_seed(0)
        net = network(makers[kind](), mode)
        calls.clear()
        net(images()).square().sum().backward()
        found.append(gradient(net))
        assert bool(calls) is (kind == "hook")
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)


def test_normal_cg_names_gmres_where_there_is_no_second_derivative() -> None:
    net = network(Once(), Implicit(NormalCG(), ADJOINT))
    with pytest.raises(RuntimeError, match=r"second derivatives of T, .* use Implicit\(GMRES\(\)\)"):
        net(images()).square().sum().backward()
    net.backward = Implicit(GMRES(), ADJOINT)
    net(images()).square().sum().backward()


def test_a_checkpoint_in_R_is_refused_in_a_sentence() -> None:
    net, x = network(Checkpointed(), Implicit()), images()
    with pytest.raises(RuntimeError, match="T holds a checkpoint"):
        net(x).square().sum().backward()
    net.backward = JFB()
    net(x).square().sum().backward()


def test_vmap_is_refused_in_a_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"put what is mapped over on the first \(batch\) axis"):
        torch.func.vmap(network(Cell(), JFB()))(images()[None].expand(2, 8, 3))


@pytest.mark.parametrize("mode", [Implicit(), Unroll(3, checkpoint=True)], ids=["implicit", "checkpointed"])
def test_a_changed_parameter_of_a_module_T_is_refused(mode: Any) -> None:
    T = nn.Linear(3, 3).double()
    T.weight.data.mul_(0.3)
    z = fixed_point(T, torch.zeros(4, 3, dtype=torch.float64), backward=mode)
    with torch.no_grad():
        T.weight.add_(0.1)
    with pytest.raises(RuntimeError, match="T's parameter weight was changed in place between"):
        z.sum().backward()
