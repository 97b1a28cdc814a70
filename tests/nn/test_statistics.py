"""Buffers of R: one update per pass, at the last forward evaluation, in every backward mode; none elsewhere."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import JFB, Implicit, ImplicitNetwork, Mode, Tolerance, Unroll
from banach.nn.layers import uses_batch_statistics
from banach.nn.passes import on_copies
from nn.parts_nn import MODES, TIGHT, NormR, close, gradients, network, normal, same, state


def by_hand(R: NormR, u: Tensor, v: Tensor) -> Tensor:
    """R in train mode, without a module that could write anywhere."""
    x = F.batch_norm(R.linear(u), None, None, R.norm.weight, R.norm.bias, training=True)
    return 0.4 * torch.tanh(x) + v


def last_point(R: NormR, mode: Mode, z: Tensor, v: Tensor) -> Tensor:
    """Where the last forward evaluation of the pass happens: z*, or the last iterate but one of Unroll."""
    if isinstance(mode, Unroll):
        for _ in range(mode.steps - 1):
            z = mode.damping * z + (1 - mode.damping) * by_hand(R, z, v)
    return z


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("mode", MODES)
def test_one_update_at_the_last_evaluation_and_none_in_backward(
    mode: str, momentum: float | None, grad: bool
) -> None:
    # Two steps are far from the fixed point, so that the point of the update shows.
    R = NormR(nn.BatchNorm1d(6, momentum=momentum))
    net = network(R, backward=MODES[mode], tolerance=Tolerance(atol=0, max_steps=2, check_every=0))
    with torch.no_grad():  # a history of its own: the third batch, statistics not at their start
        R.norm.running_mean.copy_(normal(6, seed=7))
        R.norm.num_batches_tracked.fill_(2)
    before = state(R.norm)
    d = normal(5, 4)
    with torch.set_grad_enabled(grad):
        u, found = net.latent(d)
    with torch.no_grad():
        x = R.linear(last_point(R, MODES[mode], found.value, net.Q(d)))
    weight = 1 / 3 if momentum is None else momentum
    mean = (1 - weight) * before["running_mean"] + weight * x.mean(0)
    var = (1 - weight) * before["running_var"] + weight * x.var(0)
    after = state(R.norm)
    assert torch.allclose(after["running_mean"], mean, rtol=0, atol=1e-13)
    assert torch.allclose(after["running_var"], var, rtol=0, atol=1e-13)
    assert int(after["num_batches_tracked"]) == 3
    if grad:
        u.square().sum().backward(retain_graph=True)
        u.square().sum().backward()
        assert same(state(R.norm), after)


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_requires_grad_gets_one_in_train_mode(mode: str) -> None:
    """Found as None, since the buffers of a train-mode R are copied."""
    R, d, slopes = NormR(), normal(5, 4), []
    for register in (R.norm.register_parameter, R.norm.register_buffer):
        del R.norm.weight
        register("weight", nn.Parameter(normal(6, seed=9)))
        loss = network(R, backward=MODES[mode])(d).square().sum()
        slopes.append(torch.autograd.grad(loss, [R.norm.weight, R.linear.weight]))
    assert slopes[0][0].any()
    assert all(map(torch.equal, *slopes))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_written_in_eval_mode(mode: str) -> None:
    net = network(NormR(), backward=MODES[mode]).eval()
    before = state(net)
    net(normal(5, 4)).sum().backward()
    assert same(state(net), before)


def test_spectral_norms_vectors_take_one_step_per_pass() -> None:
    R = NormR(nn.Identity())
    R.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6).double())
    own = R.linear.parametrizations.weight[0]
    own._v.copy_(F.normalize(normal(6, seed=1), dim=0))
    W, v = R.linear.parametrizations.weight.original.detach(), own._v.clone()
    net = network(R)
    for mode in MODES.values():
        net.backward = mode
        u, found = net.latent(normal(5, 4))
        assert bool(found.converged.all())  # one weight for the whole pass
        left = F.normalize(W @ v, dim=0)
        v = F.normalize(W.T @ left, dim=0)
        assert torch.allclose(own._u, left, atol=1e-12)
        assert torch.allclose(own._v, v, atol=1e-12)
        u.sum().backward()
        assert torch.allclose(own._v, v, atol=1e-12)


@pytest.mark.parametrize("in_place", [True, False])
def test_other_buffers_take_one_step_per_pass_too(in_place: bool) -> None:
    class Counter(NormR):
        seen: Tensor

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            self.seen = self.seen.add_(1) if in_place else self.seen + 1
            return super().forward(u, v)

    net = network(Counter())
    net.R.register_buffer("seen", torch.zeros(()))
    for passes in (1.0, 2.0):
        net(normal(5, 4))
        assert float(net.R.seen) == passes
    with torch.no_grad():
        net(normal(5, 4))
    assert float(net.R.seen) == 3.0


class Failing(NormR):
    calls, fail_at = 0, 10**9

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        value = super().forward(u, v)  # the statistics are written first
        self.calls += 1
        if self.calls >= self.fail_at:
            raise KeyboardInterrupt
        return value


@pytest.mark.parametrize("fail_at", [1, 3])
def test_an_exception_in_r_leaves_the_buffers_untouched(fail_at: int) -> None:
    R = Failing()
    R.fail_at = fail_at
    net = network(R)
    before, weight = state(net), R.norm.running_mean
    with pytest.raises(KeyboardInterrupt):
        net(normal(5, 4))
    assert same(state(net), before)
    assert R.norm.running_mean is weight  # the module has its own tensors back
    assert R.norm.track_running_stats
    R.fail_at = 10**9
    net(normal(5, 4))
    assert int(R.norm.num_batches_tracked) == 1


class Constants(NormR):
    """Buffers that never change, one with entries that share memory, and a batch norm that is frozen."""

    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.ones(1, dtype=torch.float64).expand(6))
        self.norm.eval()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return super().forward(u, v * self.place)


@pytest.mark.parametrize("mode", ["jfb", "neumann", "unroll", "implicit"])
def test_constant_buffers_in_train_mode_may_be_captured_and_may_share_memory(mode: str) -> None:
    net = network(Constants(), backward=MODES[mode])
    expected = gradients(net, net(normal(5, 4)).square().sum())

    def loss(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, p, (normal(5, 4),)).square().sum()

    got = torch.func.grad(loss)({name: p.detach() for name, p in net.named_parameters()})
    assert close(got, expected, atol=1e-11)
    with torch.inference_mode():
        net(normal(5, 4))


@pytest.mark.parametrize("mode", ["jfb", "neumann", "unroll", "implicit"])
def test_inside_functional_transforms(mode: str) -> None:
    """As in PyTorch itself, buffers that change are handed to the transformed function."""
    net = network(NormR(), backward=MODES[mode])
    plain = copy.deepcopy(net)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(p: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        buffers = state(net)
        return torch.func.functional_call(net, (p, buffers), (normal(5, 4),)).square().sum(), buffers

    got, buffers = torch.func.grad(loss, has_aux=True)(parameters)
    assert close(got, gradients(plain, plain(normal(5, 4)).square().sum()), atol=1e-11)
    assert same(buffers, state(plain))
    assert int(net.R.norm.num_batches_tracked) == 0


@pytest.mark.parametrize("mode", ["jfb", "implicit"])
def test_a_norm_of_two_names_is_updated_by_every_pass(mode: str) -> None:
    class Twice(NormR):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.norm

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            return 0.1 * torch.tanh(self.again(torch.sin(self.norm(self.linear(u))))) + v

    net = network(Twice(), backward=MODES[mode])
    for passes in (2, 4):  # each pass calls it twice
        sum(net(normal(5, 4, seed=seed)).sum() for seed in (1, 2)).backward()
        assert int(net.R.norm.num_batches_tracked) == 2 * passes


@pytest.mark.parametrize("mode", ["implicit", "checkpoint"])
def test_a_backward_pass_in_another_mode_leaves_a_norm_of_two_names_alone(mode: str) -> None:
    R = NormR()
    R.again = R.norm
    net = network(R, backward=Implicit() if mode == "implicit" else Unroll(2, checkpoint=True))
    first = net(normal(5, 4)).sum()
    net(normal(5, 4))
    before, kept = state(net), R.norm.running_mean
    net.eval()
    first.backward()
    assert same(state(net), before)
    assert R.norm.running_mean is kept


@pytest.mark.parametrize(
    "mode", [JFB(), Unroll(2, checkpoint=True), Implicit()], ids=lambda mode: type(mode).__name__
)
def test_norms_that_share_their_statistics_update_them_once_each(mode: Any) -> None:
    R = NormR()
    R.linear = nn.Sequential(R.linear, nn.BatchNorm1d(R.linear.out_features).double())
    R.linear[1]._buffers.update(R.norm._buffers)
    net = network(R, backward=mode)
    net(normal(5, 4)).sum().backward()
    assert int(R.norm.num_batches_tracked) == 2


def test_a_norm_without_statistics_stays_without_them() -> None:
    R = NormR()
    R.linear = nn.Sequential(R.linear, nn.BatchNorm1d(R.linear.out_features, track_running_stats=False).double())
    net = network(R)
    net(normal(5, 4)).sum().backward()
    assert not R.linear[1].track_running_stats
    assert R.norm.track_running_stats
    assert int(R.norm.num_batches_tracked) == 1


class Outer(nn.Module):
    """R(u, v) = 0.1 tanh(inner(u + v)) + v, where inner is a network."""

    def __init__(self, backward: Mode = JFB()) -> None:
        super().__init__()
        parts = nn.Identity(), NormR(), nn.Identity()
        self.inner = ImplicitNetwork(*parts, tolerance=TIGHT, backward=backward)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.1 * torch.tanh(self.inner(u + v)) + v


def test_a_network_inside_r() -> None:
    net = network(Outer(), coupled=True)
    y, found = net(normal(5, 4), solution=True)
    assert bool(found.converged.all())
    norm = net.R.inner.R.norm
    assert int(norm.num_batches_tracked) == 1
    with torch.no_grad():
        w, _ = copy.deepcopy(net.R.inner).latent(found.value + net.Q(normal(5, 4)))
        expected = 0.1 * net.R.inner.R.linear(w).mean(0)
    assert torch.allclose(norm.running_mean, expected, atol=1e-11)
    y.sum().backward()
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.filterwarnings("ignore::banach.ConvergenceWarning")
@pytest.mark.parametrize("mode", ["jfb", "implicit"])
def test_a_network_inside_r_called_twice_before_the_backward_pass(mode: str) -> None:
    net = network(Outer(MODES[mode]), coupled=True)
    norm = net.R.inner.R.norm
    own, losses = norm.running_mean, [net(normal(5, 4, seed=seed)).sum() for seed in (1, 2)]
    before = state(net)
    sum(losses).backward()
    assert norm.running_mean is own
    assert same(state(net), before)
    assert int(norm.num_batches_tracked) == 2


@pytest.mark.parametrize("mode", ["jfb", "implicit"])
def test_a_backward_pass_leaves_the_buffers_that_it_finds(mode: str) -> None:
    net = network(NormR(), backward=MODES[mode])
    own, given = net.R.norm.running_mean, {name: part.clone() for name, part in net.named_buffers()}
    torch.func.functional_call(net, given, (normal(5, 4),)).sum().backward()
    assert net.R.norm.running_mean is own
    assert int(net.R.norm.num_batches_tracked) == 0
    loss = net(normal(5, 4)).sum()
    net.R.norm.running_mean = assigned = torch.ones_like(own)
    loss.backward()
    assert net.R.norm.running_mean is assigned


def test_r_may_register_a_buffer_at_its_first_evaluation() -> None:
    class Lazy(NormR):
        factor: Tensor
        places: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.tensor(0.5, dtype=torch.float64))

        def forward(self, u: Tensor, v: Tensor) -> Tensor:
            if not hasattr(self, "places"):
                self.register_buffer("places", torch.full((6,), 0.1, dtype=torch.float64))
            return self.factor * super().forward(u, v) + self.places

    assert bool(network(Lazy())(normal(5, 4), solution=True)[1].converged.all())


def positions(length: int) -> Tensor:
    return torch.cos(torch.arange(length, dtype=torch.float64))[:, None].expand(-1, 6).clone()


class Places(nn.Module):
    """R with a table of positions, long enough from the start, or a buffer that grows with the sequence."""

    table: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind, self.known, self.linear = kind, 2, nn.Linear(6, 6).double()
        if kind == "long":
            self.table = positions(9)
        elif kind != "registered":
            two = positions(2)
            for name in {"shared": ("table", "first"), "shared before": ("first", "table")}.get(kind, ("table",)):
                self.register_buffer(name, two, persistent=False)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        length = u.shape[1]
        if self.kind != "long" and (length > self.known or not hasattr(self, "table")):
            self.known = length
            if self.kind == "registered":
                self.register_buffer("table", positions(length), persistent=False)
            else:
                self.table = positions(length)
        return 0.4 * torch.tanh(self.linear(u) + self.table[:length]) + v


@pytest.mark.parametrize("kind", ["assigned", "registered", "shared", "shared before"])
@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_may_grow_with_the_sequence(mode: str, kind: str) -> None:
    """As rotary embeddings do. R got its old table back after every evaluation, and sizes did not match."""
    nets = [network(Places(one), backward=MODES[mode]) for one in ("long", kind)]
    found = []
    for net in nets:
        values = [net(normal(2, length, 4, seed=length)) for length in (6, 9, 4)]
        found.append(gradients(net, sum((y.square().sum() for y in values), values[0].new_zeros(()))))
    assert close(found[0], found[1], atol=1e-12)
    assert torch.equal(nets[1].R.table, positions(9))
    assert "shared" not in kind or torch.equal(nets[1].R.first, positions(2))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "checkpoint"])  # torch.func takes none
def test_a_buffer_that_grows_inside_of_torch_func_is_a_plain_tensor_afterwards(mode: str) -> None:
    """Found as a wrapper of torch.func that stayed in the module and could not be saved."""
    net, d = network(Places("assigned"), backward=MODES[mode]), normal(2, 6, 4)
    weights = dict(net.named_parameters())
    got = torch.func.grad(lambda w: torch.func.functional_call(net, w, (d,)).square().sum())(weights)
    assert torch.equal(pickle.loads(pickle.dumps(net.R.table)), positions(6))
    wanted = gradients(net, net(d).square().sum())
    assert close(dict(got), {name: wanted[name] for name in got}, atol=1e-12)


def test_measuring_lets_no_buffer_grow() -> None:
    """`on_copies`, by which penalties and diagnoses call a part of a network, leaves its buffers as they are."""
    R, u, v = Places("assigned"), normal(2, 6, 6), normal(2, 6, 6, seed=1)
    assert torch.equal(on_copies(R, u, v), Places("long")(u, v))
    assert torch.equal(R.table, positions(2))


COUPLES: list[tuple[Any, bool]] = [
    (nn.BatchNorm2d(3), True),
    (nn.BatchNorm2d(3).eval(), False),
    (nn.SyncBatchNorm(3), True),
    (nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3))), True),
    (nn.BatchNorm1d(3, track_running_stats=False).eval(), True),
    (nn.Sequential(nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.InstanceNorm1d(3, track_running_stats=True)), False),
    (lambda u, v: u, False),
]


@pytest.mark.parametrize(("R", "couples"), COUPLES)
def test_what_couples_the_batch(R: Any, couples: bool) -> None:
    assert uses_batch_statistics(R) is couples


# JFB evaluates R once: batch norm writes to its own buffers, which the iteration does not see.


class Functional(NormR):
    """Its norm is not called: F.batch_norm writes to what that has."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        norm, x = self.norm, self.linear(u)
        x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)
        return 0.4 * torch.tanh(x) + v


