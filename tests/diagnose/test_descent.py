"""descent_check against gradients that a plain recorded loop gives."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from banach import JFB, Implicit, ImplicitNetwork, Tolerance
from banach.diagnose import descent_check
from diagnose.parts_diagnose import DATA, tiny, unchanged


def unrolled(net: ImplicitNetwork, d: Tensor, loss: Callable[[Tensor], Tensor], keep: int) -> dict[str, Tensor]:
    """Gradients by recording the last `keep` of 300 steps: 1 is JFB, many are exact."""
    twin = copy.deepcopy(net)
    v = twin.Q(d)
    u = torch.zeros_like(v)
    with torch.no_grad():
        for _ in range(300):
            u = twin.R(u, v)
    for _ in range(keep):
        u = twin.R(u, v)
    names, weights = zip(*twin.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss(twin.S(u)), weights, allow_unused=True)
    return {n: torch.zeros_like(w) if g is None else g for n, w, g in zip(names, weights, grads, strict=True)}


def compare(cheap: dict[str, Tensor], exact: dict[str, Tensor], part: str = "") -> tuple[float, float]:
    a, b = (torch.cat([g.flatten() for n, g in grads.items() if n.startswith(part)]) for grads in (cheap, exact))
    return float(a @ b / (a.norm() * b.norm())), float(a.norm() / b.norm())


@pytest.mark.parametrize("norm", [False, True])
def test_jfb_against_a_recorded_loop(norm: bool) -> None:
    net = tiny(gain=0.9, norm=norm)
    if norm:
        with torch.no_grad():
            net.R.norm.weight.fill_(0.15)

    def loss(y: Tensor) -> Tensor:
        return y.square().sum() + y[:, 0].sum()

    with unchanged(net), torch.set_grad_enabled(norm):
        found = descent_check(net, DATA, loss)
    cheap, exact = unrolled(net, DATA, loss, 1), unrolled(net, DATA, loss, 300)
    assert (found.cosine, found.ratio) == pytest.approx(compare(cheap, exact), rel=1e-8)
    for part in "QRS":
        agreement = found.parts[part]
        assert (agreement.cosine, agreement.ratio) == pytest.approx(compare(cheap, exact, part), rel=1e-8)
    assert found.cosine < 0.9999  # the two gradients do differ
    assert isinstance(found.backward, JFB)
    assert found.descends
    with torch.no_grad():
        assert found.loss == pytest.approx(float(loss(copy.deepcopy(net)(DATA))))


def test_both_gradients_see_the_same_masks() -> None:
    """Dropout in Q, R and S: the exact gradient against itself agrees only if no new mask was drawn."""
    net = tiny(drop=0.4)
    with unchanged(net):
        found = descent_check(
            net, DATA, lambda y: y.square().sum(), backward=Implicit(tolerance=Tolerance(atol=0, rtol=1e-12))
        )
    assert found.cosine == pytest.approx(1, abs=1e-9)
    assert found.ratio == pytest.approx(1, abs=1e-7)


def test_cheap_is_where_the_network_stops_exact_at_the_fixed_point() -> None:
    """A network that stops early has a worse cheap gradient, and the exact one does not move."""

    def loss(y: Tensor) -> Tensor:
        return y.square().sum()

    early = tiny(gain=0.9, tolerance=Tolerance(atol=0, max_steps=1))
    found = descent_check(early, DATA, loss)
    exact = unrolled(early, DATA, loss, 300)
    twin = copy.deepcopy(early)
    u = twin.R(torch.zeros(6, 5, dtype=torch.float64), twin.Q(DATA)).detach()
    names, weights = zip(*twin.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss(twin.S(twin.R(u, twin.Q(DATA)))), weights)
    assert (found.cosine, found.ratio) == pytest.approx(
        compare(dict(zip(names, grads, strict=True)), exact), rel=1e-8
    )
    assert found.solution.converged.all()


def test_frozen_weights_and_parts_without_any() -> None:
    net = tiny()
    net = ImplicitNetwork(net.Q.requires_grad_(False), net.R, torch.sin, tolerance=net.tolerance)
    found = descent_check(net, DATA, lambda y: y.sum())
    assert set(found.parts) == {"R"}
    assert found.cosine == pytest.approx(found.parts["R"].cosine)


def test_tied_weights_count_once_in_all() -> None:
    net = tiny()
    net.S = nn.Sequential(nn.Linear(5, 5).double())
    net.S[0].weight = net.R.linear.weight

    def loss(y: Tensor) -> Tensor:
        return y.square().sum()

    found = descent_check(net, DATA, loss)
    assert found.cosine == pytest.approx(
        compare(unrolled(net, DATA, loss, 1), unrolled(net, DATA, loss, 300))[0], rel=1e-8
    )
    assert set(found.parts) == {"Q", "R", "S"}


def test_a_zero_gradient_has_no_direction() -> None:
    found = descent_check(tiny(), DATA, lambda y: 0 * y.sum())
    assert math.isnan(found.cosine)
    assert math.isnan(found.ratio)
    assert not found.descends


def test_refusals() -> None:
    net = tiny()
    with pytest.raises(ValueError, match=r"loss must turn .* into one number, got \(6, 3\); take its mean"):
        descent_check(net, DATA, lambda y: y)
    with pytest.raises(ValueError, match="loss must depend on the network's weights, got a constant"):
        descent_check(net, DATA, lambda y: y.detach().sum())
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="got none in Q, R and S"):
        descent_check(net, DATA, lambda y: y.sum())
