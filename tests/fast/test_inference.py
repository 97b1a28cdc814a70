"""compile(net) answers as the network does, sample by sample, also where samples diverge; what it refuses."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import banach
from banach import (
    JFB,
    Anderson,
    Broyden,
    ConvergenceWarning,
    ImplicitNetwork,
    Neumann,
    Picard,
    Solution,
    Status,
    Tolerance,
    Unroll,
    models,
)
from banach.fast.capture import pad_batch
from banach.models.mdeq import Sizes, multiscale
from banach.train import Scorer
from fast.simulated import PLAN, EagerCalls, images, simulate_gpu

SLOPES = (
    torch.tensor([0.1, 0.5, 0.9, 0.95, 0.3, -0.6, 0.0], dtype=torch.float64)[:, None].expand(-1, 3).contiguous()
)
TIGHT, RELATIVE = Tolerance(atol=1e-8, max_steps=1000), Tolerance(atol=0, rtol=1e-3, max_steps=500)
Map = Callable[[Any, Any], Any]


def slope(u: Tensor, v: Tensor) -> Tensor:
    """T(u) = s u + 1 with a slope of the sample's own: u* = 1 / (1 - s)."""
    return v * u + 1


def halves(u: Any, v: Any) -> Any:
    return 0.5 * u + v


class Applied(nn.Module):
    """R as a module, which a plan takes apart, unlike a function."""

    def __init__(self, function: Map) -> None:
        super().__init__()
        self.function = function

    def forward(self, u: Any, v: Any) -> Any:
        return self.function(u, v)


def network(R: Map = slope, Q: Any = nn.Identity(), S: Any = nn.Identity(), **options: Any) -> ImplicitNetwork:
    return ImplicitNetwork(Q, Applied(R), S, **options).eval()


def check_same(net: ImplicitNetwork, d: Tensor, z0: Any = None, fast: Any = None) -> tuple[Any, Solution]:
    """Return the answer of compile(net), which is the network's own, and no less converged."""
    y, found = (fast or banach.compile(net))(d, z0=z0, solution=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        own, wanted = net(d, z0=z0, solution=True)
    torch.testing.assert_close(y, own, equal_nan=True)
    for name in ("value", "residual", "converged", "steps", "nonfinite"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), check_dtype=False, msg=name)
    assert found.status == wanted.status
    return y, found


