"""TrainStep without a GPU: as it falls back, and what it refuses, with programs that run in place of graphs."""

import copy
import warnings
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import networks
from banach import Implicit, ImplicitNetwork, Tolerance
from banach.fast import Extras, TrainStep
from banach.fast.capture import HeldFixed
from banach.fast.plan import MAY_CHANGE
from banach.fast.step import at_least_fp32
from fast.simulated import EagerGraphs, digits, images, simulate_gpu
from networks import conv_network
from train.parts_train import plain_network, same_weights


def network() -> Any:
    return digits(Tolerance(atol=1e-3, max_steps=40))


def batch(count: int = 6) -> tuple[Tensor, Tensor]:
    return images(count, torch.float32), torch.arange(count)


def eagerly(net: Any, lr: float = 0.1, **options: Any) -> TrainStep:
    """A step on a CPU, which is not captured and says so."""
    with pytest.warns(UserWarning, match="runs eagerly: the weights are on the CPU"):
        return TrainStep(net, torch.optim.SGD(net.parameters(), lr=lr), F.cross_entropy, **options)


def captured(net: Any, optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> TrainStep:
    """Simulate a GPU."""
    simulate_gpu(monkeypatch, kernels=False)
    return TrainStep(net, optimizer, F.cross_entropy)


def test_without_a_gpu_it_is_a_plain_step_and_says_so() -> None:
    net = network()
    reference, (d, y) = copy.deepcopy(net), batch()
    step = eagerly(net)
    losses = [float(step(d, y)) for _ in range(3)]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for expected in losses:
        optimizer.zero_grad()
        loss = F.cross_entropy(reference(d), y)
        loss.backward()
        optimizer.step()
        assert float(loss.detach()) == expected
    assert same_weights(net, reference)
    assert step.reached is not None
    assert bool(step.reached.converged.all())
    step(*batch(3))  # of any size


class SparseR(torch.nn.Module):
    """R(u, v) = tanh(A (W u) + v) / 3 with a sparse A, as graph networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("A", 0.5 * torch.eye(6).to_sparse())

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        found: Tensor = torch.tanh(torch.sparse.mm(self.A, self.inner(u)) + v) / 3
        return found


def test_tensors_without_an_address_may_be_in_the_network() -> None:
    """Sparse buffers, and weights of lazy layers before the first call, raised an error on every device."""
    net = ImplicitNetwork(torch.nn.LazyLinear(4), SparseR(), torch.nn.Linear(4, 3), coupled=True)
    before = HeldFixed(net)
    step, d, y = eagerly(net), torch.randn(6, 5), torch.arange(6) % 3
    losses = [float(step(d, y)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert before.changed()
    assert not HeldFixed(net).changed()


def test_what_replays_hold_fixed() -> None:
    """Also where an address stays, numbers of NumPy, and attributes that were no number or not there before."""
    net: Any = conv_network()
    net.S[1] = torch.nn.Linear(8, 8)
    with warnings.catch_warnings(action="ignore"):
        net.Q = torch.jit.script(net.Q)  # whose parameters are not in a dict, which was an error

    def transpose() -> None:
        net.S[1].weight.data = net.S[1].weight.data.t()

    def shorten() -> None:
        net.S[1].bias.data = net.S[1].bias.data[:6]

    net.R.gamma, net.R.scale, net.R.skips, net.R.width = numpy.float64(0.4), None, True, 3
    given = [("skips", False), ("gamma", 2.0), ("width", None), ("new", 1.0), ("new", torch.ones(2))]
    changes: list[Any] = [
        partial(setattr, net.R, "gamma", numpy.float64(0.3)),
        lambda: vars(net.R).update(gamma=None, scale=net.R.gamma),
        transpose,
        shorten,
        net.Q.eval,
        partial(net.S.__setitem__, 0, torch.nn.Identity()),
        *(partial(setattr, net.R, *pair) for pair in given),
    ]
    for change in changes:
        before = HeldFixed(net)
        assert not before.changed()
        change()
        assert before.changed()


def test_what_cannot_be_captured_runs_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: EagerGraphs, program: Any) -> None:
        raise RuntimeError("the host was\n asked")

    monkeypatch.setattr(EagerGraphs, "capture", refuse)
    net = network()
    step = captured(net, torch.optim.SGD(net.parameters(), lr=0.1), monkeypatch)
    d, y = batch()
    with pytest.warns(UserWarning, match="runs eagerly: RuntimeError: the host was asked"):
        first = float(step(d, y))
    assert float(step(d, y)) < first  # without a second warning
    assert step.reason == "RuntimeError: the host was asked"


def test_steps_of_several_depths_share_a_network_and_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    reference, (d, y) = copy.deepcopy(net), batch()
    optimizer, other = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (net, reference))
    steps: dict[int, Any] = {}
    for loops in (2, 4, 4, 2, 3, 2):
        net.tolerance = reference.tolerance = Tolerance(atol=0, max_steps=loops, check_every=0)
        if loops not in steps:
            steps[loops] = captured(net, optimizer, monkeypatch)
            steps[loops].feed.take((d, y), captured=True)
            steps[loops].prepare()
        made = steps[loops]._recording
        loss = float(steps[loops](d, y))
        assert steps[loops]._recording is made is not None
        other.zero_grad()
        expected = F.cross_entropy(reference(d), y)
        expected.backward()
        other.step()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-4)


def test_a_captured_step_takes_one_shape_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy into the graph's tensors would broadcast one image over the batch, and cast what it gets."""
    net = network()
    step, (d, y) = captured(net, torch.optim.SGD(net.parameters(), lr=0.1), monkeypatch), batch()
    step(d, y)
    before = copy.deepcopy(net.state_dict())
    words = r"of its first call, \[\(\(6, 1, 8, 8\), torch.float32\), .* got \[\(\(1, 1, 8, 8\), torch.float32\)"
    with pytest.raises(ValueError, match=words):
        step(d[:1], y[:1])
    with pytest.raises(ValueError, match=r"got .* torch\.float64"):
        step(d.double(), y)
    with pytest.raises(ValueError, match=r"got .*, \(\(1,\), torch\.int64\)\]; drop the last batch"):
        step(d, y[:1])
    with pytest.raises(ValueError, match="of the shapes and types of its first call"):
        step((d, d), y)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Turned(torch.nn.Module):
    """R(u, v) = tanh(W (table * u)) / 3 + v with a table in a buffer, which `write` may change."""

    table: Tensor

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.inner, self.write = torch.nn.Linear(6, 6), write
        self.register_buffer("table", torch.linspace(-1, 1, 6), persistent=False)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        self.write(self)
        return 0.3 * torch.tanh(self.inner(self.table * u)) + v


@pytest.mark.parametrize(
    ("write", "keeps"),
    [
        (lambda R: None, True),
        (lambda R: R.table.mul_(0.9), False),
        (lambda R: R.table.data.mul_(0.9), False),
        (lambda R: setattr(R, "table", 0.9 * R.table), False),
    ],
    ids=["kept", "in place", "by data", "assigned"],
)
def test_an_R_that_keeps_its_buffers_is_iterated_as_one_without_buffers(
    write: Any, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of rotary embeddings and causal masks kept R from fused steps, torch.compile and bf16 weights."""
    torch.manual_seed(0)
    net = ImplicitNetwork(
        torch.nn.Linear(4, 6), Turned(write), torch.nn.Linear(6, 6), tolerance=Tolerance(atol=1e-6)
    )
    reference, d, y = copy.deepcopy(net), torch.randn(5, 4), torch.arange(5)
    step = captured(net, torch.optim.SGD(net.parameters(), lr=0.1), monkeypatch)
    assert step.plan.own_loop.why == MAY_CHANGE
    torch.testing.assert_close(step(d, y), eager_step(reference, d, y))
    assert bool(step.plan.own_loop) is keeps
    for _ in range(2):
        torch.testing.assert_close(step(d, y), eager_step(reference, d, y))
    torch.testing.assert_close(net.R.table, reference.R.table)
    torch.testing.assert_close(net.R.inner.weight, reference.R.inner.weight)


def two_networks(**options: Any) -> tuple[Any, Any, Tensor]:
    """Return a network in eval mode, a copy of it, and its data."""
    net = conv_network(gamma=0.15, **options).double().eval()
    net.tolerance = Tolerance(atol=1e-9, max_steps=200)
    return net, copy.deepcopy(net), networks.images(6).double()


def eager_step(net: Any, d: Tensor, y: Tensor) -> Tensor:
    """Take a step of gradient descent at the rate 0.1, and return the loss."""
    loss = F.cross_entropy(net(d), y)
    for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
        p.data.sub_(0.1 * g)
    return loss.detach()


def test_a_step_is_planned_for_the_mode_that_the_network_has_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of dropout in R are drawn once per pass, also where the step was made in eval mode."""
    net, twin, d = two_networks(dropout=0.3)
    step = captured(net, torch.optim.SGD(net.parameters(), lr=0.1), monkeypatch)
    net.train()
    twin.train()
    y = torch.arange(6)
    step(d, y)  # the capture draws random numbers
    twin.load_state_dict(net.state_dict())
    for seed in range(2):
        torch.manual_seed(seed)
        eager_step(twin, d, y)
        torch.manual_seed(seed)
        step(d, y)
        assert step.reached is not None
        assert bool(step.reached.converged.all())
    torch.testing.assert_close([*net.parameters()], [*twin.parameters()])


class Drops(torch.nn.Module):
    """R with plain dropout: a layer or a function."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.3) if layer else torch.nn.Identity()
        self.linear, self.p = torch.nn.Linear(4, 4), 0.0 if layer else 0.3

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.3 * F.dropout(self.drop(self.linear(u)), self.p, self.training) + v


@pytest.mark.parametrize("layer", [True, False])
def test_plain_dropout_in_R_is_refused_as_by_the_network_itself(
    layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = ImplicitNetwork(torch.nn.Linear(4, 4), Drops(layer), torch.nn.Linear(4, 3))
    step = captured(net, torch.optim.SGD(net.parameters(), lr=0.1), monkeypatch)
    with (
        pytest.warns(UserWarning, match="runs eagerly"),
        pytest.raises(RuntimeError, match="no fixed point to find"),
    ):
        step(torch.randn(6, 4), torch.arange(6) % 3)


@pytest.mark.parametrize("inside", [False, True])
def test_a_captured_step_follows_the_settings_of_its_network(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the network is a part of a larger one, and where its weights move: replays read the old ones."""
    net, twin, d = two_networks(batch_norm=True)
    y, captures = torch.arange(6), 0
    capture = EagerGraphs.capture

    def counted(self: EagerGraphs, program: Any) -> Any:
        nonlocal captures
        captures += 1
        return capture(self, program)

    monkeypatch.setattr(EagerGraphs, "capture", counted)
    whole, sgd = torch.nn.Sequential(net) if inside else net, torch.optim.SGD(net.parameters(), lr=0.1)
    step = captured(whole, sgd, monkeypatch)

    def changed(net: Any, change: int) -> None:
        if change == 1:
            net.backward = Implicit(tolerance=Tolerance(atol=0, rtol=1e-12, max_steps=500))
        elif change == 2:
            net.train()
        elif change == 3:
            net.R.norm.eval()
        elif change == 4:
            net.tolerance = Tolerance(atol=1e-2)
        elif change == 5:
            net.Q.weight.data = net.Q.weight.data.clone()
        elif change == 6:
            net.R.gamma = 0.1

    for change in range(7):
        changed(net, change)
        changed(twin, change)
        for _ in range(2):
            torch.testing.assert_close(step(d, y), eager_step(twin, d, y))
        assert captures == change + 1
    torch.testing.assert_close(net.state_dict(), twin.state_dict())
    frozen = net.Q.weight.requires_grad_(False)
    before = frozen.clone()
    step(d, y)
    assert captures == 8
    assert torch.equal(frozen, before)


def test_parts_of_a_batch_in_bf16_add_their_gradients_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were added in bf16: of many small parts most digits were lost."""
    found = []
    for parts in (1, 64):
        torch.manual_seed(0)
        net = conv_network(gamma=0.15)
        simulate_gpu(monkeypatch, kernels=False)
        sgd = torch.optim.SGD(net.parameters(), lr=0.0)
        step = TrainStep(net, sgd, F.cross_entropy, bf16=True, extras=Extras(accumulate=parts))
        step(networks.images(64), torch.zeros(64, dtype=torch.int64))
        assert step.plan.bf16_weights
        found.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 4e-3


def test_outputs_in_a_nest_reach_the_loss_in_fp32() -> None:
    """A tensor did, and so do the tensors of a tuple or dict."""
    made: Any = at_least_fp32({"a": torch.ones(2).bfloat16(), "b": (torch.ones(2).half(), torch.arange(2), "c")})
    assert made["a"].dtype == made["b"][0].dtype == torch.float32
    assert made["b"][1].dtype == torch.int64


def test_extras_are_parts_of_a_step() -> None:
    """Accumulation, clipping and metrics, against a loop by hand in float64."""
    seen: list[int] = []

    class Metrics:
        def add(self, loss: Tensor, output: Tensor, targets: Tensor, found: Any) -> None:
            seen.append(len(targets))

    net = plain_network()
    reference, (d, y) = copy.deepcopy(net), batch()
    step = eagerly(net, 0.5, extras=Extras(accumulate=4, clip=0.1, metrics=Metrics()))
    expected = F.cross_entropy(reference(d), y)
    assert float(step(d, y)) == pytest.approx(float(expected.detach()), rel=1e-10)
    assert seen == [2, 2, 2]  # torch cuts 6 into 3 parts, not 4
    grads = torch.autograd.grad(expected, list(reference.parameters()))
    norm = torch.sqrt(sum(g.square().sum() for g in grads))  # type: ignore[arg-type]
    for p, before, g in zip(net.parameters(), reference.parameters(), grads, strict=True):
        torch.testing.assert_close(p, before - 0.5 * g * min(1.0, 0.1 / (float(norm) + 1e-6)))


def test_an_input_may_be_a_number() -> None:
    net = ImplicitNetwork(lambda d, scale: scale * d, lambda u, v: 0.5 * torch.tanh(u) + v, torch.nn.Linear(3, 2))
    step = eagerly(net)
    assert step((torch.randn(6, 3), torch.tensor(2.0)), torch.zeros(6, dtype=torch.int64)).isfinite()


def test_refusals() -> None:
    with pytest.raises(TypeError, match="TrainStep takes a network, got function"):
        TrainStep(batch, torch.optim.SGD(network().parameters(), lr=0.1), F.cross_entropy)  # type: ignore[arg-type]
    inputs: Any = [1.0]
    with pytest.raises(TypeError, match="takes a tensor of inputs, got a list"):
        eagerly(network())(inputs, torch.arange(1))
