"""Dropout inside R: one mask per pass, in every mode, against a network whose mask is written out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import banach
from banach import JFB, ImplicitNetwork, Tolerance, Unroll
from banach.nn.passes import Pass
from nn.parts_nn import MODES, TIGHT, close, gradients, network, normal


class DropR(nn.Module):
    """R(u, v) = 0.5 tanh(drop(A u)) + v, which notes its mask (what drop makes of ones) at every evaluation."""

    def __init__(self, p: float = 0.5, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(width, width).double()
        self.drop = banach.nn.Dropout(p)
        self.seen: list[Tensor] = []

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        x = self.linear(u)
        self.seen.append(self.drop(torch.ones_like(x)).detach().clone())
        return 0.5 * torch.tanh(self.drop(x)) + v


class Written(nn.Module):
    """The same with its mask written out."""

    def __init__(self, linear: nn.Module, mask: Tensor) -> None:
        super().__init__()
        self.linear, self.mask = linear, mask

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.mask * self.linear(u)) + v


class Descent(DropR):
    """R(u, v) = u - 0.2 grad E,  E = |drop(A u)|^2 / 2 + |u|^2 / 2 - u v: R differentiates by itself."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        def energy(z: Tensor) -> Tensor:
            return (self.drop(self.linear(z)).square() + z.square() - 2 * z * v).sum() / 2

        value = u - 0.2 * torch.func.grad(energy)(u)  # first, so that the mask is drawn in there
        self.seen.append(self.drop(torch.ones_like(u)).detach())
        return value


class WrittenDescent(Written):
    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        W: Any = self.linear.weight
        return u - 0.2 * ((self.mask.square() * self.linear(u)) @ W + u - v)


def notes(net: Any) -> list[Tensor]:
    """The masks that R noted since it was last asked."""
    seen, net.R.seen = net.R.seen, []
    return seen


@pytest.mark.parametrize("max_steps", [300, 0])
@pytest.mark.parametrize("own_gradient", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_one_mask_for_solve_attach_recomputation_and_products(
    mode: str, own_gradient: bool, max_steps: int
) -> None:
    if own_gradient and mode == "checkpoint":
        pytest.skip("torch.func does not support checkpoints")
    tolerance = Tolerance(atol=1e-13, max_steps=max_steps)
    net = network(Descent() if own_gradient else DropR(), backward=MODES[mode], tolerance=tolerance)
    d = normal(5, 4)
    y, found = net(d, solution=True)
    assert bool(found.converged.all()) is (max_steps > 0)  # a map that changed at every step would not settle
    forward = notes(net)
    mask = forward[0]
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    got = gradients(net, y.square().sum())
    backward = notes(net)
    assert bool(backward) is (mode in ("checkpoint", "implicit"))
    assert all(torch.equal(m, mask) for m in [*forward, *backward])
    R = (WrittenDescent if own_gradient else Written)(net.R.linear, mask)
    twin = ImplicitNetwork(net.Q, R, net.S, tolerance=tolerance, backward=MODES[mode])
    assert torch.allclose(twin(d), y, rtol=0, atol=1e-12)
    assert close(got, gradients(twin, twin(d).square().sum()), atol=1e-11)
    net(d)
    assert not torch.equal(notes(net)[0], mask)  # the next pass draws a new one


@pytest.mark.parametrize("mode", MODES)
def test_one_network_many_times_in_one_graph(mode: str) -> None:
    net = network(DropR(), backward=MODES[mode])
    batches = normal(5, 4), normal(7, 4, seed=1), normal(5, 4)
    total, masks, parts = torch.zeros((), dtype=torch.float64), [], []
    for d in batches:
        total = total + net(d).square().sum()
        masks.append(notes(net)[0])
    got = gradients(net, total)
    assert not torch.equal(masks[0], masks[2])
    for d, mask in zip(batches, masks, strict=True):
        twin = ImplicitNetwork(net.Q, Written(net.R.linear, mask), net.S, tolerance=TIGHT, backward=MODES[mode])
        parts.append(gradients(twin, twin(d).square().sum()))
    assert close(got, {name: sum(part[name] for part in parts) for name in got}, atol=1e-11)  # type: ignore[misc]


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])  # of which the numbers are multiples of 1/256
@pytest.mark.parametrize(
    ("p", "training"), [(0.1, True), (0.8, True), (0.001, True), (0.0, True), (1.0, True), (0.5, False)]
)
def test_the_share_that_is_kept(p: float, training: bool, default: torch.dtype) -> None:
    net = network(DropR(p, width=200).train(training), width=200)
    torch.set_default_dtype(default)
    try:
        loss = net(normal(200, 4)).sum()
    finally:
        torch.set_default_dtype(torch.float32)
    mask, keep = notes(net)[0], 1 - p if training else 1.0
    assert set(mask.unique().tolist()) <= {0.0, 1 / max(keep, 1e-9)}
    assert abs(float((mask > 0).double().mean()) - keep) <= 4 * (keep * (1 - keep) / mask.numel()) ** 0.5
    assert all(g.isfinite().all() for g in gradients(net, loss).values())  # at p = 1 too, where 1 / (1 - p) is not


def test_outside_a_pass_it_is_pytorchs_own() -> None:
    own, x = banach.nn.Dropout(0.3), normal(50, 6)
    torch.manual_seed(0)
    expected = nn.Dropout(0.3)(x)
    torch.manual_seed(0)
    assert torch.equal(own(x), expected)
    assert not torch.equal(own(x), own(x))


