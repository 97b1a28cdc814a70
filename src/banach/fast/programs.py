"""Captured programs, one per depth, and the choice of the next one from what earlier ones reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from banach.fast.depth import LAG, DepthControl
from banach.fast.graph import Graphs, unchanged

Body = Callable[[int], Tensor | None]  # runs at a depth; returns the excess (2,) of a `Reached`, None without one


class Programs:
    """`run()` replays the body at the depth of the control, one launch, and never waits for its result.

    A program is captured when its depth is first needed. `changing()` gives every tensor that the body changes:
    the body is warmed up before the first capture, and they are put back. Whatever the body reads that changes
    from run to run must lie in tensors of its own. Without a control there is one program, of depth 0.
    """

    def __init__(
        self,
        device: torch.device,
        body: Body,
        control: DepthControl | None,
        changing: Callable[[], Iterable[Tensor]],
        after_warm_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.body, self.control = body, control
        self.changing, self.after_warm_up = changing, after_warm_up
        self.graphs = Graphs(device)
        self.captured: dict[int, torch.cuda.CUDAGraph] = {}
        self.excess = torch.zeros(2, dtype=torch.float64, device=device)
        # Pinned, so that a copy into them goes on while the host does other things.
        self.free = [torch.zeros(2, dtype=torch.float64, pin_memory=True) for _ in range(LAG + 1)]
        self.sent: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    @property
    def depth(self) -> int:
        """The depth that `run` will go to."""
        return 0 if self.control is None else self.control.depth

    def prepare(self) -> None:
        """Capture the program of the current depth. What cannot be captured raises here, and changes nothing."""
        if self.depth in self.captured:
            return
        depth = self.depth
        if not self.captured:
            try:
                with unchanged([*self.changing(), self.excess]):
                    self.graphs.warm_up(lambda: self._program(depth))
            finally:
                self.after_warm_up()
        self.captured[depth] = self.graphs.capture(lambda: self._program(depth))

    def run(self) -> int:
        """Replay. Returns the depth."""
        self.prepare()
        depth = self.depth
        self.captured[depth].replay()
        if self.control is not None:
            self._send(depth)
            self._receive(self.control)
        return depth

    def _program(self, depth: int) -> None:
        excess = self.body(depth)
        if excess is not None:
            self.excess.copy_(excess)

    def _send(self, depth: int) -> None:
        slot, event = self.free.pop(), torch.cuda.Event()
        slot.copy_(self.excess, non_blocking=True)
        event.record()
        self.sent.append((depth, slot, event))

    def _receive(self, control: DepthControl) -> None:
        """What was sent LAG runs ago. It has arrived, unless the host is that far ahead: then it can wait."""
        if len(self.sent) <= LAG:
            return
        depth, slot, event = self.sent.popleft()
        event.synchronize()
        control.observe(depth, *slot.tolist())
        self.free.append(slot)


def reset_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that has made its state but no step: its moments are zero, as if it had just begun."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """What the optimizer remembers."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def align_state(optimizer: torch.optim.Optimizer) -> None:
    """Moments lie in memory as their weights do: a change of layout would leave what fused optimizers refuse."""
    for p, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == p.shape and value.stride() != p.stride():
                state[name] = torch.empty_like(p, dtype=value.dtype).copy_(value)
