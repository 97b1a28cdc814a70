"""The paper's general cases as examples: a DEQ with S the identity, and a model kept well-posed by projection."""

import re
from pathlib import Path

import pytest
import torch
from examples import infinity_norm, transformer_deq
from torch import Tensor

from banach import GMRES, Implicit, Picard, Tolerance, Unroll

TIGHT = Tolerance(atol=1e-13, max_steps=500)
EXACT = Implicit(GMRES(), Tolerance(atol=0, rtol=1e-11, max_steps=200))


def gradients(net: torch.nn.Module, y: Tensor) -> list[Tensor]:
    # Not squares: their sum over a layer norm is constant.
    return list(torch.autograd.grad(y.pow(3).sum(), list(net.parameters())))


def test_the_transformer_learns_to_reverse() -> None:
    net, accuracy = transformer_deq.train(120)
    assert accuracy > 0.9
    tokens = torch.randint(transformer_deq.SYMBOLS, (16, transformer_deq.LENGTH))
    with torch.no_grad():
        u, found = net(tokens, solution=True)
        assert found.converged.all()
        torch.testing.assert_close(u, net.R(u, net.Q(tokens)), rtol=0, atol=5e-3)  # S is the identity


def test_the_transformer_has_the_gradient_of_unrolled_autograd() -> None:
    torch.manual_seed(0)
    net = transformer_deq.transformer_deq().double().eval()
    tokens = torch.randint(transformer_deq.SYMBOLS, (2, transformer_deq.LENGTH))
    net.tolerance, net.backward = TIGHT, EXACT
    got = gradients(net, net(tokens))
    net.tolerance, net.backward = Tolerance(max_steps=0), Unroll(80)
    for a, b in zip(got, gradients(net, net(tokens)), strict=True):
        assert float((a - b).norm()) <= 1e-6 * max(float(b.norm()), 1e-6)


def test_the_transformer_is_causal() -> None:
    """A later symbol changes nothing before it."""
    torch.manual_seed(0)
    net = transformer_deq.transformer_deq().double().eval()
    net.tolerance = TIGHT
    tokens = transformer_deq.sequences(3)[0]
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % transformer_deq.SYMBOLS
    with torch.no_grad():
        u, changed = net(tokens), net(other)
        torch.testing.assert_close(u[:, :-1], changed[:, :-1], rtol=0, atol=1e-11)
        assert float((u[:, -1] - changed[:, -1]).abs().max()) > 1e-3


@pytest.mark.gpu
def test_the_transformer_trains_captured_and_compiled() -> None:
    _, accuracy = transformer_deq.train(300, device="cuda")
    assert accuracy > 0.9


@pytest.mark.parametrize("bound", [0.3, 0.95, 50.0])
def test_the_projection_is_the_nearest_row(bound: float) -> None:
    """By bisection over the threshold, which is another way to find it."""
    torch.manual_seed(0)
    weight = torch.randn(5, 9, dtype=torch.float64)
    projected = infinity_norm.project_rows_(weight.clone(), bound)
    low, high = torch.zeros(5, 1, dtype=torch.float64), weight.abs().amax(1, keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        above = (weight.abs() - middle).clamp(min=0).sum(1, keepdim=True) > bound
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    inside = weight.abs().sum(1, keepdim=True) <= bound
    expected = torch.where(inside, weight, weight.sign() * (weight.abs() - low).clamp(min=0))
    torch.testing.assert_close(projected, expected, rtol=0, atol=1e-12)


def test_the_projected_model_learns_and_stays_well_posed() -> None:
    net, accuracy = infinity_norm.train(150)
    assert accuracy > 0.75
    assert float(net.R.A.detach().abs().sum(1).max()) <= infinity_norm.BOUND * (1 + 1e-5)
    d = infinity_norm.rings(50)[0]
    with torch.no_grad():
        starts = [net.latent(d, z0=torch.randn(50, 40))[0] for _ in range(2)]
    torch.testing.assert_close(*starts, rtol=0, atol=1e-3)


def test_the_projected_model_has_the_gradient_of_unrolled_autograd() -> None:
    torch.manual_seed(0)
    net = infinity_norm.implicit_model(2, 12, 3).double()
    d = infinity_norm.rings(4)[0].double()
    net.tolerance, net.backward, net.solver = TIGHT, EXACT, Picard()
    got = gradients(net, net(d))
    net.tolerance, net.backward = Tolerance(max_steps=0), Unroll(500)
    for a, b in zip(got, gradients(net, net(d)), strict=True):
        assert float((a - b).norm() / b.norm()) <= 1e-6


@pytest.mark.parametrize("example", [transformer_deq, infinity_norm])
def test_they_print_what_they_promise(
    example: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = example.train(20)  # type: ignore[attr-defined]
    monkeypatch.setattr(example, "train", lambda: trained)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    example.main()  # type: ignore[attr-defined]
    assert "evaluations:" in capsys.readouterr().out


def test_the_code_of_the_page_runs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "rivals.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, {})