@pytest.fixture(params=["CPU", "simulated GPU", "simulated kernels"])
def device(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test three times; on a simulated GPU graphs are captured, as programs that run eagerly."""
    if request.param != "CPU":
        simulate_gpu(monkeypatch, kernels=request.param == "simulated kernels")
        monkeypatch.setattr("banach.fast.iteration.LARGE", 1)
        monkeypatch.setattr(PLAN, "LONGEST", 0)  # Anderson's kernels are not simulated


SOLVERS, LOOSE = (Picard(), Picard(damping=0.25), Anderson(3), Broyden(4)), Tolerance(atol=0.07)
MODES = (JFB(), Neumann(3), Unroll(3), Unroll(2, damping=0.5))
OPTIONS: dict[str, dict[str, Any]] = {
    **{str(solver): {"solver": solver, "tolerance": TIGHT} for solver in SOLVERS},
    **{str(mode): {"backward": mode, "tolerance": LOOSE} for mode in MODES},
    "explicit twin": {"tolerance": Tolerance(max_steps=0)},
    "explicit twin, Anderson": {"solver": Anderson(3), "tolerance": Tolerance(max_steps=0)},
    "few steps": {"tolerance": Tolerance(atol=1e-12, max_steps=10)},
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_sample_takes_its_own_steps(name: str) -> None:
    y, _ = check_same(network(**OPTIONS[name]), SLOPES)
    if OPTIONS[name]["tolerance"] == TIGHT:
        torch.testing.assert_close(y, 1 / (1 - SLOPES), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("device")
def test_alone_and_in_a_batch_it_is_the_same_answer() -> None:
    fast = banach.compile(network(tolerance=Tolerance(atol=1e-6, max_steps=200)))
    together, found = fast(SLOPES, solution=True)
    for i in range(len(SLOPES)):
        alone, own = fast(SLOPES[i : i + 1], solution=True)
        assert torch.equal(alone[0], together[i])
        assert int(own.steps) == int(found.steps[i])


@pytest.mark.usefixtures("device")
def test_a_start_and_later_settings_are_used() -> None:
    net = network(tolerance=Tolerance(atol=1e-2, max_steps=500))
    fast = banach.compile(net)
    fast(SLOPES)
    for name, value in {"tolerance": TIGHT, "solver": Anderson(3)}.items():
        setattr(net, name, value)
        found = fast(SLOPES, solution=True)[1]
        assert torch.equal(found.steps, net(SLOPES, solution=True)[1].steps)
    warm = fast(SLOPES, z0=found.value, solution=True)[1]
    assert int(warm.steps.max()) <= 2 < int(found.steps.max())
    net.S = nn.Hardtanh(0, 0.5).eval()
    assert torch.equal(fast(SLOPES), net(SLOPES))


def test_few_steps_warn_at_the_users_line_and_a_fixed_depth_does_not() -> None:
    net = network(tolerance=Tolerance(max_steps=9))
    fast, d = banach.compile(net), torch.full((2, 3), 1.5)
    with pytest.warns(ConvergenceWarning, match="stopped at max_steps above the tolerance; pass") as caught:
        fast(d)
    assert caught[0].filename == __file__
    for net.tolerance in (Tolerance(max_steps=9, check_every=0), Tolerance(max_steps=0)):
        fast(d)


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_real_networks_answer_as_they_do_and_changed_weights_are_seen(name: str) -> None:
    torch.manual_seed(0)
    net: Any = models.build(name, tolerance=Tolerance(atol=1e-10, max_steps=500)).double().eval()
    fast, d = banach.compile(net), torch.randn(5, *models.get(name).image, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(fast(d), net(d), rtol=1e-7, atol=1e-8)
        with torch.no_grad():
            net.S.linear.weight.mul_(2)
    assert not fast(d).requires_grad


class Moves(nn.Linear):
    """Q moves its input to the device of its weights."""

    def forward(self, d: Tensor) -> Tensor:
        return super().forward(torch.ones_like(d, device="cpu"))


@pytest.mark.usefixtures("device")
def test_inputs_may_be_on_another_device() -> None:
    """Autocast was that of the inputs' device, so that weights in bf16 met inputs in fp32: an error."""
    net = network(lambda u, v: 0.5 * torch.tanh(u) + v, Moves(3, 3), nn.Linear(3, 2))
    fast = banach.compile(net, bf16=True)
    assert bool(fast.plan.bf16_weights) is bool(fast.plan.graph)
    for _ in range(2):
        y = fast(torch.ones(4, 3, device="meta"))
        torch.testing.assert_close(y.float(), net(torch.ones(4, 3)), rtol=2e-2, atol=2e-2)
        with torch.no_grad():
            net.S.weight.mul_(2)  # the next prediction casts it again


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 4), (64, 64), (65, 128)])
def test_a_batch_is_filled_up_and_stays_in_channels_last(count: int, size: int) -> None:
    x = torch.randn(count, 2, 3, 4).to(memory_format=torch.channels_last)
    padded = pad_batch(x, size)
    assert padded.shape == (size, 2, 3, 4)
    assert padded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(padded[:count], x)
    assert torch.equal(padded[count:], x[:1].expand(size - count, 2, 3, 4))


# What it does not take. The network itself takes all of these.

D = torch.ones(2, 3, 4)
REFUSED = {
    r"Q\(d\) .* a row for each of 2 .* shape \(3, 4\)": network(
        lambda u, v: halves(u, v[0] + v[1]), lambda d: (d, d[0]), start=lambda v: torch.zeros_like(v[0])
    ),
    r"the latent .* a row .* shape \(\)": network(
        lambda u, v: (halves(u[0], v), u[1]), S=lambda u: u[0], start=lambda v: (v, v.new_zeros(()))
    ),
    r"Q\(d\) .* a row .* shape \(6, 4\)": network(halves, lambda d: d.flatten(0, 1)),
    r"S\(u\) .* must be a tensor or .* dict of tensors, got float": network(halves, S=lambda u: (u, 1.0)),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("words", REFUSED)
def test_parts_that_are_no_tensor_with_a_row_for_every_sample_are_refused(words: str) -> None:
    net = REFUSED[words]
    net(D)
    with pytest.raises((TypeError, ValueError), match=words):
        banach.compile(net)(D)


def test_what_is_no_network_or_no_latent_is_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"compile takes an ImplicitNetwork .* got Linear"):
        banach.compile(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="whose inputs are tensors, got dict"):
        banach.compile(network(halves, lambda d: d["x"]))({"x": D})
    with pytest.raises(ValueError, match="coupled=True"):
        banach.compile(network(coupled=True))
    net = network()
    compiled = banach.compile(net)
    net.coupled = True  # later
    with pytest.raises(ValueError, match="whose samples stop one by one"):
        compiled(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=r"net\.eval\(\)"):
        banach.compile(network().train())(torch.ones(2, 3))
    fast, d = banach.compile(network(halves)), torch.ones(2, 3)
    with pytest.raises(TypeError, match="z0 of a compiled network must be a tensor or a tuple"):
        fast(d, z0=fast(d, solution=True)[1])
    with pytest.raises(
        ValueError, match=r"z0 of a compiled network must have a row for each of 2 .* shape \(3,\)"
    ):
        fast(d, z0=(d, d[0]))
    with pytest.raises(TypeError, match="0-d tensor"):
        fast(torch.tensor(1.0))


