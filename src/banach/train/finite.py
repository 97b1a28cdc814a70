"""Divergence: find the first training step that is not finite, then stop, skip the batch, or rewind."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from banach.train.checkpoint import local
from banach.train.run import DivergenceError, Run
from banach.train.state import LOWER, TrainState

REWINDS = 5  # after that many the learning rate is not the cause
_EVERY = {"cpu": 1, "cuda": 100}  # steps between two reads; on a GPU each one is a host sync


class NonfiniteWatch:
    """Records on the device which step of an epoch was the first that was not finite.

    `begin` and `end` are part of a training step, also of a captured one: they never sync with the host. With the
    policy "skip" a bad step is undone, metrics included. `step_number` is that of the step which runs, from 1.
    """

    def __init__(self, state: TrainState, step_number: Tensor) -> None:
        self.state, self.step_number = state, step_number
        self.skip = state.settings.on_nonfinite == "skip"
        # The first bad step (0: none), their count, and the number in `_watched` of what was bad in the first.
        self.first = torch.zeros(3, dtype=torch.float64, device=state.device)
        self._before: dict[int, Tensor] = {}
        self.failure: str | None = None  # what happened in a step that raised an error

    def begin(self) -> None:
        """Keep what the step will change, if it may have to be undone."""
        if self.skip:
            self._before = {id(tensor): local(tensor).clone() for tensor in self._changing()}

    @torch.no_grad()
    def end(self, loss: Tensor) -> None:
        """Record whether the step was finite; undo it if it is to be skipped."""
        sizes = torch.stack([loss.detach(), *_largest([tensor for _, tensor in self._watched()])]).double()
        wrong = ~self.state.ranks.largest(sizes).isfinite()  # so that all ranks do the same
        bad = wrong.any()
        new = bad & (self.first[0] == 0)
        self.first += torch.stack([self.step_number[0] * new, bad, wrong.int().argmax() * new])
        if self.skip:
            for tensor in self._changing():  # an optimizer's state that is new starts from zero
                before, now = self._before.get(id(tensor)), local(tensor)
                now.copy_(torch.where(bad, torch.zeros_like(now) if before is None else before, now))
            self._before = {}

    def read(self) -> str | None:
        """Return what happened in the first bad step of the epoch, None if there was none, with one host sync."""
        if not self.first[0]:
            return None
        names = ["the loss", *(name for name, _ in self._watched())]
        step, _, number = map(int, self.first.tolist())
        name = names[number] if number < len(names) else "a tensor"
        return f"{name} became NaN or infinite in step {step} of epoch {self.state.epoch + 1}"

    def _watched(self) -> list[tuple[str, Tensor]]:
        """Return tensors by name, causes before consequences."""
        weights = self.state.net.named_parameters()
        named = [(f"the gradient of {name}", p.grad) for name, p in weights if p.grad is not None]
        named += [(name, value) for name, value in self._trained() if not name.endswith("'s step")]
        return [(name, t) for name, t in named if t.is_floating_point() and t.numel()]

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all that training changes besides the metrics, by name."""
        net, average = self.state.net, self.state.average
        yield from ((f"the weight {name}", p) for name, p in net.named_parameters())
        yield from ((f"the buffer {name}", b) for name, b in net.named_buffers())
        yield from (("the average of the weights", w) for w in (average.weights.values() if average else ()))
        for values in self.state.optimizer.state.values():
            yield from ((f"the optimizer's {key}", v) for key, v in values.items() if isinstance(v, Tensor))

    def _changing(self) -> list[Tensor]:
        return [*(value for _, value in self._trained()), self.state.metrics.sums, self.state.metrics.most]


def _largest(tensors: list[Tensor]) -> Any:
    """Return the largest absolute value of each tensor, on this rank, NaN if it has one."""
    parts = [local(tensor) for tensor in tensors]
    tensors = [part if part.numel() else part.new_zeros(1) for part in parts]  # a shard may be empty
    if tensors[0].device.type == "cpu":  # three times as fast there as the norm, which is one kernel on a GPU
        return torch._foreach_max(torch._foreach_abs(tensors))
    return torch._foreach_norm(tensors, math.inf)


def rewound(state: TrainState, run: Run | None, watch: NonfiniteWatch, *, now: bool) -> bool:
    """Look for a bad step and follow the policy of the settings; return True if training was rewound.

    With `now`, look even if that costs a host sync. A DivergenceError stops the training.
    """
    failed = watch.failure is not None  # such a batch has no answer, and is not skipped
    skip, last = watch.skip and not failed, state.step == len(state.batches)
    often = not skip and state.step % _EVERY[state.device.type] == 0
    if not (now or last or often or failed) or (fault := watch.failure or watch.read()) is None:
        return False
    if not skip:
        _rewind(state, run, fault)
    elif last and not state.metrics.sums[0]:
        _rewind(state, run, f"no batch of the epoch could be used: {fault}")
    elif last:
        batches = "one batch" if watch.first[1] == 1 else f"{int(watch.first[1])} batches"
        watch.first.zero_()
        warnings.warn(f"skipped {batches}, the first one because {fault}", RuntimeWarning, stacklevel=2)
    return not skip


def _rewind(state: TrainState, run: Run | None, fault: str) -> None:
    """Return to the newest checkpoint and lower the rate, or raise a DivergenceError."""
    checkpoint = None if run is None else run.latest()
    if checkpoint is None or state.settings.on_nonfinite != "rewind" or state.rewinds >= REWINDS:
        kept = f"the last good checkpoint is {checkpoint.path}" if checkpoint else "there is no checkpoint yet"
        others = " or ".join(policy for policy in ("skip", "rewind") if policy != state.settings.on_nonfinite)
        clip = "" if state.settings.clip else " set --clip 1,"
        advice = f"lower --lr,{clip} check the data, or choose --on-nonfinite {others}"
        raise DivergenceError(f"training diverged: {fault}; {kept}; {advice}")
    rewinds = state.rewinds + 1
    rate = f"the learning rate times {LOWER**rewinds:g}"
    warnings.warn(f"{fault}; back to {checkpoint.path.name} with {rate}", RuntimeWarning, stacklevel=3)
    state.restore(checkpoint)
    state.rewinds = rewinds
