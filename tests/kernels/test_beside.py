"""Work beside a chain, where there are no streams: done at once, and once."""

import pytest
import torch

from banach.kernels.beside import Beside


def test_on_a_cpu_work_is_done_at_once() -> None:
    beside = Beside(torch.device("cpu"))
    done: list[float] = []

    def work(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        done.append(1)
        return (x + y,)

    (total,) = beside.run(work, torch.ones(2), torch.ones(2))
    assert done == [1]
    assert total.tolist() == [2.0, 2.0]
    beside.join()


def test_an_error_is_the_callers() -> None:
    beside = Beside(torch.device("cpu"))

    def work(x: torch.Tensor) -> tuple[torch.Tensor]:
        raise ValueError("no such work")

    with pytest.raises(ValueError, match="no such work"):
        beside.run(work, torch.ones(1))
