"""torch.compile: one step of T, and whole passes at a fixed depth, in one graph, equal to eager."""

from collections.abc import Iterator

import pytest
import torch

import banach
from banach import JFB, Anderson, Broyden, Neumann, Picard, Tolerance, Unroll
from networks import ConvR, conv_network, gradients, images

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


def compare(net: banach.ImplicitNetwork, backend: str = "aot_eager") -> None:
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    torch.manual_seed(3)
    eager = gradients(net, net(images()).square().sum())
    torch.manual_seed(3)
    traced = gradients(net, compiled(images()).square().sum())
    for a, b in zip(eager, traced, strict=True):
        torch.testing.assert_close(a, b)
    torch.manual_seed(3)
    expected = net(images())
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(images()), expected)


@pytest.mark.parametrize("backward", [JFB(), Unroll(2), Unroll(2, damping=0.3), Neumann(2)])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_pass_at_fixed_depth_is_one_graph(backward: banach.Mode, batch_norm: bool) -> None:
    net = conv_network(batch_norm=batch_norm)
    net.tolerance, net.backward = FIXED, backward
    compare(net)


@pytest.mark.parametrize("solver", [Picard(damping=0.2), Anderson(memory=3), Broyden(memory=3)])
def test_every_solver_is_traced(solver: banach.Solver) -> None:
    net = conv_network(batch_norm=True)
    net.tolerance, net.solver = FIXED, solver
    compare(net)


@pytest.mark.parametrize("backward", [JFB(), Unroll(2, checkpoint=True)])
def test_dropout_keeps_its_mask(backward: banach.Mode) -> None:
    net = conv_network(dropout=0.3)
    net.tolerance, net.backward = FIXED, backward
    torch.manual_seed(3)
    eager = net(images())
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(images()), eager)
    compare(net)


def test_batch_norm_is_updated_once_by_a_compiled_pass() -> None:
    net = conv_network(batch_norm=True)
    net.tolerance = FIXED
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    compiled(images())
    assert int(net.R.norm.num_batches_tracked) == 1


def test_inductor() -> None:
    net = conv_network()
    net.tolerance = FIXED
    compare(net, "inductor")


def test_inductor_with_broyden() -> None:
    """A step that chose between -r and H r in one expression was compiled wrongly: .26 off at three steps."""
    torch.manual_seed(0)
    Q, R = torch.nn.Conv2d(1, 8, 3, padding=1), ConvR(8, gamma=0.5)
    net = banach.ImplicitNetwork(Q, R, torch.nn.Flatten(), solver=Broyden())
    net.tolerance = Tolerance(max_steps=3, check_every=0)
    d = torch.randn(16, 1, 8, 8)
    torch.testing.assert_close(torch.compile(net, fullgraph=True)(d), net(d), atol=1e-5, rtol=1e-5)


def test_one_compiled_step_inside_an_eager_loop() -> None:
    net = conv_network().eval()
    expected, found = net(images(), solution=True)
    net.R = torch.compile(net.R, fullgraph=True, backend="aot_eager")
    got, same = net(images(), solution=True)
    torch.testing.assert_close(got, expected)
    assert torch.equal(found.steps, same.steps)


def test_a_checked_loop_compiles_with_breaks_and_agrees() -> None:
    net = conv_network().eval()
    compiled = torch.compile(net, backend="aot_eager")
    torch.testing.assert_close(compiled(images()), net(images()))
