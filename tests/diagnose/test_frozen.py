"""Measuring changes nothing: no weight, no buffer, no random number, no run; what cannot be held is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach.diagnose import ContractionMonitor, descent_check, measure_contraction, network_map


@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes(conv: Any, digits: Any, unchanged: Any, training: bool) -> None:
    """Batch norm in Q and R, dropout in R and S, on real images: every measurement leaves them as they were."""
    net = conv(drop=0.3).train(training)
    images, labels = digits(3)
    with unchanged(net):
        network_map(net, images)
        measure_contraction(net, images)
        descent_check(net, images, lambda y: nn.functional.cross_entropy(y, labels))
        ContractionMonitor()(net, images)


def test_measuring_changes_no_run(conv: Any, digits: Any) -> None:
    """A training run with dropout and batch norm, measured at every step, ends where the other one ends."""
    images, labels = digits(8)

    def run(measured: bool) -> list[Tensor]:
        net = conv(drop=0.2)
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            for _ in range(3):
                loss = nn.functional.cross_entropy(net(images), labels)
                optimiser.zero_grad()
                loss.backward()
                if measured:
                    measure_contraction(net, images)
                    descent_check(net, images, lambda y: nn.functional.cross_entropy(y, labels))
                optimiser.step()
        return [*net.state_dict().values()]

    for a, b in zip(run(False), run(True), strict=True):
        assert torch.equal(a, b)


def test_inside_inference_mode(conv: Any, digits: Any) -> None:
    net = conv().eval()
    images, labels = digits(3)
    outside = measure_contraction(net, images)
    with torch.inference_mode():
        fresh = images + 0
        inside = measure_contraction(net, fresh)
        descent = descent_check(net, fresh, lambda y: nn.functional.cross_entropy(y, labels))
    torch.testing.assert_close(inside.sigma, outside.sigma)
    assert descent.cosine > 0


def test_dropout_in_R_is_one_mask(tiny: Any, data: Tensor) -> None:
    net = tiny(drop=0.5)
    m = network_map(net, data)
    first, second = m.T(m.u, *m.inputs), m.T(m.u, *m.inputs)
    assert torch.equal(first, second)
    assert float((first == 0).double().mean()) > 0.2


def test_refusals(tiny: Any, data: Tensor) -> None:
    net = tiny()
    net.R = nn.Sequential(nn.Dropout(0.5))
    with pytest.raises(RuntimeError, match="no fixed point to find"):
        measure_contraction(net, data)
    with pytest.raises(TypeError, match=r"net must be an ImplicitNetwork, got Linear; .*net\.module"):
        measure_contraction(nn.Linear(2, 2), data)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda(conv: Any, digits: Any) -> None:
    net = conv(drop=0.2).cuda()
    images = digits(4)[0].cuda()
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = measure_contraction(net, images)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
    assert first.sigma.is_cuda
    net.eval()
    host = measure_contraction(copy.deepcopy(net).cpu(), images.cpu())
    torch.testing.assert_close(measure_contraction(net, images).sigma.cpu(), host.sigma)
