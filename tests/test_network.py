"""ImplicitNetwork and fixed_point: the order of things, special cases of the paper, starts, bad input."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import banach
from banach import (
    JFB,
    Anderson,
    ConvergenceWarning,
    Implicit,
    ImplicitNetwork,
    Neumann,
    Status,
    Tolerance,
    Unroll,
)
from banach.solve import context
from networks import conv_network, gradients, images, linear_network

TIGHT = Tolerance(atol=1e-14, max_steps=500)


def data(batch: int = 4, width: int = 5) -> Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def signature(function: Any) -> str:
    found = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def test_signatures_are_the_public_ones() -> None:
    settings = "atol=0.0001, rtol=0.0, max_steps=50, norm=RMS(), check_every=None"
    common = f"solver=Picard(damping=0.0), tolerance=Tolerance({settings}), backward=JFB()"
    assert signature(Tolerance) == f"(*, {settings})"
    assert signature(banach.solve) == (
        f"(T, z0, solver=Picard(damping=0.0), *, inputs=(), tolerance=Tolerance({settings}), coupled=False, "
        "compact=False, record=False, on_step=None, throw=False)"
    )
    assert signature(banach.fixed_point) == (
        f"(T, z0, *, inputs=(), {common}, coupled=False, solution=False, throw=False)"
    )
    assert signature(ImplicitNetwork).startswith(f"(Q, R, S, *, {common}, start=<function zeros")
    assert signature(ImplicitNetwork).endswith(", coupled=None, compact=False)")
    assert signature(ImplicitNetwork.forward) == "(self, *d, z0=None, solution=False, throw=False)"
    assert Anderson(3).memory == banach.Broyden(3).memory == 3


def test_q_runs_once_and_the_value_is_the_fixed_point() -> None:
    net, calls = linear_network(), []
    net.Q.register_forward_hook(lambda *_: calls.append(1))
    u, found = net.latent(data())
    assert calls == [1]
    assert torch.allclose(u, torch.tanh(u @ net.R.weight.T + net.Q(data())), atol=1e-13)
    assert found.status == (Status.CONVERGED,) * 4
    y, same = net(data(), solution=True)
    assert torch.equal(y, net.S(u))
    assert torch.equal(same.steps, found.steps)


@pytest.mark.parametrize("backward", [JFB(), Neumann(3), Unroll(2, checkpoint=True), Implicit()])
def test_grad_mode_records_and_never_changes_the_answer(backward: banach.Mode) -> None:
    net = linear_network().eval()  # eval mode, with a gradient: training has no say
    net.backward = backward
    with_gradient = net(data())
    with torch.no_grad():
        without = net(data())
    assert with_gradient.requires_grad
    assert not without.requires_grad
    assert torch.equal(with_gradient, without)
    assert torch.equal(net.train()(data()), without)
    loss = with_gradient.square().sum()
    first, second = (torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second)), "the graph can be used twice"


def test_starts() -> None:
    net = linear_network()
    _, cold = net.latent(data())
    u, warm = net.latent(data(), z0=net.latent(data())[0].detach())
    assert int(warm.steps.max()) < int(cold.steps.min()) // 4
    net.start = nn.Linear(6, 6).double()  # a learned guess is a submodule, and gets no gradient from the loss
    assert any(name.startswith("start.") for name, _ in net.named_parameters())
    grads = torch.autograd.grad(net(data()).sum(), list(net.start.parameters()), allow_unused=True)
    assert grads == (None, None)
    assert torch.allclose(net.latent(data())[0], u, atol=1e-12)


def test_solver_tolerance_and_backward_may_be_assigned() -> None:
    net = linear_network()
    _, slow = net.latent(data())
    net.solver = Anderson()
    _, fast = net.latent(data())
    assert fast.steps.sum() < slow.steps.sum()
    net.tolerance = Tolerance(max_steps=3)
    with pytest.warns(ConvergenceWarning, match="stopped at max_steps"):
        assert net.latent(data())[1].status == (Status.MAX_STEPS,) * 4
    with pytest.raises(banach.NotConverged, match="max_steps"):
        net.latent(data(), throw=True)


def test_coupling_is_looked_for() -> None:
    net = conv_network(batch_norm=True)
    _, found = net.latent(images())
    assert found.steps.unique().numel() == 1
    assert found.residual.unique().numel() == 1
    assert net.eval().latent(images())[1].residual.unique().numel() > 1
    net.train().coupled = False
    assert net.latent(images())[1].residual.unique().numel() > 1


def test_compact_changes_nothing_but_the_work() -> None:
    net = conv_network(gamma=0.55).eval()
    plain, found = net(images(16), solution=True)
    net.compact = True
    compacted, same = net(images(16), solution=True)
    assert torch.equal(found.steps, same.steps)
    assert torch.allclose(plain, compacted, atol=1e-6)
    bn = conv_network(batch_norm=True)
    bn.compact = True
    bn(images())  # coupled in train mode: there is nobody to leave, and that is no error


def test_copies() -> None:
    net = conv_network(batch_norm=True)
    net.solver, net.backward = Anderson(memory=3), Neumann(2)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert torch.equal(net.eval()(images()), twin.eval()(images()))
    assert twin.solver == Anderson(memory=3)
    average = torch.optim.swa_utils.AveragedModel(net)
    average.update_parameters(net)
    assert torch.equal(average(images()), net(images()))


def test_nan_in_data_is_said_and_spares_the_other_samples() -> None:
    net = linear_network()
    x = data()
    clean = net(x)
    x[2, 0] = torch.nan
    with pytest.warns(ConvergenceWarning, match="T gave NaN or infinity"):
        y, found = net(x, solution=True)
    assert "check the data for NaN" in found.summary()
    assert found.status[2] is Status.NONFINITE
    others = [0, 1, 3]
    assert torch.allclose(y[others], clean[others])
    assert torch.isfinite(found.value).all()


OTHER = torch.zeros(4, 6)
BAD: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"z0": OTHER}, TypeError, r"z0 must have the dtype and device of Q\(d\): got torch.float32"),
    ({}, {"z0": OTHER.double().to("meta")}, TypeError, "got torch.float64 on meta, expected"),
    ({"R": torch.add}, {"z0": OTHER}, TypeError, r"z0.to\(dtype, device\)"),
    ({}, {"z0": OTHER[:3].double()}, ValueError, r"got Q\(d\) of shape \(4, 6\) and z0 of \[\(3, 6\)\]"),
    ({"R": lambda u, v: v[:, 1:]}, {}, ValueError, r"T must keep the shape .*: expected \(4, 6\), got \(4, 5\)"),
    ({"Q": lambda x: (x, None), "start": lambda v: v[0]}, {}, TypeError, r"Q\(d\) must be a .* got NoneType"),
    ({"slover": Anderson()}, {}, TypeError, "unexpected keyword argument 'slover'"),
    ({"Q": 3}, {}, TypeError, "Q must be a module or a function, got int"),
    ({"backward": JFB}, {}, TypeError, r"backward must be a mode such as JFB\(\)"),
]


@pytest.mark.parametrize(("made", "given", "kind", "message"), BAD)
def test_bad_input_gets_one_sentence(
    made: dict[str, Any], given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    net = linear_network()
    with pytest.raises(kind, match=message):
        ImplicitNetwork(**{"Q": net.Q, "R": net.R, "S": net.S, **made})(data(), **given)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the tracer's own
def test_implicit_differentiates_a_compiled_r() -> None:
    net = linear_network()
    net.backward = Implicit()
    expected = gradients(net, net(data()).square().sum())
    net.R = torch.compile(net.R, backend="aot_eager")
    got = gradients(net, net(data()).square().sum())
    torch.testing.assert_close(got, expected)


def test_not_converged_crosses_processes() -> None:
    with pytest.raises(banach.NotConverged) as caught:
        banach.solve(lambda z: z + 1, torch.zeros(2, 1), throw=True)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert torch.equal(again.solution.steps, caught.value.solution.steps)


def test_casts_made_while_solving_are_forgotten_where_torch_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#112583: weights that autocast casts under no_grad lose their gradient, if its cache stays."""
    cleared: list[bool] = []
    monkeypatch.setattr(context, "_KEEPS_CASTS", True)
    clear = torch.clear_autocast_cache

    def observed() -> None:
        cleared.append(torch.is_grad_enabled())
        clear()  # torch 2.6 does keep them

    monkeypatch.setattr(torch, "clear_autocast_cache", observed)
    layer = torch.nn.Linear(3, 3)
    net = ImplicitNetwork(torch.nn.Identity(), lambda u, v: 0.1 * layer(u).float() + v, torch.nn.Identity())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(torch.randn(2, 3)).sum().backward()
        assert cleared == [True]  # leaving the block clears too
    assert layer.weight.grad is not None


