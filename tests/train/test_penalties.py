"""Penalties in fit: one step against dense derivatives, resuming bit by bit, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import ImplicitNetwork, Tolerance, models
from banach.fast import TrainStep
from banach.fast.step import Extras
from banach.train import fit
from banach.train.steps import Penalties
from networks import OnceSine
from train.parts_train import capture_steps, images, network, plain_network, settings

ONE_STEP: dict[str, Any] = {"epochs": 1, "batch_size": 16, "optimizer": "sgd", "lr": 0.5, "monitor": False}
KINDS: dict[str, dict[str, Any]] = {
    "product": {"jacobian_penalty": 0.7},
    "difference": {"jacobian_penalty": 0.7, "finite_difference": True},
    "correction": {"correction": 0.4, "correction_steps": (1, 2)},
    "all": {"jacobian_penalty": 0.7, "correction": 0.4, "correction_steps": (1, 2)},
}


def ones(like: Tensor) -> Tensor:
    return torch.ones_like(like)


def written_out(net: Any, x: Tensor, y: Tensor, kind: str) -> Tensor:
    """The loss of JFB and what is added, by dense Jacobians and a plain loop."""
    v, path = net.Q(x), [torch.zeros(len(x), 12, dtype=torch.float64)]
    for _ in range(100):
        path.append(net.R(path[-1], v).detach())
    total = F.cross_entropy(net.S(net.R(path[-1], v)), y)
    if kind in ("product", "difference", "all"):
        J = torch.func.vmap(torch.func.jacrev(net.R))(path[-1], v)
        product = J.sum(2) if kind == "difference" else J.sum(1)  # J e there, J' e here, e all ones
        total = total + 0.7 * product.square().mean()
    if kind in ("correction", "all"):
        for k, weight in ((1, 0.8**2), (2, 0.8)):
            total = total + 0.4 * weight * F.cross_entropy(net.S(net.R(path[k], v)), y)
    return total


@pytest.mark.parametrize(("accumulate", "captured"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_fit_is_that_of_the_written_out_loss(
    kind: str, accumulate: int, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured steps are observed too, and keep iterates although they loop."""
    monkeypatch.setattr("banach.nn.penalty._signs", ones)
    if captured:
        capture_steps(monkeypatch)
    net, by_hand = plain_network(), plain_network()
    data = images(16)
    history = fit(net, data, None, settings(**ONE_STEP, **KINDS[kind], accumulate=accumulate))
    x, y = data.normalise(data.pixels), data.labels
    loss = written_out(by_hand, x, y, kind)
    grads = torch.autograd.grad(loss, list(by_hand.parameters()))
    for (name, now), before, g in zip(net.named_parameters(), by_hand.parameters(), grads, strict=True):
        assert torch.allclose(now, before - 0.5 * g, rtol=0, atol=2e-7 if kind == "difference" else 1e-9), name
    plain = F.cross_entropy(by_hand(x), y)  # the loss that is reported is without what was added
    assert history.last.loss == pytest.approx(float(plain.detach()), rel=1e-9)
    assert history.last.products == (16 if kind in ("product", "all") else 0)


@pytest.mark.filterwarnings("ignore:the training step could not be captured")
def test_a_step_keeps_no_autograd_graph_of_the_observed_pass() -> None:
    """The solver that records iterates holds the graph, whose nodes belong to the stream of the warm-up."""
    net, data = plain_network(), images(8)
    extras = Extras(penalty=Penalties(settings(**KINDS["correction"])))
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), F.cross_entropy, extras=extras)
    step(data.normalise(data.pixels), data.labels)
    assert step.reached is not None
    assert step.reached.solver is net.solver


def test_batch_norm_is_updated_once_a_step() -> None:
    net: Any = network()
    fit(net, images(32), None, settings(epochs=1, jacobian_penalty=1.0, correction=1.0))
    assert int(net.R.blocks[0].norm.num_batches_tracked) == 2
    assert int(net.Q.norm1.num_batches_tracked) == 2


def test_a_network_without_a_fixed_point_is_refused() -> None:
    for net in (nn.Linear(64, 10), models.build("digits", tolerance=Tolerance(max_steps=0))):
        for key in ("jacobian_penalty", "correction"):
            with pytest.raises(ValueError, match="need a network with a fixed point"):
                fit(net, images(), None, settings(**{key: 0.1}))


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12).double()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return OnceSine.apply(0.3 * self.inner(u) + v)


def test_an_r_without_second_derivatives_is_explained_and_the_difference_works() -> None:
    plain = plain_network()
    net = ImplicitNetwork(plain.Q, Once(), plain.S, tolerance=Tolerance(max_steps=100))
    with pytest.raises(RuntimeError, match=r"set finite_difference=True \(--finite-difference\)"):
        fit(net, images(), None, settings(jacobian_penalty=1.0))
    fit(net, images(), None, settings(jacobian_penalty=1.0, finite_difference=True, epochs=1))


def test_bf16() -> None:
    net = network(tolerance=Tolerance(atol=1e-2))  # bfloat16 cannot meet 1e-4
    history = fit(net, images(32), None, settings(epochs=1, precision="bf16", **KINDS["all"]))
    assert history.last.loss < 10
    assert all(torch.isfinite(p).all() for p in net.parameters())
