"""On a GPU: a program that cannot be captured is refused, and nothing else is harmed by the attempt."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from banach.fast.capture import Graphs, Recording, unchanged

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


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
