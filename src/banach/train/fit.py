"""fit(): the one training loop, for every backward mode."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from banach.backward import Implicit
from banach.data import Augmentation, Batches, Images
from banach.data.loader import Loader
from banach.fast.plan import Plan, arithmetic, networks_in
from banach.network import ImplicitNetwork
from banach.solve import ConvergenceWarning
from banach.solve.context import assigned
from banach.solve.warning import warn_user
from banach.train.checkpoint import Position, is_sharded, write_shards
from banach.train.distributed import Ranks
from banach.train.evaluate import Scorer, measure
from banach.train.finite import rewound
from banach.train.metrics import Compared, Epoch, History, Objective, cross_entropy
from banach.train.run import Run, RunError, lock, noted_signals
from banach.train.settings import Settings
from banach.train.state import TrainState
from banach.train.steps import Penalties, Stepper

logger = logging.getLogger(__name__)

_LOGGED = ("loss", "validation_loss", "validation_accuracy", "depth")  # figures of an epoch, for the log
_FEW = 0.05  # an epoch in which a smaller share of the solves converges is reported


def fit(
    net: nn.Module,
    train: Images | Iterable[Any],
    validation: Images | Iterable[Any] | None,
    settings: Settings,
    *,
    loss: Compared | None = None,
    metrics: Mapping[str, Compared] | None = None,
    augment: Augmentation | None = None,
    run: Run | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    on_step: Callable[[Position], None] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> History:
    """Train a network, on the device of the settings.

    Afterwards it is in eval mode, with the averaged weights if there are any. The global random state is restored.
    In a network in train mode, parts in eval mode stay so, such as frozen batch norm, unless all layers are.
    In a process group of several ranks all of them call `fit`: each takes its part of every batch, the first one
    alone writes files. The logger `banach.train` reports plan, epochs and resumption at level INFO.

    Args:
        net: the network; it is moved to the device.
        train: images to train on; or a DataLoader or another iterable with a length, whose batches are (inputs,
            targets): inputs a tensor, or a tuple of tensors for a Q that takes several. The batch size is then
            that of the data, and (settings.seed, epoch) decide what samplers and data sets draw.
        validation: data of either kind to validate on after every epoch; None: nothing is validated.
        settings: how to train.
        loss: loss(output, targets), the mean over the batch. None: cross entropy.
        metrics: by name, f(output, targets): a value per sample, or their mean. None: accuracy, if `loss` is None.
            The metric named accuracy, or else the validation loss, chooses the best checkpoint.
        augment: changes the training images.
        run: a run directory. Training goes on from its last checkpoint, on a CPU bit by bit as if it had never
            stopped. SIGINT, SIGTERM and SIGHUP make it checkpoint and return.
        on_epoch, on_step: called after every epoch and step.
        on_plan: called with the `Plan` that says how steps run, before the first step and when it changes.
    Returns:
        History, the epochs that are done.
    Raises:
        DivergenceError: if a step was not finite and `settings.on_nonfinite` does not help.
        TypeError, ValueError: if the data are not of these kinds, or the settings do not apply to them.
        CheckpointError, RunError: if the run directory is damaged, or of another run.
    """
    device, objective = settings.torch_device, Objective.of(loss, metrics)
    _check(net, train, validation, settings, objective)
    sparse = [name for name, t in net.state_dict().items() if getattr(t, "layout", torch.strided) != torch.strided]
    if sparse and run is not None:
        raise ValueError(f"a checkpoint holds dense tensors, got {sparse[0]}; register it with persistent=False")
    if settings.on_nonfinite == "rewind" and run is None:
        raise ValueError("on_nonfinite='rewind' needs checkpoints; pass run=, or choose stop or skip")
    ranks = Ranks.here()
    data = _placed(train, settings, ranks)
    held = None if validation is None else _placed(validation, settings, ranks)
    ranks.check(net, len(data), settings)
    batches: Any = data
    if isinstance(data, Images):
        batches = Batches(data, settings.batch_size, settings.seed, augment, part=(ranks.rank, ranks.count))
    elif augment is not None:
        raise ValueError(f"augment applies to Images, got {data}; let the data set change its samples")
    ranks.prepare(net.to(device), settings)
    state = TrainState(net, batches, held, settings, ranks, objective)
    training = _Training(state, run, on_epoch, on_step, on_plan)
    with ExitStack() as stack:
        if run is not None:
            if ranks.first:
                stack.enter_context(lock(run.path))
            training.resume(run)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(arithmetic(settings.precision, device, search=settings.fast or None))
        if isinstance(net, ImplicitNetwork) and isinstance(net.backward, Implicit):
            counting = replace(net.backward, count=state.counted)  # J-products, on the device
            stack.enter_context(assigned([(net, "backward", counting)]))
        stopped = training.train(stack.enter_context(noted_signals(run is not None)))
    if state.average is not None:
        state.average.put_into(net)
    net.eval()
    return History(tuple(state.done), state.epoch >= settings.epochs, stopped or None)


def _check(net: nn.Module, train: Any, validation: Any, settings: Settings, objective: Objective) -> None:
    """Refuse the test split, and settings that do not apply to the network or the loss."""
    for name, given in (("train", train), ("validation", validation)):
        if isinstance(given, Images) and given.split == "test":
            raise ValueError(f"{name} is the test split, which chooses nothing; give images of another split")
    if settings.label_smoothing and objective.loss is not cross_entropy:
        raise ValueError("label_smoothing applies to cross entropy, got another loss; set label_smoothing=0")
    if Penalties.of(settings) and (not isinstance(net, ImplicitNetwork) or net.tolerance.max_steps == 0):
        needs = "jacobian_penalty and correction need a network with a fixed point"
        raise ValueError(f"{needs}, got {type(net).__name__} without one; set both to 0")


def _placed(data: Images | Iterable[Any], settings: Settings, ranks: Ranks) -> Images | Loader:
    """Return images on the device, and other data as a `Loader` that moves batches there."""
    if isinstance(data, Images):
        return data.to(settings.torch_device)
    if ranks.count > 1:
        text = f"{ranks.count} ranks can train on Images only, got {type(data).__name__}"
        raise ValueError(f"{text}; start one process, or use Lightning or accelerate (see examples/)")
    return Loader(data, settings.torch_device, settings.seed)


@dataclass(eq=False)
class _Training:
    """The loop of `fit` over epochs and steps, with the files that it writes to the run directory."""

    state: TrainState
    run: Run | None
    on_epoch: Callable[[Epoch], None] | None
    on_step: Callable[[Position], None] | None
    on_plan: Callable[[Plan], None] | None
    shown: Plan | None = None

    def resume(self, run: Run) -> None:
        """Continue from the newest checkpoint of the run, if it has one."""
        state, ranks = self.state, self.state.ranks
        run.check(state.settings)
        if ranks.first:
            run.clean()
        if (checkpoint := run.latest()) is not None:
            state.restore(checkpoint)
            logger.info("resume %s at %s", run.path, state.position.name)
            if ranks.first:
                run.write_metrics(state.done)
        if (place := ranks.from_first(lambda: state.position)) != state.position:
            text = f"the first rank resumes {run.path} at {place.name}, this one at {state.position.name}"
            raise RunError(f"{text}; put the run on a disk that all ranks share")
        if state.settings.on_nonfinite == "rewind" and not state.position > Position(0, 0):
            self._save()  # something to return to

    def train(self, signals: list[int]) -> int:
        """Train until the last epoch is done, or until a signal, which is returned; 0 if there was none."""
        state, run, ranks, settings = self.state, self.run, self.state.ranks, self.state.settings
        self.steps = Stepper(state)
        if state.epoch < settings.epochs:
            self.steps.prepare()
            self._show_plan()
        # A capture that failed in training is not tried again: one warning is enough.
        fast = settings.fast and not self.steps.failed
        scorer = Scorer(state.net, settings.precision, fast=fast, ranks=ranks)
        stopped = ranks.agree(signals)
        while state.epoch < settings.epochs and not stopped:
            stopped = self._train_epoch(signals, scorer)
        if run is not None and (state.step or ranks.from_first(lambda: run.latest() is None)):
            self._save()
        return stopped

    def _train_epoch(self, signals: list[int], scorer: Scorer) -> int:
        """Take the remaining steps of an epoch, unless a signal stops them or they are rewound."""
        state, every = self.state, self.state.settings.checkpoint_every
        state.set_train_mode()
        for _ in range(state.step, len(state.batches)):
            self.steps.take()
            self._show_plan()
            state.step += 1
            if self.on_step is not None:
                self.on_step(state.position)
            stopped = self.state.ranks.agree(signals)
            due = every > 0 and state.step % every == 0 and state.step < len(state.batches)  # else at its end
            if rewound(state, self.run, self.steps.watch, now=stopped > 0 or due):
                self.steps = Stepper(state)  # captured steps point to the old state of the optimizer
                return stopped
            if due:
                self._save()
            if stopped:
                return stopped
        self._end_epoch(scorer)
        return self.state.ranks.agree(signals)

    def _end_epoch(self, scorer: Scorer) -> None:
        """Validate, report the epoch, and write a checkpoint and the metrics."""
        state = self.state
        state.end_epoch(_measure_epoch(state, scorer))
        found = ((name, getattr(state.done[-1], name)) for name in _LOGGED)
        line = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in found if value is not None)
        logger.info("epoch %d of %d: %s", state.epoch, state.settings.epochs, line)
        try:
            if self.on_epoch is not None:
                self.on_epoch(state.done[-1])
        finally:  # after it: what it writes is never behind a checkpoint, even if interrupted here
            self._save()
            if self.run is not None and self.state.ranks.first:
                self.run.write_metrics(state.done)
        state.begin_clock()  # the next epoch's time and memory do not include callbacks and files

    def _show_plan(self) -> None:
        """Log how steps run if that has changed, store it in the run, and call on_plan."""
        plan = self.steps.step.plan
        if plan is self.shown or plan == self.shown:
            return
        self.shown = plan
        logger.info("%s", plan)
        if self.run is not None and self.state.ranks.first:
            self.run.write_plan(plan.to_dict())
        if self.on_plan is not None:
            self.on_plan(plan)

    def _save(self) -> None:
        """Write a checkpoint, if there is a run: the first rank alone, or all of them their shards."""
        state, ranks = self.state, self.state.ranks
        if self.run is None:
            return
        if state.step:
            ranks.pool(state)
        tensors = state.tensors()
        if ranks.first:
            self.run.save(state.position, tensors, state.plain_values())
        elif is_sharded(*tensors.values()):
            write_shards(tensors)
        ranks.go_on(state)


def _measure_epoch(state: TrainState, scorer: Scorer) -> Epoch:
    """Validate, and return the figures of the epoch. Syncs with the host."""
    state.ranks.pool(state)
    figures: dict[str, Any] = {
        **vars(state.metrics.read()),
        "lr": state.rate(state.step - 1),
        "products": int(state.counted),
        "seconds": state.seconds,  # of training; the device has finished
        "warm_up": state.warm_up,
        # Before the validation, which in batches of another size has another peak.
        "memory": torch.cuda.max_memory_allocated(state.device) if state.device.type == "cuda" else None,
    }
    net = state.net.eval()
    epoch = Epoch(epoch=state.epoch + 1, **figures, **_validate(state, scorer), sigma=_contraction(state))
    few = [one for one in (*state.done, epoch) if one.converged is not None and one.converged < _FEW]
    if few == [epoch] and networks_in(net)[0].tolerance.check_every != 0:  # at a fixed depth that is meant
        text = f"in epoch {epoch.epoch} only {epoch.converged:.1%} of the samples converged"
        warn_user(f"{text}; try more max_steps or a larger tolerance", ConvergenceWarning)
    return epoch


def _validate(state: TrainState, scorer: Scorer) -> dict[str, Any]:
    """Validate with the averaged weights if there are any, copied into the network, where the scorer sees them."""
    kept = ("loss", "accuracy", "depth", "converged")
    if state.validation is None:
        return {f"validation_{name}": None for name in kept}
    with nullcontext() if state.average is None else state.average.inside(state.net):
        found = measure(scorer, state.validation, state.settings.batch_size, objective=state.objective)
    return {f"validation_{name}": getattr(found, name) for name in (*kept, "metrics")}


def _contraction(state: TrainState) -> float | None:
    """Return the largest sigma_max(dT/du) on a few training samples, in eval mode; None if R is sharded."""
    net, data, settings = state.net, state.batches, state.settings
    wanted = settings.monitor and not (settings.sharded and state.ranks.count > 1)
    if not wanted or not isinstance(net, ImplicitNetwork) or net.tolerance.max_steps == 0:
        return None
    samples = slice(state.monitor.samples)
    few: Any = data.few if isinstance(data, Loader) else data.images.normalise(data.images.pixels[samples])
    try:
        state.monitor(net, few)
    except RuntimeError as error:  # such as of a layer without second derivative
        if len(state.done) == 0:
            said = " ".join(str(error).split())
            warn_user(f"the contraction of R cannot be measured, so it is skipped: {said}", UserWarning)
        return None
    return state.monitor.history[-1].sigma
