"""On a GPU: captured steps against eager ones, in fp32 and bf16; what cannot be captured does no harm."""

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import banach
from banach import (
    JFB,
    Anderson,
    Broyden,
    ConvergenceWarning,
    Implicit,
    ImplicitNetwork,
    Neumann,
    NormalCG,
    Picard,
    Tolerance,
    WorstPixel,
    fixed_point,
    models,
)
from banach.fast import TrainStep, unchanged
from banach.fast.capture import Graphs, Recording
from banach.fast.step import Extras
from train.parts_train import plain_network

pytestmark = [
    pytest.mark.gpu,
    # Torch's own, when it compiles.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # of Dynamo, at v
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning"),
]
CUDA = torch.device("cuda", 0)
SHAPES = {"mnist": (1, 28, 28), "svhn": (3, 32, 32), "cifar10": (3, 32, 32), "own": (1, 8, 8)}


@pytest.fixture(autouse=True)
def true_fp32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def network(name: str, eps: float) -> Any:
    """Without dropout, whose masks would differ; `own`: an R that no kernel knows."""
    torch.manual_seed(0)
    if name == "own":
        return plain_network(Tolerance(atol=eps, max_steps=100)).cuda().train()
    net: Any = models.build(name, tolerance=Tolerance(atol=eps, max_steps=100, norm=WorstPixel()))
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return net.cuda().to(memory_format=torch.channels_last).train()


def gradients(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in net.parameters() if p.grad is not None])


def plainly(net: Any, d: Tensor, y: Tensor, *, bf16: bool) -> tuple[float, Tensor]:
    net = copy.deepcopy(net)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        output = net(d)
    loss = F.cross_entropy(output.to(torch.promote_types(output.dtype, torch.float32)), y)
    loss.backward()
    return float(loss.detach()), gradients(net)


def captured(net: Any, d: Tensor, y: Tensor, *, bf16: bool, compile: bool) -> tuple[float, Tensor]:
    net = copy.deepcopy(net)
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.0), F.cross_entropy, bf16=bf16, compile=compile)
    for _ in range(3):  # the last one is a replay
        loss = float(step(d, y))
    assert step.reached is not None
    assert bool(step.reached.converged.all())
    return loss, gradients(net)