@pytest.mark.parametrize("length", [3, 8])
def test_a_mask_with_as_many_rows_as_the_batch_is_not_cut_with_it(length: int) -> None:
    """Once one sample is left, its mask is broadcast: a wrong answer without an error."""
    torch.manual_seed(0)
    mask, d = torch.ones(length, length).tril().bool(), torch.randn(length, length, 4).double()
    scale = torch.cat([torch.full((length - 1,), 0.01), torch.ones(1) * 3])[:, None, None]  # the last is late

    def attend(u: Tensor, v: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = v
        return torch.tanh(0.7 * (u @ u.mT).masked_fill(~mask, -1e9).softmax(-1) @ u + x)

    def net(expand: bool, compact: bool) -> Tensor:
        def Q(d: Tensor) -> Any:
            return d * scale, mask.expand(length, -1, -1) if expand else mask

        how: dict[str, Any] = {"tolerance": Tolerance(atol=1e-6, max_steps=200), "compact": compact}
        start = lambda v: torch.zeros_like(v[0])  # noqa: E731
        found: Tensor = ImplicitNetwork(Q, attend, torch.nn.Identity(), start=start, **how)(d)
        return found

    with pytest.raises((ValueError, RuntimeError)) as caught:
        net(expand=False, compact=True)
    said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert "expand it; in a network: in Q" in said[-1]
    assert torch.allclose(net(expand=True, compact=True), net(expand=False, compact=False), atol=1e-5)