def test_nobody_else_writes_to_statistics_during_the_iteration() -> None:
    called, written = network(NormR()), network(Functional())
    written.load_state_dict(called.state_dict())
    for net in (called, written):
        net(normal(5, 4)).sum().backward()
    for name in ("running_mean", "running_var"):
        assert torch.allclose(getattr(called.R.norm, name), getattr(written.R.norm, name), rtol=0, atol=1e-13)


def test_statistics_may_be_reset_before_the_backward_pass() -> None:
    net, d = network(NormR()), normal(5, 4)
    wanted = gradients(net, net(d).square().sum())
    loss = net(d).square().sum()
    net.R.norm.reset_running_stats()
    assert close(gradients(net, loss), wanted, atol=1e-13)


def test_a_network_made_in_inference_mode_is_called_without_gradients() -> None:
    with torch.inference_mode():
        net = network(NormR())
    with torch.no_grad():
        assert torch.equal(net(normal(5, 4)), network(NormR())(normal(5, 4)))


class InTurns(NormR):
    """R of which two threads, "first" and "second", hide and show the statistics in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.events = {name: threading.Event() for name in ("first is in", "second is in", "first is done")}
        self.barrier = threading.Barrier(2)

    def started(self, v: Tensor) -> Tensor:
        """Return z0, when both passes have begun; in the second thread when the first is inside R."""
        self.barrier.wait(30)
        if threading.current_thread().name == "second":
            self.events["first is in"].wait(30)
        return torch.zeros_like(v)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        first = threading.current_thread().name == "first"
        self.events["first is in" if first else "second is in"].set()
        self.events["second is in" if first else "first is done"].wait(30)
        return super().forward(u, v)


def test_threads_that_share_a_network_do_not_lose_its_statistics() -> None:
    """They must not, but if they do, the buffers must still be there."""
    R = InTurns()
    net = ImplicitNetwork(nn.Identity(), R, nn.Identity(), start=R.started, tolerance=Tolerance(atol=1e-3))
    names = net.state_dict().keys()

    def work() -> None:
        net(normal(5, 6))
        R.events["first is done"].set()

    threads = [threading.Thread(target=work, name=name) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert net.state_dict().keys() == names
