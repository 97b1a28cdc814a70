"""Multiscale DEQs: counts, the map against its formula, gradients against unrolled autograd in float64."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from banach import GMRES, Implicit, ImplicitNetwork, Picard, Tolerance, Unroll, models
from banach.export import export
from banach.models.mdeq import Sizes, multiscale, unrolled
from models.reference_models import count
from nn.parts_nn import gradients

IMAGE = (3, 8, 8)
SMALL = Sizes((8, 16), (2, 4), 8, 0.25)
TIGHT = Tolerance(atol=1e-12, max_steps=400)


def small(sizes: Sizes = SMALL) -> ImplicitNetwork:
    """A network whose R contracts: z is small beside the data, and each block depends on it little."""
    torch.manual_seed(0)
    net = multiscale(IMAGE, 3, sizes).double()
    with torch.no_grad():
        for block in net.R.blocks:
            block.norm1.weight.fill_(0.03)
            block.norm1.bias.fill_(0.5)
        for last in net.R.last:
            last[2].weight.fill_(0.1)
    net.tolerance, net.solver = TIGHT, Picard()
    return net


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, *IMAGE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "parts", "macs"),
    [("mdeq-tiny", (5_928, 111_792, 41_266), 69e6), ("mdeq", (11_296, 8_716_192, 2_370_910), 412e6)],
)
def test_counts(name: str, parts: tuple[int, ...], macs: float) -> None:
    net: Any = models.build(name).eval()
    assert tuple(map(count, (net.Q, net.R, net.S))) == parts
    v = net.Q(torch.randn(1, 3, 32, 32))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        z = net.R(v, v)
    assert [leaf.shape for leaf in z] == [leaf.shape for leaf in v]
    assert counter.get_total_flops() / 2 == pytest.approx(macs, rel=0.01)


def test_sizes_of_other_images() -> None:
    net: Any = models.build("mdeq", image=(1, 28, 28))
    v = net.Q(torch.randn(2, 1, 28, 28))
    assert [tuple(leaf.shape[1:]) for leaf in v] == [(32, 28, 28), (64, 14, 14), (128, 7, 7), (256, 4, 4)]
    with torch.no_grad():
        assert net.S(net.R(v, v)).shape == (2, 10)


def test_the_map_is_the_formula() -> None:
    R = small().R.eval()
    z, x = [torch.randn(2, c, n, n, dtype=torch.float64) for c, n in ((8, 8), (16, 4))], images()
    x = torch.cat([x, x, x[:, :2]], 1)

    def weight(conv: Any) -> Tensor:
        norm = conv.v.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        return conv.gain * conv.v / norm

    def norm(y: Tensor, layer: Any, groups: int = 8) -> Tensor:
        rows = y.reshape(len(y), groups, -1)
        rows = (rows - rows.mean(2, keepdim=True)) / (rows.var(2, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return rows.reshape(y.shape) * layer.weight.view(-1, 1, 1) + layer.bias.view(-1, 1, 1)

    b = []
    for i, block in enumerate(R.blocks):
        r = norm(F.conv2d(z[i], weight(block.conv1), padding=1), block.norm1).relu()
        s = norm(F.conv2d(r, weight(block.conv2), padding=1) + (x if i == 0 else 0), block.norm2)
        b.append(norm((s + z[i]).relu(), block.norm3))
    up, down = R.fuse[0][1].steps, R.fuse[1][0].steps
    fine = b[0] + norm(F.conv2d(b[1], up[0].weight), up[1]).repeat_interleave(2, 2).repeat_interleave(2, 3)
    coarse = b[1] + norm(F.conv2d(b[0], down[0].weight, stride=2, padding=1), down[1])
    expected = [
        norm(F.conv2d(y.relu(), weight(last[1])), last[2], groups=4)
        for y, last in zip((fine, coarse), R.last, strict=True)
    ]
    torch.testing.assert_close([*R(tuple(z), (x, z[1]))], [*expected], rtol=0, atol=1e-10)


@pytest.mark.parametrize("training", [False, True])
def test_the_exact_gradient_is_that_of_unrolled_autograd(training: bool) -> None:
    """In train mode with dropout: one mask per pass, drawn alike by the same seed."""
    found = []
    exact = Implicit(GMRES(), Tolerance(atol=0, rtol=1e-10, max_steps=200))
    for mode, tolerance in ((exact, TIGHT), (Unroll(60), Tolerance(max_steps=0))):
        net = small().train(training)
        net.backward, net.tolerance = mode, tolerance
        torch.manual_seed(3)
        found.append(gradients(net, net(images()).square().sum()))
    for name, value in found[1].items():
        if float(value.norm()) > 1e-12:
            assert float((found[0][name] - value).norm() / value.norm()) <= 1e-6, name


def test_warm_up_by_unrolling() -> None:
    net = small().eval()
    net.solver = Picard(damping=0.5)
    before = net.tolerance, net.backward
    net = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    with unrolled(net, 3):
        got = gradients(net, net(images()).square().sum())
    assert (net.tolerance, net.backward) == before
    v = net.Q(images())
    z = tuple(torch.zeros_like(leaf) for leaf in v)
    for _ in range(3):
        z = tuple((a + b) / 2 for a, b in zip(z, net.R(z, v), strict=True))
    expected = gradients(net, net.S(z).square().sum())
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-12)


def test_it_is_exported_for_any_batch_size() -> None:
    """Q fixed the batch size of the example by len()."""
    net = small().eval()
    program = export(net, torch.zeros(2, *IMAGE, dtype=torch.float64), format="torch")
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images(5))[0], net(images(5)))