@pytest.mark.usefixtures("device")
def test_an_empty_batch_has_an_empty_answer() -> None:
    fast = banach.compile(network(halves))
    assert fast(torch.ones(0, 3)).shape == (0, 3)
    assert fast(torch.ones(2, 3)).shape == (2, 3)
    for make in (pair, scales):
        assert banach.compile(nested(make))(torch.ones(0, 3)).shape == (0, 3)


def test_an_r_that_mixes_samples_is_refused() -> None:
    """Late samples went on as a smaller batch, and others were marked converged at values of the larger one."""
    fast = banach.compile(network(lambda u, v: 0.4 * u + 0.3 * u.mean(0) + v))
    assert fast(torch.ones(1, 3)).shape == (1, 3), "one sample has nothing to mix with"
    with pytest.raises(ValueError, match="treats each sample by itself, and this one mixes samples"):
        fast(torch.ones(4, 3))
    nest = network(lambda u, v: (0.4 * u[0] + v[0], 0.3 * u[0].mean(0) + v[1]), lambda d: (d, d))
    with pytest.raises(ValueError, match="treats each sample by itself, and this one mixes samples"):
        banach.compile(nest)(SLOPES)
    net = network()
    fast = banach.compile(net)
    fast(SLOPES[:2])
    net.R = Applied(lambda u, v: 0.4 * u + 0.3 * u.mean(0) + v).eval()
    with pytest.raises(ValueError, match="treats each sample by itself, and this one mixes samples"):
        fast(SLOPES)


class Counts(nn.Module):
    """R with a float attribute that changes at every call."""

    calls = 0.0

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        self.calls = self.calls + 1.0
        return slope(u, v)


def test_numbers_that_change_in_a_call_do_not_make_the_next_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, kernels=False)
    capture, captured = EagerCalls._capture, list[int]()

    def counted(*arguments: Any) -> Any:
        captured.append(1)
        return capture(*arguments)

    monkeypatch.setattr(EagerCalls, "_capture", counted)
    net = ImplicitNetwork(nn.Identity(), Counts(), nn.Identity()).eval()
    for call in (banach.compile(net), Scorer(net)):
        captured.clear()
        for _ in range(3):
            call(SLOPES[:2])
        assert len(captured) == 1


@pytest.mark.usefixtures("device")
def test_a_tensor_that_is_not_per_sample_is_refused_also_if_it_has_as_many_rows() -> None:
    """Such as a causal mask of sequences as long as the batch: late samples were solved with rows of it."""
    causal = lambda d: (d, torch.ones(len(d[0]), len(d[0])).tril())  # noqa: E731
    fast = banach.compile(network(lambda u, v: (0.1 * v[1] @ u[0] + v[0], u[1]), causal, start=lambda v: v))
    with pytest.raises(ValueError, match=r"Q\(d\) of one sample .* for each of 1 samples, .* shape \(3, 3\)"):
        fast(torch.rand(3, 3, 2))


# Where Q(d), the latent or the output is a tuple or a dict of tensors.

BAD, GOOD = Status.NONFINITE, Status.CONVERGED
PAIR_SLOPES = torch.tensor([[0.5], [3.0], [0.9], [-2.5], [0.1]]).repeat(1, 3)  # slopes: the second and the fourth


def pair(fine: Tensor, coarse: Tensor) -> Any:
    return fine, coarse


def scales(fine: Tensor, coarse: Tensor) -> Any:
    return {"fine": fine, "coarse": coarse}


def nested(make: Callable[[Tensor, Tensor], Any], **options: Any) -> ImplicitNetwork:
    """Two scales: fine <- s fine + 1 and coarse <- coarse / 2 + mean(fine); the output is fine + coarse."""

    def parts(u: Any) -> Any:
        return (u["fine"], u["coarse"]) if isinstance(u, dict) else u

    def R(u: Any, v: Any) -> Any:
        fine, coarse = parts(u)
        return make(parts(v)[0] * fine + 1, coarse / 2 + fine.mean(1, keepdim=True))

    return network(R, lambda d: make(d, d), lambda u: parts(u)[0] + parts(u)[1], **options)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("make", [pair, scales])