class Bare(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.drop(u) + v


@pytest.mark.parametrize(("kind", "spatial"), [("Dropout1d", 1), ("Dropout2d", 2), ("Dropout3d", 3)])
def test_channels_are_dropped_whole(kind: str, spatial: int) -> None:
    R, u = Bare(getattr(banach.nn, kind)(0.4)), torch.ones(8, 16, *[3] * spatial, dtype=torch.float64)
    with Pass(R) as one:
        first, second = one.evaluate(u, 0 * u), one.evaluate(u, 0 * u)
    assert torch.equal(first, second)
    flat = first.flatten(2)
    assert torch.equal(flat, flat[..., :1].expand_as(flat))
    assert 0.4 < float((flat[..., 0] > 0).double().mean()) < 0.8
    with Pass(R) as one, pytest.raises(ValueError, match=f"takes a batch of {spatial + 2} axes, got shape"):
        one.evaluate(u[0], u[0])


# Compacted batches, functions, networks inside networks, checkpoints inside R.

SPREAD = normal(12, 4) * torch.logspace(-3, 1, 12, dtype=torch.float64)[:, None]  # ready at very different steps


class Rates(DropR):
    """R(u, v) = 0.7 tanh(v) drop(A u) + v, |A| = 1."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.linear.weight.div_(torch.linalg.matrix_norm(self.linear.weight, 2))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        self.seen.append(self.drop(torch.ones_like(u)))
        return 0.7 * torch.tanh(v) * self.drop(self.linear(u)) + v


@pytest.mark.parametrize("mode", MODES)
def test_masks_are_cut_with_the_batch(mode: str) -> None:
    net = network(Rates(), tolerance=Tolerance(atol=1e-10, max_steps=300), backward=MODES[mode])
    torch.manual_seed(0)
    y, plain = net(SPREAD, solution=True)
    expected = gradients(net, y.square().sum())
    assert {len(m) for m in notes(net)} == {12}
    net.compact = True
    torch.manual_seed(0)
    y_cut, cut = net(SPREAD, solution=True)
    masks = notes(net)
    assert min(len(m) for m in masks) < 6 < max(len(m) for m in masks) == 12
    assert torch.equal(plain.steps, cut.steps)
    assert torch.allclose(y, y_cut, rtol=0, atol=1e-12)
    assert close(gradients(net, y_cut.square().sum()), expected, atol=1e-11)


def test_a_mask_of_another_batch_is_refused() -> None:
    class Flat(DropR):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            rows = self.drop(u.reshape(-1, 2))  # axis 0 is no longer the batch
            return 0.3 * torch.tanh(v) * rows.reshape(u.shape) + v

    network(Flat())(SPREAD)
    with pytest.raises(ValueError, match=r"a batch of \d+ .* must be the batch, or leave out compact=True"):
        network(Flat(), compact=True)(SPREAD)


def test_a_mask_whose_batch_is_another_axis_is_refused() -> None:
    """Attention in the layout of PyTorch's default, axis 0 the sequence. Its masks were selected out of range."""
    block = banach.nn.convert_dropout(nn.MultiheadAttention(6, 2, dropout=0.3, dtype=torch.float64))

    def R(u: Tensor, v: Tensor) -> Tensor:
        mixed: Tensor = 0.1 * block(u, u, u)[0] + v
        return mixed

    u = ImplicitNetwork(nn.Identity(), R, nn.Identity(), compact=True)
    with pytest.raises(ValueError, match=r"a mask for a batch of 5 and got a batch of 3: .* compact=True"):
        u(normal(5, 3, 6))


def test_a_function_for_r_keeps_its_mask_too() -> None:
    inner = DropR()
    net = network(lambda u, v: inner(u, v), backward=Unroll(2, checkpoint=True))
    y, found = net(normal(5, 4), solution=True)
    y.sum().backward()
    assert bool(found.converged.all())
    assert all(torch.equal(m, inner.seen[0]) for m in inner.seen)


@pytest.mark.parametrize("compact", [False, True])
def test_a_network_inside_r_keeps_its_masks_for_the_outer_pass(compact: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            identity = nn.Identity()
            loose = Tolerance(atol=1e-9, max_steps=200)
            self.inner = ImplicitNetwork(identity, DropR(), identity, tolerance=loose, compact=compact)

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return 0.7 * torch.tanh(v) * self.inner(u) + v

    tolerance = Tolerance(atol=1e-7, max_steps=100)
    net = network(Outer(), compact=compact, tolerance=tolerance, backward=Unroll(2, checkpoint=True))
    y, found = net(SPREAD, solution=True)
    assert bool(found.converged.all())
    y.sum().backward()
    seen = net.R.inner.R.seen
    full = next(m for m in seen if len(m) == 12)
    assert (min(len(m) for m in seen) < 12) is compact
    assert all(torch.equal(m, full) for m in seen if len(m) == 12)
    net(SPREAD)
    assert not torch.equal(net.R.inner.R.seen[-1], full)


def test_a_checkpoint_inside_r_is_refused_rather_than_wrong() -> None:
    class Inner(DropR):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return checkpoint(super().forward, u, v, use_reentrant=False)

    net = network(Inner(), backward=JFB())
    loss = net(normal(5, 4)).sum()
    with pytest.raises(RuntimeError, match=r"recomputed outside its pass.*use Unroll\(checkpoint=True\)"):
        loss.backward()
    u = normal(5, 6).requires_grad_()
    net.R(u, u)  # outside a pass, and outside a backward pass, nothing is refused
    Inner()(u, u).sum().backward()  # outside a pass the checkpoint restores the generator, as ever
    assert u.grad is not None