@pytest.mark.parametrize("compile", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_a_captured_step_has_the_gradients_of_a_plain_one(name: str, bf16: bool, compile: bool) -> None:
    """In fp32 they are equal to rounding; in bf16 they err from fp32 by no more than plain bf16 does."""
    net = network(name, 1e-1 if bf16 else 1e-4)
    draw = torch.Generator("cuda").manual_seed(1)
    d = torch.randn(32, *SHAPES[name], generator=draw, device="cuda", dtype=next(net.parameters()).dtype)
    y = torch.randint(10, (32,), generator=draw, device="cuda")
    exact_loss, exact = plainly(net, d, y, bf16=False)
    loss, found = captured(net, d, y, bf16=bf16, compile=compile)
    error = float((found - exact).norm() / exact.norm())
    if not bf16:
        assert loss == pytest.approx(exact_loss, rel=1e-5)
        assert error < 2e-3
        return
    plain_loss, plain = plainly(net, d, y, bf16=True)
    usual = float((plain - exact).norm() / exact.norm())
    assert loss == pytest.approx(exact_loss, rel=max(2e-2, 2 * abs(plain_loss / exact_loss - 1)))
    assert error < max(1.5 * usual, 5e-2)


def batch(number: int, count: int = 16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(number)
    d = torch.randn(count, 1, 8, 8, generator=draw, device="cuda", dtype=torch.float64)
    return d, torch.randint(10, (count,), generator=draw, device="cuda")


def eager(net: Any, optimizer: torch.optim.Optimizer, d: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(d), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def own_network(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    net: Any = plain_network(Tolerance(atol=1e-10, max_steps=200), **options).cuda().train()
    if dtype == torch.float32:
        net.Q[0] = torch.nn.Identity()  # which makes the data float64
    return net.to(dtype)


METHODS = {
    "cg": {"backward": Implicit(NormalCG())},
    "adjoint by Picard": {"backward": Implicit(Picard())},
    "adjoint by Anderson": {"backward": Implicit(Anderson(4))},
    "neumann": {"backward": Neumann(3)},
    "anderson": {"solver": Anderson(4)},
    "broyden": {"solver": Broyden(4)},
    "damped": {"solver": Picard(0.3)},
}


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loops_of_solvers_and_adjoints_are_captured(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Every sample takes the steps that it takes eagerly; the losses and weights are those of eager steps."""
    net = own_network(dtype, **options)
    net.tolerance = Tolerance(atol=1e-10 if dtype == torch.float64 else 1e-5, max_steps=200)
    reference = copy.deepcopy(net)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), F.cross_entropy)
    for k in range(5):
        d, y = batch(k)
        found = reference(d.to(dtype), solution=True)[1]
        loss = float(step(d.to(dtype), y))
        assert loss == pytest.approx(
            eager(reference, plain, d.to(dtype), y), rel=1e-9 if dtype == torch.float64 else 1e-4
        )
        assert step.reached is not None
        difference = (step.reached.steps - found.steps).abs().max()
        assert int(difference) <= (0 if dtype == torch.float64 else 1)
    assert step.reason is None
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if dtype == torch.float64 else 1e-3, atol=1e-6)


def captured_steps(net: Any, d: Tensor) -> Tensor:
    """Return the steps that samples take. A captured step takes the same, and has the loss of the network."""
    y = torch.zeros(len(d), dtype=torch.long, device="cuda")
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.0), F.cross_entropy)
    losses = [float(step(d, y)) for _ in range(3)]
    with torch.no_grad():
        output, found = net(d, solution=True)
    assert step.reason is None
    assert losses == pytest.approx([float(F.cross_entropy(output, y))] * 3, rel=1e-4)
    assert step.reached is not None
    assert int((step.reached.steps - found.steps).abs().max()) <= 1
    return found.steps


@pytest.mark.parametrize("solver", [Picard(), Anderson(4)])
def test_a_large_batch_is_halved(solver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banach.fast.iteration.LARGE", 1)
    net = own_network(torch.float32, solver=solver)
    net.tolerance = Tolerance(atol=1e-5, max_steps=100)
    d = torch.linspace(0.1, 4, 64, device="cuda").view(-1, 1, 1, 1) * torch.randn(64, 1, 8, 8, device="cuda")
    assert len(set(captured_steps(net, d).tolist())) > 1


class Dropping(torch.nn.Module):
    """R with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(32, 32), banach.nn.Dropout(0.5)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.4 * torch.tanh(self.drop(self.layer(u)) + v)


@pytest.mark.parametrize("compile", [False, True])
def test_dropout_in_r_has_one_mask_per_captured_step(compile: bool) -> None:
    """With one mask the iteration converges; with new ones at every evaluation it would not."""
    torch.manual_seed(0)
    net = ImplicitNetwork(torch.nn.Linear(4, 32), Dropping(), torch.nn.Linear(32, 3)).cuda().train()
    net.tolerance = Tolerance(atol=1e-6, max_steps=60)
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.0), F.cross_entropy, compile=compile)
    d, y = torch.randn(64, 4, device="cuda"), torch.randint(3, (64,), device="cuda")
    losses = []
    for _ in range(4):
        losses.append(float(step(d, y)))
        assert step.reason is None
        assert step.plan.own_loop
        assert step.reached is not None
        assert bool(step.reached.converged.all())
    assert len(set(losses)) == 4  # other masks in every step


class Nested(torch.nn.Module):
    """R whose value is a fixed point itself: w = 0.5 tanh(w + u) + v / 4."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        u = torch.tanh(self.layer(u)) / 2
        return fixed_point(lambda w, u, v: 0.5 * torch.tanh(w + u) + v / 4, v, inputs=(u, v))


def test_a_loop_in_a_loop() -> None:
    torch.manual_seed(0)
    net = ImplicitNetwork(torch.nn.Linear(4, 8), Nested(), torch.nn.Linear(8, 3)).cuda()
    net.tolerance = Tolerance(atol=1e-6, max_steps=60)
    d = torch.linspace(0.1, 4, 16, device="cuda")[:, None] * torch.randn(16, 4, device="cuda")
    captured_steps(net, d)


@pytest.mark.parametrize("solver", [Picard(), Anderson(4)])
def test_predictions_loop_on_the_device(solver: Any) -> None:
    """Also where samples do not converge."""
    net = own_network(solver=solver).eval()
    for most in (200, 3):
        net.tolerance = Tolerance(atol=1e-10, max_steps=most)
        fast = banach.compile(net)
        for count in (1, 5, 64):
            d = torch.randn(count, 1, 8, 8, device="cuda", dtype=torch.float64)
            y, found = fast(d, solution=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                own, wanted = net(d, solution=True)
            torch.testing.assert_close(y, own)
            assert torch.equal(found.steps, wanted.steps)
            assert torch.equal(found.converged, wanted.converged)


class Syncing(torch.nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y * float(y.detach().abs().max().item() < 1e9)


def test_a_network_with_a_host_sync_runs_eagerly_after_one_warning() -> None:
    net = own_network()
    net.S = torch.nn.Sequential(net.S, Syncing())
    reference = copy.deepcopy(net)
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), F.cross_entropy)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="could not be captured as a CUDA graph and runs eagerly"):
        losses = [float(step(*batch(0)))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses += [float(step(*batch(k))) for k in range(1, 5)]
    assert losses == pytest.approx([eager(reference, plain, *batch(k)) for k in range(5)], rel=1e-9)
    draws = F.dropout(torch.ones(1000, device="cuda"))  # the failed capture left nothing behind
    assert 300 < int(draws.count_nonzero()) < 700


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_scheduler_is_followed_by_a_captured_step(kind: Any) -> None:
    net = own_network()
    reference = copy.deepcopy(net)
    made, plain = (
        kind(net.parameters(), lr=0.05, capturable=True, fused=True),
        kind(reference.parameters(), lr=0.05),
    )
    rates = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (made, plain)]
    step = TrainStep(net, made, F.cross_entropy)
    for k in range(8):
        loss, expected = float(step(*batch(k))), eager(reference, plain, *batch(k))
        assert loss == pytest.approx(expected, rel=1e-7)
        for rate in rates:
            rate.step()
    assert step.reason is None
    assert float(made.param_groups[0]["lr"]) == pytest.approx(0.05 * 0.5**8)
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_settings_that_change_are_captured_again() -> None:
    net = own_network()
    reference = copy.deepcopy(net)
    made, plain = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, reference))
    step = TrainStep(net, made, F.cross_entropy)
    for k in range(6):
        for one in (net, reference):
            one.backward = JFB() if k < 2 else Implicit()
            next(one.Q.parameters()).requires_grad_(k < 4)
        assert float(step(*batch(k))) == pytest.approx(eager(reference, plain, *batch(k)), rel=1e-7)
    assert step.reason is None
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def load(net: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def add(net: Any, optimizer: torch.optim.Optimizer) -> None:
    net.R.requires_grad_(True)
    optimizer.add_param_group({"params": list(net.R.parameters()), "lr": torch.tensor(0.1)})


def thaw(net: Any, optimizer: torch.optim.Optimizer) -> None:
    net.Q.requires_grad_(True)


@pytest.mark.parametrize("change", [load, add, thaw])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_changes_of_the_optimizer_are_captured_again(kind: Any, change: Any) -> None:
    """Also with rates that are tensors on the CPU at first."""
    if kind is torch.optim.SGD and change is thaw:
        pytest.skip("fused SGD itself fails where some weights of a group have no momentum yet")
    net = own_network()
    net.Q.requires_grad_(False)
    net.R.requires_grad_(False)
    reference = copy.deepcopy(net)
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {"capturable": True}
    made, plain = (
        kind([*one.Q.parameters(), *one.S.parameters()], lr=torch.tensor(0.05), fused=True, **options)
        for one in (net, reference)
    )
    step = TrainStep(net, made, F.cross_entropy)
    for k in range(6):
        if k == 3:
            change(net, made)
            change(reference, plain)
            assert step.outdated
        assert float(step(*batch(k))) == pytest.approx(eager(reference, plain, *batch(k)), rel=1e-7)
    assert step.reason is None
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_parts_of_a_batch_in_bf16_add_their_gradients_in_fp32() -> None:
    found = []
    for parts in (1, 64):
        net, (d, y) = own_network(torch.float32), batch(0, 64)
        sgd = torch.optim.SGD(net.parameters(), lr=0.0)
        step = TrainStep(net, sgd, F.cross_entropy, bf16=True, extras=Extras(accumulate=parts, clip=1e6))
        for _ in range(3):
            step(d.float(), y)
        assert step.plan.bf16_weights
        assert step.reason is None
        assert all(p.grad.dtype == torch.float32 for p in net.parameters())
        found.append(gradients(net))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-2


@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_of_other_weights_may_be_dropped(bf16: bool) -> None:
    """Replays wrote to the memory of gradients of the warm-up, of weights that the optimizer lacks."""
    net, (d, y) = own_network(torch.float32), batch(0)
    step = TrainStep(net, torch.optim.SGD(net.S.parameters(), lr=0.0), F.cross_entropy, bf16=bf16)
    losses, weights = [float(step(d.float(), y))], [*net.Q.parameters(), *net.R.parameters()]
    first = gradients(net)
    for _ in range(3):
        losses.append(float(step(d.float(), y)))
        torch.testing.assert_close(gradients(net), first, rtol=1e-4, atol=1e-6)
    sizes = [p.numel() for p in weights]
    net.zero_grad()
    torch.cuda.empty_cache()
    instead = [torch.zeros(size, device="cuda") for size in sizes for _ in range(100)]
    losses += [float(step(d.float(), y)) for _ in range(3)]
    assert not any(bool(one.any()) for one in instead)
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)
    assert step.reason is None


# A program that cannot be captured is refused, and nothing else is harmed by the attempt.


def dropped() -> torch.Tensor:
    return F.dropout(torch.ones(1000, device=CUDA), 0.5)


def fill(out: torch.Tensor) -> None:
    out.copy_(dropped())


def asks() -> None:
    dropped().sum().item()


def waits() -> None:
    dropped()
    torch.cuda.synchronize()


def recorded(program: Callable[[], None]) -> Recording:
    graphs = Graphs(CUDA)
    graphs.warm_up(program)
    return graphs.capture(program)


@pytest.mark.parametrize("breaks", [asks, waits])
def test_after_one_that_breaks_off_random_numbers_and_captures_go_on(breaks: Callable[[], None]) -> None:
    graphs, out, before = Graphs(CUDA), torch.zeros(1000, device=CUDA), torch.cuda.current_stream()
    earlier = recorded(lambda: fill(out))
    for _ in range(2):
        graphs.warm_up(breaks)
        with pytest.raises(RuntimeError):
            graphs.capture(breaks)
    assert torch.cuda.current_stream() == before
    assert 300 < int(dropped().count_nonzero()) < 700
    graphs.warm_up(lambda: fill(out))
    later, seen = graphs.capture(lambda: fill(out)), set()
    for graph in (earlier, later, earlier, later):  # they draw new numbers at every replay
        graph.replay()
        assert 300 < int(out.count_nonzero()) < 700
        seen.add(tuple(out.tolist()))
    assert len(seen) == 4


def test_what_a_warm_up_did_can_be_put_back_when_it_fails() -> None:
    """Its work is waited for, also that before the failure."""
    x = torch.zeros(1 << 24, device=CUDA)

    def fails() -> None:
        for _ in range(200):
            x.add_(1)
        raise ValueError

    for _ in range(3):
        with pytest.raises(ValueError), unchanged([x]):  # noqa: PT011
            Graphs(CUDA).warm_up(fails)
        assert float(x.abs().max()) == 0


def test_old_graphs_that_are_garbage_do_not_break_a_capture() -> None:
    """The collector would throw them away in the midst of it, which CUDA does not allow."""
    out, graphs, before = torch.zeros(1000, device=CUDA), Graphs(CUDA), gc.get_threshold()

    def busy() -> None:
        assert [[number] for number in range(1000)]  # objects that the collector counts
        fill(out)

    graphs.warm_up(busy)
    gc.disable()  # the garbage shall be young
    for _ in range(3):
        cycle: list[object] = [recorded(lambda: fill(out))]
        cycle.append(cycle)
    del cycle
    gc.set_threshold(gc.get_count()[0] + 300, *before[1:])  # reached by the program, not on the way to it
    gc.enable()
    try:
        graph = graphs.capture(busy)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
    out.zero_()
    graph.replay()
    assert 300 < int(out.count_nonzero()) < 700