@pytest.mark.parametrize("solver", [Picard(damping=0.1), Anderson(3)])
def test_a_latent_of_several_tensors(make: Any, solver: Any) -> None:
    """In batches of several sizes, the first two in one graph; a start may list its keys in any order."""
    net = nested(make, solver=solver, tolerance=TIGHT)
    fast = banach.compile(net)
    for d in (SLOPES, SLOPES[:5], SLOPES[2:5], SLOPES[:1]):
        y, found = check_same(net, d, fast=fast)
        torch.testing.assert_close(y, 3 / (1 - d), rtol=1e-6, atol=0)
        assert type(found.value) is type(make(d, d))
    kept = fast(SLOPES, solution=True)[1].value
    fast(SLOPES.flip(0))
    torch.testing.assert_close(kept, net(SLOPES, solution=True)[1].value)  # not overwritten by the next call
    warm = check_same(net, SLOPES, kept, fast=fast)[1]
    assert int(warm.steps.max()) <= 2
    if make is scales:
        check_same(net, SLOPES, dict(reversed(kept.items())), fast=fast)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("make", [pair, scales])
def test_diverging_samples_of_such_a_latent_keep_their_best_iterate(make: Any) -> None:
    net = nested(make, tolerance=RELATIVE)
    for z0 in (None, make(0.1 * PAIR_SLOPES, torch.ones(5, 3))):
        y, found = check_same(net, PAIR_SLOPES, z0)
        assert found.status == (GOOD, BAD, GOOD, BAD, GOOD)
        assert y.isfinite().all()


@pytest.mark.usefixtures("device")
def test_a_nest_may_be_the_latent_alone_or_the_output() -> None:
    def two(v: Tensor) -> Any:
        return {"a": torch.zeros_like(v), "b": v.new_zeros(len(v))}

    def R(u: Any, v: Tensor) -> Any:
        return {"a": slope(u["a"], v), "b": u["b"] / 2 + u["a"].mean(1)}

    y, _ = check_same(network(R, start=two, tolerance=TIGHT), SLOPES)
    torch.testing.assert_close(y, {"a": 1 / (1 - SLOPES), "b": 2 / (1 - SLOPES[:, 0])}, rtol=1e-6, atol=0)


def check_two_scales(name: str, place: str) -> None:
    """A real network with a tuple as latent answers as it does itself, and its evaluation need not run eagerly."""
    torch.manual_seed(0)
    net = multiscale((1, 8, 8), 10, Sizes((8, 16), (2, 4), 8, 0.25))
    net.tolerance = Tolerance(max_steps=6, check_every=0)
    if name == "mon-tiers":
        parts = models.mon_tiers((1, 8, 8), channels=(4, 8, 8), alpha=2.0)
        net = ImplicitNetwork(*parts, tolerance=Tolerance(atol=1e-7, max_steps=500))
    net, d = net.double().eval().to(place), images(5).to(place)
    scorer = Scorer(net)
    for x in (d, d[:3].flip(0)):
        y, found = check_same(net, x)
        torch.testing.assert_close(scorer(x)[0], y)
        check_same(net, x, found.value)
    assert scorer.reason is None
    assert bool(scorer.captured(d.device)) == bool(banach.compile(net).plan.graph)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["mdeq", "mon-tiers"])
def test_networks_of_several_scales(name: str) -> None:
    check_two_scales(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mdeq", "mon-tiers"])
def test_captured_networks_of_several_scales(name: str) -> None:
    check_two_scales(name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("make", [pair, scales])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_captured_latents_of_several_tensors_with_samples_that_diverge(make: Any, dtype: torch.dtype) -> None:
    """By fused steps in float32, without kernels in float64."""
    net = nested(make, tolerance=RELATIVE)
    net.register_parameter("weight", nn.Parameter(torch.zeros(1, dtype=dtype)))  # says where the network is
    fast, d = banach.compile(net.cuda()), PAIR_SLOPES.to("cuda", dtype)
    assert fast.plan.graph
    for z0 in (None, make(0.1 * d, torch.ones_like(d))):
        y, found = fast(d, z0=z0, solution=True)
        with pytest.warns(ConvergenceWarning):
            own, wanted = net(d, z0=z0, solution=True)
        torch.testing.assert_close(y, own, rtol=1e-2, atol=1e-2)
        assert found.status == wanted.status
        torch.testing.assert_close(found.value, wanted.value, rtol=1e-2, atol=1e-2)
