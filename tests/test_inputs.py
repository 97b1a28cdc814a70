"""Several inputs: net(tokens, mask) calls Q(tokens, mask), in training, prediction and measurement."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import banach
from banach import ImplicitNetwork, Tolerance, contraction_factor, descent_check
from banach.diagnose import measure_contraction, network_map
from banach.fast import TrainStep
from networks import by_hand


class Part(nn.Module):
    """A layer, and the function that calls it."""

    def __init__(self, layer: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, *given: Tensor) -> Tensor:
        return self.call(self.layer, *given)


def network() -> ImplicitNetwork:
    torch.manual_seed(0)
    Q = Part(nn.Embedding(11, 8), lambda table, tokens, mask: table(tokens) * mask[..., None])
    R = Part(nn.Linear(8, 8), lambda mix, u, v: 0.4 * torch.tanh(mix(u) + u.mean(1, keepdim=True) + v))
    S = Part(nn.Linear(8, 3), lambda head, u: head(u.mean(1)))
    return ImplicitNetwork(Q, R, S, tolerance=Tolerance(atol=1e-6, max_steps=100))


def batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(11, (rows, 5), generator=g)
    return tokens, (torch.rand(rows, 5, generator=g) < 0.7).float()


def test_a_network_calls_q_with_all_of_them() -> None:
    net, d = network(), batch()
    torch.testing.assert_close(net(*d), by_hand(net, *d), rtol=1e-4, atol=1e-5)
    u, found = net.latent(*d)
    again = net(*d, z0=found.value, solution=True)[1]
    assert int(again.steps.max()) < int(found.steps.max())
    assert torch.equal(net.S(u), net(*d))
    for call in (net, net.latent):
        with pytest.raises(TypeError):  # z0 is keyword-only
            call(*d, torch.zeros(6, 5, 8))


@pytest.mark.filterwarnings("ignore:the training step could not be captured")
def test_a_training_step_takes_a_tuple() -> None:
    net, d, y = network(), batch(), torch.tensor([0, 1, 2, 0, 1, 2])
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), F.cross_entropy)
    losses = [float(step(d, y)) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_compile_takes_a_tuple_or_several() -> None:
    net, d = network().eval(), batch()
    fast = banach.compile(net)
    with torch.no_grad():
        expected = net(*d)
    for answer in (fast(*d), fast(d)):
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
    found = fast(d, solution=True)[1]
    again = fast(*d, z0=found.value, solution=True)[1]
    assert again.converged.all()
    with pytest.raises(ValueError, match="must have a row for each of 6 samples"):
        fast(d[0], d[1][:5])
    with pytest.raises(TypeError, match="whose inputs are tensors, got none"):
        fast()


def test_measurements_take_a_tuple() -> None:
    net, d = network(), batch()
    measured = network_map(net, d)
    sigma = contraction_factor(measured.T, measured.u, measured.inputs)
    torch.testing.assert_close(measure_contraction(net, d).sigma, sigma, rtol=1e-2, atol=1e-3)
    assert descent_check(net, d, lambda y: y.square().mean()).cosine > 0.5


def test_a_latent_unlike_q_needs_a_start() -> None:
    cases: list[tuple[Any, ...]] = [
        (ValueError, lambda d: d, lambda u, v: 0.5 * u[:, :4] + v[:, :4], lambda v: torch.zeros_like(v[:, :4])),
        (TypeError, lambda d: (d, d > 0), lambda u, v: 0.5 * u * v[1] + v[0], lambda v: torch.zeros_like(v[0])),
    ]
    for kind, Q, R, start in cases:
        with pytest.raises(kind, match=r"here z0 is zeros shaped like Q\(d\).*pass start="):
            ImplicitNetwork(Q, R, nn.Identity())(torch.ones(2, 8))
        found = ImplicitNetwork(Q, R, nn.Identity(), start=start)(torch.ones(2, 8))
        torch.testing.assert_close(found, torch.full_like(found, 2.0), rtol=1e-3, atol=1e-3)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 0.5 * torch.tanh(self.norm(u) + v)


def test_an_r_that_fails_on_a_latent_shaped_like_q_says_why() -> None:
    """The first evaluation fails inside R, with PyTorch's words about shapes."""
    linear = nn.Linear(4, 4)
    failing: list[tuple[Any, Any]] = [
        (RuntimeError, lambda u, v: 0.5 * torch.tanh(linear(u)) + v[:, :4]),
        (RuntimeError, lambda u, v: u + v[:, :4]),
        ((IndexError, TypeError), lambda u, v: {"a": u["a"] + v}),  # by version
        (ValueError, lambda u, v: tuple(0.5 * part + v for _, part in [u])),
    ]
    for kind, R in failing:
        with pytest.raises(kind) as caught:
            ImplicitNetwork(nn.Linear(3, 8), R, nn.Identity())(torch.zeros(3, 3))
        assert "z0 is zeros shaped like Q(d)" in caught.value.__notes__[0]
        with pytest.raises(kind) as caught:
            ImplicitNetwork(nn.Linear(3, 8), R, nn.Identity())(torch.zeros(3, 3), z0=torch.zeros(3, 8))
        assert not hasattr(caught.value, "__notes__")
    with pytest.raises(ValueError, match="more than 1 value per channel") as alone:  # of a batch of one
        ImplicitNetwork(nn.Linear(3, 8), Normalised(), nn.Identity())(torch.zeros(1, 3))
    assert not hasattr(alone.value, "__notes__")
    with pytest.raises(TypeError, match="positional argument") as caught:
        ImplicitNetwork(nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8)), nn.Identity())(torch.zeros(3, 3))
    assert caught.value.__notes__[0].startswith("R is called as R(u, Q(d))")
    with pytest.raises(KeyError) as caught:  # u has the keys of Q(d)
        ImplicitNetwork(lambda d: {"x": d}, lambda u, v: {"h": u["h"] + v["x"]}, nn.Identity())(torch.zeros(3, 3))
    assert "z0 is zeros shaped like Q(d)" in caught.value.__notes__[0]
