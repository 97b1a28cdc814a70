"""torch.export: an exported program whose depth follows the data, for any batch size."""

import pytest
import torch

import banach
from banach import Anderson, Broyden, Picard, Tolerance
from networks import conv_network, images


@pytest.mark.parametrize("solver", [Picard(), Picard(damping=0.3), Anderson(memory=3), Broyden(memory=4)])
@pytest.mark.parametrize("tolerance", [Tolerance(max_steps=30), Tolerance(atol=0, rtol=1e-4, max_steps=30)])
def test_exported_program_equals_eager(solver: banach.Solver, tolerance: Tolerance) -> None:
    net = conv_network(batch_norm=True).eval()
    net.solver, net.tolerance = solver, tolerance
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
