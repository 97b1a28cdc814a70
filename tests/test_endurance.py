"""Long and parallel use: training steps leave nothing behind, and threads compute what a serial program does."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import banach
from leaks import LIMIT, MODES, growth, training_step
from networks import conv_network, images, linear_network

pytestmark = pytest.mark.filterwarnings("default")  # the tolerances are loose
THREADS = 8


@pytest.mark.parametrize("mode", MODES)
def test_steps_leave_no_objects_behind(mode: str) -> None:
    """The short form of `make leaks`: as many objects after 30 more steps as before."""
    assert growth(training_step(MODES[mode]), 30, warm=5).objects <= 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_memory_does_not_grow(mode: str) -> None:
    assert growth(training_step(MODES[mode]), 10_000, windows=10).bytes < LIMIT


def in_threads(work: Any, count: int = THREADS) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


@pytest.mark.parametrize("solver", [banach.Picard(), banach.Anderson(), banach.Broyden()], ids=repr)
@pytest.mark.parametrize("mode", [m for m in MODES if "Broyden" not in m])
def test_threads_share_a_network(mode: str, solver: Any) -> None:
    """Output and gradient of eight batches, bit for bit those of a serial program."""
    net = linear_network()
    net.solver, net.backward = solver, MODES[mode]
    net.tolerance = banach.Tolerance(atol=1e-6, max_steps=60)

    def work(index: int) -> list[Tensor]:
        x = torch.randn(index + 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
        output = net(x)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), list(net.parameters()))]

    serial = [work(index) for index in range(THREADS)]
    for parallel in (in_threads(work), in_threads(work)):
        for one, other in zip(serial, parallel, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_threads_train_their_own_copies() -> None:
    """Batch norm in R: its buffers belong to the pass of one thread."""
    net = conv_network(batch_norm=True)

    def work(index: int) -> list[Tensor]:
        own = copy.deepcopy(net)
        optimizer = torch.optim.Adam(own.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            own(images(5, index)).square().sum().backward()
            optimizer.step()
        return [value.detach() for value in own.state_dict().values()]

    serial = [work(index) for index in range(THREADS)]
    for one, other in zip(serial, in_threads(work), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
