"""The rest of PyTorch: torch.compile and torch.export at any depth, autocast, bfloat16, two processes."""

import tempfile
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.multiprocessing as mp
from torch._dynamo.utils import counters

import banach
from banach import JFB, Anderson, Broyden, Implicit, Neumann, Picard, Status, Tolerance, Unroll
from networks import ConvR, conv_network, gradients, images
from two_processes import train_in_a_process

# What PyTorch's own tracer says while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
FIXED = Tolerance(max_steps=4, check_every=0)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("solver", "backward", "batch_norm", "backend"),
    [
        (Picard(), JFB(), False, "inductor"),
        (Picard(damping=0.2), Unroll(2), True, "aot_eager"),
        (Anderson(memory=3), Unroll(2, damping=0.3), False, "aot_eager"),
        (Broyden(memory=3), Neumann(2), True, "aot_eager"),
    ],
)
def test_a_pass_at_fixed_depth_is_one_graph(
    solver: banach.Solver, backward: banach.Mode, batch_norm: bool, backend: str
) -> None:
    net = conv_network(batch_norm=batch_norm)
    net.tolerance, net.solver, net.backward = FIXED, solver, backward
    traced, eager = torch.compile(net, fullgraph=True, backend=backend)(images()), net(images())
    torch.testing.assert_close(traced, eager)
    torch.testing.assert_close(gradients(net, traced.square().sum()), gradients(net, eager.square().sum()))


@pytest.mark.parametrize(("solver", "dynamic"), [(Picard(), None), (Anderson(memory=2), True)])
def test_one_graph_serves_batches_of_another_size(solver: banach.Solver, dynamic: bool | None) -> None:
    """With fullgraph the second size, or the first with dynamic=True, raised torch._dynamo's Unsupported."""
    net = banach.ImplicitNetwork(torch.nn.Identity(), lambda u, v: torch.tanh(u / 2 + v), torch.nn.Identity())
    net.tolerance, net.solver = Tolerance(max_steps=2, check_every=0), solver
    compiled = torch.compile(net, fullgraph=True, dynamic=dynamic, backend="eager")
    for batch in (3, 5):
        torch.testing.assert_close(compiled(d := torch.randn(batch, 4)), net(d))


def test_a_compiled_pass_that_does_not_converge_warns_of_that_alone() -> None:
    """Dynamo traced the search for the user's line, and the probe: it warned of what it cannot trace."""
    net = conv_network(batch_norm=False)
    counters.clear()
    net.tolerance = Tolerance(atol=0.0, max_steps=3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        traced = torch.compile(net, backend="eager")(images())
    assert [(one.category, one.filename) for one in seen] == [(banach.ConvergenceWarning, __file__)]
    assert not any("Tensor.item()" in why for why in counters["graph_break"])
    net.tolerance = Tolerance(max_steps=3, check_every=0)
    torch.testing.assert_close(traced, net(images()))


def test_inductor_with_broyden() -> None:
    """A step that chose between -r and H r in one expression was compiled wrongly: .26 off at three steps."""
    torch.manual_seed(0)
    Q, R = torch.nn.Conv2d(1, 8, 3, padding=1), ConvR(8, gamma=0.5)
    net = banach.ImplicitNetwork(Q, R, torch.nn.Flatten(), solver=Broyden())
    net.tolerance = Tolerance(max_steps=3, check_every=0)
    d = torch.randn(16, 1, 8, 8)
    torch.testing.assert_close(torch.compile(net, fullgraph=True)(d), net(d), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("solver", "tolerance"),
    [
        (Picard(), {"rtol": 1e-4, "atol": 0}),
        (Picard(damping=0.3), {}),
        (Anderson(memory=3), {"rtol": 1e-4, "atol": 0}),
        (Broyden(memory=4), {}),
    ],
)
def test_exported_program_equals_eager(solver: banach.Solver, tolerance: dict[str, float]) -> None:
    net = conv_network(batch_norm=True).eval()
    net.solver, net.tolerance = solver, Tolerance(max_steps=30, **tolerance)  # type: ignore[arg-type]
    batch = torch.export.Dim("batch")
    program = torch.export.export(net, (images(5),), dynamic_shapes=(({0: batch},),))
    assert "while_loop" in str(program.graph)
    for size in (3, 9):
        torch.testing.assert_close(program.module()(images(size)), net(images(size)))


def test_the_depth_of_an_exported_program_follows_the_data() -> None:
    """Each evaluation is counted by an operator that the exported program calls too."""
    calls = []

    @torch.library.custom_op("banach_test::count", mutates_args=())
    def count(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone()

    @count.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    net = banach.ImplicitNetwork(
        torch.nn.Identity(), lambda u, v: count(v * u / 2 + 1), torch.nn.Identity(), tolerance=Tolerance(atol=1e-6)
    )
    program = torch.export.export(net, (torch.ones(2, 3),))
    steps = []
    for slope in (0.1, 1.0):
        calls.clear()
        program.module()(torch.full((2, 3), slope))
        steps.append(len(calls))
    eager = [int(net.latent(torch.full((2, 3), slope))[1].steps.max()) + 1 for slope in (0.1, 1.0)]
    assert steps == eager
    assert steps[0] < steps[1]


@pytest.mark.parametrize("max_steps", [0, 1, 2, 5])
def test_short_budgets(max_steps: int) -> None:
    net = conv_network().eval()
    net.solver, net.tolerance = Anderson(memory=2), Tolerance(atol=0, max_steps=max_steps, check_every=0)
    program = torch.export.export(net, (images(3),))
    torch.testing.assert_close(program.module()(images(3)), net(images(3)))


@pytest.mark.parametrize("solver", [banach.Picard(), Anderson(), banach.Broyden()])
@pytest.mark.parametrize("backward", [JFB(), Neumann(2), Unroll(2, damping=0.2), Implicit()])
@pytest.mark.filterwarnings("ignore:the adjoint equation missed")
def test_autocast(solver: banach.Solver, backward: banach.Mode) -> None:
    net = conv_network(batch_norm=True)
    net.solver, net.backward = solver, backward
    expected = gradients(net, net(images()).square().sum())
    with torch.autocast("cpu", torch.bfloat16):
        u, found = net.latent(images())
        loss = net.S(u).float().square().sum()
    assert found.value.dtype == torch.float32
    got = gradients(net, loss)
    for a, b in zip(got, expected, strict=True):
        if b.norm() > 1e-3:  # bfloat16 has 8 bits: the direction is what survives
            assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.9


def test_a_network_in_bfloat16() -> None:
    net = conv_network().bfloat16()
    u, found = net.latent(images().bfloat16())
    assert u.dtype == found.value.dtype == torch.bfloat16
    assert found.residual.dtype == torch.float32
    assert Status.NONFINITE not in found.status
    reference = conv_network().latent(images())[0]
    assert (u.float() - reference).abs().max() < 0.05 * reference.abs().max()


def test_ddp_over_two_processes() -> None:
    alone = conv_network()
    expected = gradients(alone, alone(images(6)).square().mean())
    with tempfile.TemporaryDirectory() as folder:
        both = mp.start_processes(train_in_a_process, args=(folder,), nprocs=2, start_method="spawn", join=False)
        deadline = time.monotonic() + 120
        while not both.join(timeout=10):  # true once both have ended, false after every wait for one
            if time.monotonic() > deadline:
                for process in both.processes:
                    process.kill()
                pytest.fail("two processes took longer than 120 s over one step")
        got = torch.load(f"{folder}/gradients.pt")
    torch.testing.assert_close([*got], [*expected], atol=1e-5, rtol=1e-4)
