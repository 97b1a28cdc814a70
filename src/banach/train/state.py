"""TrainState: everything that changes while a network trains, and so everything that a checkpoint holds."""

import re
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from banach.data import Batches, Images
from banach.data.loader import Loader
from banach.diagnose import ContractionMonitor
from banach.fast import unchanged
from banach.network import ImplicitNetwork
from banach.train.checkpoint import Checkpoint, CheckpointError, Position
from banach.train.distributed import Ranks, placed
from banach.train.metrics import COUNTS, Epoch, MetricSums, Objective
from banach.train.settings import FREE, Settings

LOWER = 0.1  # times the learning rate, after every rewind
DIGEST = "the SHA-256 of the images"  # in `TrainState.identity`, and in the figures of the test images
_PLAIN = ("epoch", "step", "rewinds")  # attributes that a checkpoint stores as they are


class Average:
    """The exponential moving average of the weights: a <- d a + (1 - d) w after every step, from a = w.

    Parameters are averaged; buffers (batch norm's statistics, which are averages already) stay the network's.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in net.named_parameters()}

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        """Move the average towards the network's weights, in one kernel for all of them."""
        torch._foreach_lerp_([*self.weights.values()], [*net.parameters()], 1 - self.decay)

    @torch.no_grad()
    def put_into(self, net: nn.Module) -> None:
        """Copy the averaged weights into the network."""
        for name, p in net.named_parameters():
            p.copy_(self.weights[name])

    @contextmanager
    def inside(self, net: nn.Module) -> Iterator[None]:
        """Use the averaged weights in the block, then restore the network's own."""
        with unchanged(net.parameters()):
            self.put_into(net)
            yield


