"""Everything that changes while a network trains, and so everything that a checkpoint holds."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from banach.data import Batches, Images
from banach.diagnose import ContractionMonitor
from banach.network import ImplicitNetwork
from banach.train.average import Average
from banach.train.checkpoint import Checkpoint, CheckpointError, Position
from banach.train.history import Epoch
from banach.train.settings import Settings
from banach.train.tally import Tally


class Work:
    """A network in training: its optimizer, averaged weights, sums of the epoch, and where it is.

    There is no random state to keep: batches are a function of (seed, epoch, step), and `fit` seeds what the
    network draws by the same three.
    """

    def __init__(self, net: nn.Module, batches: Batches, validation: Images | None, settings: Settings) -> None:
        self.net, self.batches, self.validation, self.settings = net, batches, validation, settings
        self.device = settings.torch_device
        self.implicit = isinstance(net, ImplicitNetwork)
        self.optimizer = make_optimizer(net, settings)
        self.tally = Tally(self.device)
        self.average = None if settings.ema is None else Average(net, settings.ema)
        self.monitor = ContractionMonitor(seed=settings.seed)
        self.epoch = self.step = 0
        self.done: list[Epoch] = []
        self.warm_up, self.begun_at = True, 0
        self.begin_epoch()

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.step)

    @property
    def seconds(self) -> float:
        """Time spent on this epoch, before an interruption and since."""
        return self.spent + time.perf_counter() - self.since

    def rate(self, step: int) -> float:
        """The learning rate of a step of this epoch."""
        settings = self.settings
        return settings.lr * settings.schedule.multiplier(self.epoch + step / len(self.batches), settings.epochs)

    def changing(self) -> Iterator[Tensor]:
        """Every tensor that a training step changes in place, and that there is already."""
        yield from self.net.parameters()
        yield from self.net.buffers()
        yield from (self.tally.sums, self.tally.most)
        if self.average is not None:
            yield from self.average.weights.values()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def begin_epoch(self) -> None:
        """Sums, counts and the clock start at zero."""
        self.tally.reset()
        self.products, self.spent = 0, 0.0
        self.begin_clock()

    def begin_clock(self) -> None:
        """Time counts from now on, and so does the peak of memory."""
        self.since = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def end_epoch(self, epoch: Epoch) -> None:
        self.done.append(epoch)
        self.warm_up = self.warm_up and self.step == self.begun_at  # of this epoch no step was left
        self.begun_at = 0
        self.epoch, self.step = self.epoch + 1, 0
        self.begin_epoch()

    def identity(self) -> dict[str, str]:
        """What must be the same for a run to go on."""
        parts = {"train": self.batches.images, "validation": self.validation, "augment": self.batches.augment}
        return _in_words(parts) | described(self.net, self.settings)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that must come back."""
        kept = {f"net.{name}": _tensor(name, value) for name, value in self.net.state_dict().items()}
        kept |= {"tally.sums": self.tally.sums, "tally.most": self.tally.most}
        if self.average is not None:
            kept |= {f"average.{name}": value for name, value in self.average.weights.items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            kept |= {f"optimizer.{index}.{key}": v for key, v in values.items() if isinstance(v, Tensor)}
        return kept

    def state(self, identity: Mapping[str, str]) -> dict[str, Any]:
        """The rest, as plain values."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "products": self.products,
            "seconds": self.seconds,
            "warned": self.monitor.warned,
            "done": [epoch.to_dict() for epoch in self.done],
            "identity": dict(identity),
        }

    def restore(self, checkpoint: Checkpoint, identity: Mapping[str, str]) -> None:
        """Be where the checkpoint was taken."""
        check_identity(checkpoint.state["identity"], identity)
        try:
            self.net.load_state_dict(checkpoint.under("net"))
        except RuntimeError as error:
            raise CheckpointError(f"{checkpoint.path} is of another network: {error}") from None
        try:
            self._restore_rest(checkpoint)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint.path} does not hold this run: {error}") from None

    def _restore_rest(self, checkpoint: Checkpoint) -> None:
        tensors, state = checkpoint.tensors, checkpoint.state
        self._restore_optimizer(checkpoint.under("optimizer"))
        if self.average is not None:
            for name, value in checkpoint.under("average").items():
                self.average.weights[name].copy_(value)
        self.tally.sums.copy_(tensors["tally.sums"])
        self.tally.most.copy_(tensors["tally.most"])
        self.epoch, self.step, self.products = state["epoch"], state["step"], state["products"]
        self.spent, self.since = state["seconds"], time.perf_counter()
        self.monitor.warned, self.begun_at = state["warned"], self.step
        self.done = [Epoch.from_dict(values) for values in state["done"]]

    def _restore_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def make_optimizer(net: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer of the settings, over the parameters that are trained.

    On a GPU it is one kernel, and its learning rate a tensor, so that a captured step can change it.
    """
    weights = [p for p in net.parameters() if p.requires_grad]
    device, decay = settings.torch_device, settings.weight_decay
    lr: Any = settings.lr
    more: dict[str, Any] = {}
    if device.type == "cuda":
        lr, more = torch.tensor(settings.lr, device=device), {"fused": True}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=lr, weight_decay=decay, momentum=settings.momentum, **more)
    made = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    if more:
        more["capturable"] = True
    return made(weights, lr=lr, weight_decay=decay, **more)


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"the network's {name} is no tensor ({type(value).__name__}), so it cannot be checkpointed"
        )
    return value


def described(net: Any, settings: Settings) -> dict[str, str]:
    """How a network finds and differentiates its fixed point, and its settings; the device may change."""
    fixed_point = ("solver", "tolerance", "backward") if isinstance(net, ImplicitNetwork) else ()
    told = {f"setting {key}": value for key, value in settings.to_dict().items() if key != "device"}
    return _in_words({name: getattr(net, name) for name in fixed_point} | told)


def _in_words(parts: Mapping[str, Any]) -> dict[str, str]:
    """Addresses in memory and devices are left out."""
    return {
        name: re.sub(r" on \w+(:\d+)?\)$", ")", re.sub(r" at 0x[0-9a-f]+", "", repr(part)))
        for name, part in parts.items()
    }


def check_identity(kept: Mapping[str, str], now: Mapping[str, str]) -> None:
    """A setting that came after the run was begun had its default then."""
    kept = {**{f"setting {key}": repr(value) for key, value in Settings().to_dict().items()}, **kept}
    del kept["setting device"]
    for name in sorted({*kept, *now}):
        if kept.get(name) != now.get(name):
            raise CheckpointError(
                f"the run was begun with {name}={kept.get(name)}, got {now.get(name)}; go on with the same one"
            )
