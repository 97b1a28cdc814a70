"""Dropout inside R: one mask per pass, in every mode, against a network whose mask is written out."""

import copy
import pickle
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

    def __init__(self, p: float = 0.5, width: int = 6, drop: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(width, width).double()
        self.drop = banach.nn.Dropout(p) if drop is None else drop
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


def notes(net: Any) -> list[Tensor]:
    """The masks that R noted since it was last asked."""
    seen, net.R.seen = net.R.seen, []
    return seen


@pytest.mark.parametrize("max_steps", [300, 0])
@pytest.mark.parametrize("mode", MODES)
def test_one_mask_for_solve_attach_recomputation_and_products(mode: str, max_steps: int) -> None:
    tolerance = Tolerance(atol=1e-13, max_steps=max_steps)
    net = network(DropR(), backward=MODES[mode], tolerance=tolerance)
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
    twin = ImplicitNetwork(net.Q, Written(net.R.linear, mask), net.S, tolerance=tolerance, backward=MODES[mode])
    assert torch.allclose(twin(d), y, rtol=0, atol=1e-13)
    assert close(got, gradients(twin, twin(d).square().sum()), atol=1e-12)
    net(d)
    assert not torch.equal(notes(net)[0], mask)  # the next pass draws a new one


@pytest.mark.parametrize("p", [0.1, 0.3, 0.8])
def test_the_expectation_is_right(p: float) -> None:
    R = DropR(p, width=200)
    with Pass(R) as one:
        one.evaluate(normal(200, 200), normal(200, 200))
    mask = R.seen[0]
    assert mask.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    kept = float((mask > 0).double().mean())
    assert abs(kept - (1 - p)) < 4 * (p * (1 - p) / mask.numel()) ** 0.5


def test_p_zero_and_one_and_eval() -> None:
    u, v = normal(3, 6), normal(3, 6, seed=1)
    for p, training, factor in ((0.0, True, 1.0), (1.0, True, 0.0), (0.5, False, 1.0)):
        R = DropR(p).train(training)
        with Pass(R) as one:
            got = one.evaluate(u, v)
        assert torch.equal(got, Written(R.linear, torch.full((3, 6), factor).double())(u, v))
        (g,) = torch.autograd.grad(got.sum(), R.linear.weight)
        assert torch.isfinite(g).all()  # at p = 1 too, where 1 / (1 - p) is not


def test_outside_a_pass_it_is_pytorchs_own() -> None:
    own, plain = banach.nn.Dropout(0.3), nn.Dropout(0.3)
    x = normal(50, 6)
    torch.manual_seed(0)
    expected = plain(x)
    torch.manual_seed(0)
    assert torch.equal(own(x), expected)
    assert not torch.equal(own(x), own(x))


@pytest.mark.parametrize(("kind", "spatial"), [("Dropout1d", 1), ("Dropout2d", 2), ("Dropout3d", 3)])
def test_channels_are_dropped_whole(kind: str, spatial: int) -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = getattr(banach.nn, kind)(0.4)

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return self.drop(u) + v

    R, u = Channels(), torch.ones(8, 16, *[3] * spatial, dtype=torch.float64)
    with Pass(R) as one:
        first, second = one.evaluate(u, 0 * u), one.evaluate(u, 0 * u)
    assert torch.equal(first, second)
    flat = first.flatten(2)
    assert torch.equal(flat, flat[..., :1].expand_as(flat))
    assert 0.4 < float((flat[..., 0] > 0).double().mean()) < 0.8
    with Pass(R) as one, pytest.raises(ValueError, match=f"takes a batch of {spatial + 2} axes, got shape"):
        one.evaluate(u[0], u[0])


def test_device_and_dtype_are_those_of_the_input() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = banach.nn.Dropout(0.5)

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return self.drop(u) + v

    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        with Pass(Bare()) as one:
            u = torch.ones(40, 4, dtype=dtype)
            assert one.evaluate(u, 0 * u).dtype is dtype
            assert set(one.evaluate(u, 0 * u).unique().tolist()) == {0.0, 2.0}
    with Pass(Bare()) as one:
        u = torch.ones(4, 4, device="meta")
        assert one.evaluate(u, u).device.type == "meta"


class Rates(DropR):
    """Samples that converge at very different speeds: R(u, v) = tanh(v) drop(A u) + v, |A| < 1."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        self.seen.append(self.drop(torch.ones_like(u)))
        return 0.7 * torch.tanh(v) * self.drop(self.linear(u)) + v


@pytest.mark.parametrize("mode", MODES)
def test_masks_are_cut_with_the_batch(mode: str) -> None:
    with torch.no_grad():
        R = Rates()
        R.linear.weight.div_(torch.linalg.matrix_norm(R.linear.weight, 2))
    tolerance = Tolerance(atol=1e-10, max_steps=300)
    net = network(R, tolerance=tolerance, backward=MODES[mode])
    d = normal(12, 4) * torch.logspace(-3, 1, 12, dtype=torch.float64)[:, None]
    torch.manual_seed(0)
    y, plain = net(d, solution=True)
    expected = gradients(net, y.square().sum())
    assert {len(m) for m in notes(net)} == {12}
    net.compact = True
    torch.manual_seed(0)
    y_cut, cut = net(d, solution=True)
    masks = notes(net)
    assert min(len(m) for m in masks) < 6 < max(len(m) for m in masks) == 12
    assert torch.equal(plain.steps, cut.steps)
    assert torch.allclose(plain.value, cut.value, rtol=0, atol=1e-12)
    assert torch.allclose(y, y_cut, rtol=0, atol=1e-12)
    assert close(gradients(net, y_cut.square().sum()), expected, atol=1e-11)


def test_a_mask_of_another_batch_is_refused() -> None:
    class Flat(DropR):
        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            rows = self.drop(u.reshape(-1, 2))  # axis 0 is no longer the batch
            return 0.3 * torch.tanh(v) * rows.reshape(u.shape) + v

    d = normal(12, 4) * torch.logspace(-3, 1, 12, dtype=torch.float64)[:, None]
    network(Flat())(d)
    with pytest.raises(ValueError, match=r"axis 0 must be the batch, or leave out compact=True"):
        network(Flat(), compact=True)(d)
    R = DropR()
    with Pass(R) as one:
        one.evaluate(normal(5, 6), normal(5, 6))
        with pytest.raises(ValueError, match="for a batch of 5 and got a batch of 1: one pass is one batch"):
            one.evaluate(normal(1, 6), normal(1, 6))


def test_one_network_many_times_in_one_graph() -> None:
    for mode in MODES.values():
        net = network(DropR(), backward=mode)
        first, second = normal(5, 4), normal(7, 4, seed=1)
        total, masks, twins = torch.zeros((), dtype=torch.float64), [], []
        for d in (first, second, first):
            total = total + net(d).square().sum()
            masks.append(notes(net)[0])
            written = Written(net.R.linear, masks[-1])
            twins.append(ImplicitNetwork(net.Q, written, net.S, tolerance=TIGHT, backward=mode))
        got = gradients(net, total)
        assert not torch.equal(masks[0], masks[2])
        parts = [gradients(t, t(d).square().sum()) for t, d in zip(twins, (first, second, first), strict=True)]
        assert close(got, {name: parts[0][name] + parts[1][name] + parts[2][name] for name in got}, atol=1e-11)


def test_a_mask_drawn_inside_a_transform_outlives_it() -> None:
    R, u, v = DropR(), normal(3, 6), normal(3, 6, seed=1)
    one = Pass(R)
    J = torch.func.jacrev(lambda z: one.evaluate(z, v))(u)
    R.seen.clear()
    one.evaluate(u, v)
    written = Written(R.linear, R.seen[0])
    assert torch.allclose(J, torch.autograd.functional.jacobian(lambda z: written(z, v), u), atol=1e-13)
    push = torch.func.vjp(torch.func.vjp(lambda z: one.evaluate(z, v), u)[1], v)[1]
    product = torch.einsum("abcd,cd->ab", J, u)
    assert torch.allclose(push((u,))[0], product, atol=1e-13)


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


@pytest.mark.parametrize("mode", [m for m in MODES if m != "checkpoint"])  # which torch.func does not support
def test_an_r_that_takes_gradients_itself(mode: str) -> None:
    net = network(Descent(), backward=MODES[mode])
    d = normal(5, 4)
    y, found = net(d, solution=True)
    assert bool(found.converged.all())
    got = gradients(net, y.square().sum())
    masks = notes(net)
    assert all(torch.equal(m, masks[0]) for m in masks)
    R = WrittenDescent(net.R.linear, masks[0])
    twin = ImplicitNetwork(net.Q, R, net.S, tolerance=TIGHT, backward=MODES[mode])
    assert torch.allclose(twin(d), y, rtol=0, atol=1e-12)
    assert close(got, gradients(twin, twin(d).square().sum()), atol=1e-11)


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
    d = normal(12, 4) * torch.logspace(-3, 1, 12, dtype=torch.float64)[:, None]
    y, found = net(d, solution=True)
    assert bool(found.converged.all())
    y.sum().backward()
    seen = net.R.inner.R.seen
    full = next(m for m in seen if len(m) == 12)
    assert (min(len(m) for m in seen) < 12) is compact
    assert all(torch.equal(m, full) for m in seen if len(m) == 12)
    net(d)
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


def test_copies() -> None:
    net = network(DropR(0.3))
    net(normal(5, 4)).sum().backward()
    net.R.seen = []
    twin: Any = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    torch.manual_seed(0)
    y = net(normal(5, 4))
    torch.manual_seed(0)
    assert torch.equal(twin(normal(5, 4)), y)
    assert twin.R.drop.p == 0.3
