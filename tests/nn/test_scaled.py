"""Scaled and ScaledInput: values, contraction by dense Jacobians, nested latents, bad gamma."""

import pytest
import torch
from torch import Tensor, nn

import banach
from banach.nn import Scaled, ScaledInput
from nn.parts_nn import largest, normal


class Nonexpansive(nn.Module):
    """R(u, v) = sin(O u) + v, O orthogonal: exactly 1-Lipschitz in u at u = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.O = nn.Parameter(torch.linalg.qr(normal(6, 6, seed=2))[0])

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.sin(u @ self.O.T) + v


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9])
def test_values_and_contraction(gamma: float) -> None:
    R, u, v = Nonexpansive(), normal(1, 6), normal(1, 6, seed=1)
    outer, inner = Scaled(R, gamma), ScaledInput(R, gamma)
    assert torch.equal(outer(u, v), gamma * (torch.sin(u @ R.O.T) + v))
    assert torch.equal(inner(u, v), torch.sin((gamma * u) @ R.O.T) + v)
    for module in (outer, inner):
        for point in (u, torch.zeros_like(u)):
            J = torch.func.jacrev(lambda z, m=module: m(z, v))(point).view(6, 6)
            assert largest(J) <= gamma * (1 + 1e-12)
        assert largest(J) == pytest.approx(gamma)  # reached at the origin


def test_nested_latents() -> None:
    class Pair(nn.Module):
        def forward(self, u: dict[str, Tensor], v: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"a": u["b"] + v["a"], "b": u["a"] + v["b"]}

    u = {"a": normal(2, 3), "b": normal(2, 3, seed=1)}
    v = {"a": normal(2, 3, seed=2), "b": normal(2, 3, seed=3)}
    got = Scaled(Pair(), 0.5)(u, v)
    assert torch.equal(got["a"], 0.5 * (u["b"] + v["a"]))
    assert torch.equal(ScaledInput(Pair(), 0.5)(u, v)["b"], 0.5 * u["a"] + v["b"])
    z = banach.fixed_point(ScaledInput(Pair(), 0.5), u, inputs=(v,), tolerance=banach.Tolerance(atol=1e-12))
    assert torch.allclose(z["a"], 0.5 * z["b"] + v["a"], atol=1e-10)


@pytest.mark.parametrize("wrap", [Scaled, ScaledInput])
@pytest.mark.parametrize("gamma", [-0.1, 1.0, 2.0, float("nan")])
def test_gamma_is_checked(wrap: type[nn.Module], gamma: float) -> None:
    with pytest.raises(ValueError, match=f"gamma must be at least 0 and below 1, got {gamma}"):
        wrap(Nonexpansive(), gamma)
