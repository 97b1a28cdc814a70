"""On a GPU: masks are drawn there, a pass at fixed depth needs no host sync and can be captured whole."""

import pytest
import torch
from torch import nn

from banach import JFB, ImplicitNetwork, Mode, Neumann, Tolerance, Unroll
from banach.nn import Dropout2d, Lipschitz, TwoStream, operator_norm
from nn.parts_nn import Everything

pytestmark = pytest.mark.gpu


def network(mode: Mode) -> ImplicitNetwork:
    torch.manual_seed(1)
    R = Everything(Lipschitz(nn.Conv2d(4, 4, 3, padding=1), 0.5, size=6), nn.BatchNorm2d(4), Dropout2d(0.4))
    fixed = Tolerance(max_steps=4, check_every=0)
    Q, S = nn.Conv2d(1, 4, 3, padding=1), nn.Flatten()
    return ImplicitNetwork(Q, R, S, tolerance=fixed, backward=mode).cuda()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("mode", [JFB(), Neumann(2), Unroll(2), Unroll(2, checkpoint=True)])
def test_a_training_pass_syncs_with_host_for_nothing(mode: Mode) -> None:
    net = network(mode)
    d = torch.randn(5, 1, 6, 6, device="cuda")
    net(d).square().sum().backward()  # libraries are set up here
    torch.cuda.set_sync_debug_mode("error")
    try:
        net(d).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", [JFB(), Neumann(2), Unroll(2)])
def test_a_training_pass_can_be_captured(mode: Mode) -> None:
    net = network(mode)
    d = torch.randn(5, 1, 6, 6, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(net(d).square().sum(), list(net.parameters()))
    torch.cuda.synchronize()
    seen = int(net.R.norm.num_batches_tracked)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = net(d)
        torch.autograd.grad(y.square().sum(), list(net.parameters()))
    values = []
    for _ in range(3):
        graph.replay()
        values.append(y.clone())
    assert int(net.R.norm.num_batches_tracked) == seen + 3
    assert torch.isfinite(values[0]).all()
    assert not torch.equal(values[0], values[1])  # every replay draws its own mask


def test_norms_and_bounds_agree_with_the_cpu() -> None:
    torch.manual_seed(0)
    R = TwoStream.conv(8, (9, 7), 3, gamma=0.8, ell=2.0).double()
    u, v = torch.randn(2, 8, 9, 7).double(), torch.randn(2, 3, 9, 7).double()
    expected = R.eval()(u, v)
    layer = nn.Conv2d(5, 5, 3, stride=2, padding=1, padding_mode="circular").double()
    norm = operator_norm(layer, (9, 7))
    torch.testing.assert_close(operator_norm(layer.cuda(), (9, 7)).cpu(), norm, rtol=1e-9, atol=0)
    torch.testing.assert_close(R.cuda()(u.cuda(), v.cuda()).cpu(), expected, rtol=1e-9, atol=1e-12)
    made = Lipschitz(layer, 0.3, size=(9, 7))
    assert made.directions.is_cuda
    torch.testing.assert_close(made.norm().detach().cpu(), norm, rtol=1e-9, atol=0)