class TrainState:
    """A network in training: its optimizer, averaged weights, sums of the epoch, and position.

    `identity` is what must be the same for a run to resume. There is no random state to store: batches are a
    function of (seed, epoch, step), and `fit` seeds what the network draws by the same three.
    """

    def __init__(
        self,
        net: nn.Module,
        batches: Batches | Loader,
        validation: Images | Loader | None,
        settings: Settings,
        ranks: Ranks = Ranks(),
        objective: Objective = Objective(),
    ) -> None:
        self.net, self.batches, self.validation, self.settings = net, batches, validation, settings
        self.ranks, self.parallel = ranks, cast(Any, None)  # a `Parallel`, once steps are made on several ranks
        self.objective, self.device = objective, settings.torch_device
        self.optimizer = settings.make_optimizer(net)
        self.metrics = MetricSums(self.device, objective.metrics)
        self.counted = torch.zeros((), dtype=torch.int64, device=self.device)  # J-products of the epoch
        self.average = None if settings.ema is None else Average(net, settings.ema)
        self.monitor = ContractionMonitor(seed=settings.seed)
        train = batches.images if isinstance(batches, Batches) else batches
        parts = {"train": train, "validation": validation, "augment": batches.augment, "loss": objective.loss}
        self.identity = _reprs({**parts, "metrics": list(objective.metrics)}) | described(net, settings)
        if sha256 := getattr(train, "sha256", None):
            self.identity[DIGEST] = sha256
        self.epoch = self.step = self.rewinds = 0
        # Where all layers are in eval mode, as `fit` leaves them, they are to be trained: in a new network, too.
        trains = net.training and any(part.training for part in net.modules() if not part._modules)
        self.frozen = [part for part in net.modules() if trains and not part.training]
        self.done: list[Epoch] = []
        self.warm_up, self.begun_at = True, 0
        self.begin_epoch()

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.step)

    @property
    def seconds(self) -> float:
        """Time spent on this epoch, before an interruption and since."""
        return time.perf_counter() - self.since

    def rate(self, step: int) -> float:
        """Return the learning rate of a step of this epoch."""
        settings = self.settings
        share = settings.schedule.multiplier(self.epoch + step / len(self.batches), settings.epochs)
        return settings.lr * share * LOWER**self.rewinds

    def set_train_mode(self) -> None:
        """Set the network to train mode, except for the frozen parts."""
        self.net.train()
        for part in self.frozen:
            part.training = False

    def begin_epoch(self) -> None:
        """Reset the sums, the counts and the clock."""
        self.metrics.reset()
        self.counted.zero_()
        self.begin_clock()

    def begin_clock(self) -> None:
        """Measure time and peak memory from now on."""
        self.since = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def end_epoch(self, epoch: Epoch) -> None:
        """Store the figures of an epoch and go to the next one."""
        self.done.append(epoch)
        self.warm_up = self.warm_up and self.step == self.begun_at  # no step of this epoch was left
        self.begun_at = 0
        self.epoch, self.step = self.epoch + 1, 0
        self.begin_epoch()

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a checkpoint holds."""
        kept = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        kept |= {"tally.sums": self.metrics.sums, "tally.most": self.metrics.most}
        if self.average is not None:
            kept |= {f"average.{name}": value for name, value in self.average.weights.items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            kept |= {f"optimizer.{index}.{key}": v for key, v in values.items() if isinstance(v, Tensor)}
        return kept

    def plain_values(self) -> dict[str, Any]:
        """Return the rest of a checkpoint."""
        kept = {name: getattr(self, name) for name in (*_PLAIN, "seconds", "identity")}
        kept |= {"warned": self.monitor.warned, "tensors": len(self.tensors()), "products": int(self.counted)}
        return {**kept, "done": [epoch.to_dict() for epoch in self.done]}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; refuse one of another network, other data or other settings."""
        check_identity(checkpoint.state["identity"], self.identity)
        likes = self._likes(checkpoint.tensors)
        checkpoint = replace(checkpoint, tensors=placed(checkpoint.tensors, likes))
        try:
            self._check(checkpoint, likes)
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.path} does not hold this run: {error}") from None
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in checkpoint.under("optimizer").items():
            index, _, key = name.partition(".")
            moments.setdefault(int(index), {})[key] = value
        groups, state = self.optimizer.state_dict()["param_groups"], checkpoint.state
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.net.load_state_dict(checkpoint.under("net"))  # modules may keep more than these tensors
        for name, tensor in checkpoint.tensors.items():
            if name.startswith(("average.", "tally.")):
                likes[name].copy_(tensor)
        for name in _PLAIN:
            setattr(self, name, state[name])
        self.counted.fill_(state["products"])
        self.since = time.perf_counter() - state["seconds"]
        self.monitor.warned, self.begun_at = state["warned"], self.step
        self.done = [Epoch.from_dict(values) for values in state["done"]]
        self.ranks.go_on(self)

    def _check(self, checkpoint: Checkpoint, likes: Mapping[str, Tensor]) -> None:
        """Refuse a checkpoint that is not complete, before anything is restored."""
        position, got = checkpoint.position, checkpoint.tensors
        if position.step > len(self.batches) or position > Position(self.settings.epochs, 0):
            raise ValueError(f"it is at {position}, expected at most {self.settings.epochs} epochs")
        _check_tensors(got, likes)
        if len(got) != checkpoint.state["tensors"]:  # optimizer states may be missing
            raise ValueError(f"it has {len(got)} tensors, expected {checkpoint.state['tensors']}")
        counts = torch.cat([got["tally.sums"][COUNTS], got["tally.most"][:1]])
        if not bool((counts.isfinite() & (counts >= 0)).all()):
            raise ValueError(f"the sums of metrics (tally) must hold counts, got {counts.tolist()}")

    def _likes(self, names: Container[str]) -> dict[str, Tensor]:
        """Return the tensors of this state, and tensors like those of the optimizer that have one of these names.

        Only weights that had a gradient have a state in the optimizer.
        """
        own = {name: value for name, value in self.tensors().items() if not name.startswith("optimizer.")}
        keys = ("momentum_buffer",) if self.settings.optimizer == "sgd" else ("step", "exp_avg", "exp_avg_sq")
        weights = enumerate(p for group in self.optimizer.param_groups for p in group["params"])
        step = torch.zeros((), dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        known = {f"optimizer.{k}.{key}": step if key == "step" else p for k, p in weights for key in keys}
        return own | {name: like for name, like in known.items() if name in names}


def load_weights(net: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint, the averaged ones if it has any.

    Raises:
        CheckpointError: if it is of another network.
    """
    weights, average = checkpoint.under("net"), checkpoint.under("average")
    has_average = checkpoint.state["identity"].get("setting ema", "None") != "None"
    try:
        _check_tensors(weights, net.state_dict())
        _check_tensors(average, dict(net.named_parameters()) if has_average else {})
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path} is of another network: {error}") from None
    net.load_state_dict(weights)
    net.load_state_dict(average, strict=False)  # after them: of a tied weight only one of its names is averaged


def _check_tensors(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse other names, shapes or dtypes than those of `wanted`."""
    for name in sorted({*got, *wanted}):
        if name not in got or name not in wanted:
            raise ValueError(f"{name!r:.60} is {'missing' if name in wanted else 'not expected'}")
        here, own = (f"{tuple(t.shape)} of {t.dtype}" for t in (got[name], wanted[name]))
        if here != own:
            raise ValueError(f"{name} has the shape {here}, expected {own}")


def described(net: Any, settings: Settings) -> dict[str, str]:
    """Return the settings, and how a network finds and differentiates its fixed point; the device may change."""
    fixed_point = ("solver", "tolerance", "backward") if isinstance(net, ImplicitNetwork) else ()
    given = {f"setting {key}": value for key, value in settings.to_dict().items() if key not in FREE}
    return _reprs({name: getattr(net, name) for name in fixed_point} | given)


def check_identity(kept: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse to resume with something else."""
    kept = {DIGEST: now[DIGEST], **kept} if DIGEST in now else kept  # of an older run it is not known
    for name in sorted({*kept, *now}):
        if kept.get(name) != now.get(name):
            if name not in kept:
                raise CheckpointError(f"the run is of an older version, which stored no {name}; use that version")
            text = f"the run was started with {name}={kept[name]}, got {now.get(name)}"
            raise CheckpointError(f"{text}; resume with the same one")


def _reprs(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the repr of each part, without addresses in memory and devices."""
    left_out = r" at 0x[0-9a-f]+| on \w+(:\d+)?(?=\)$)"
    return {name: re.sub(left_out, "", repr(part)) for name, part in parts.items()}
