"""fit(): the one training loop, for every backward mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from banach.backward import Implicit
from banach.data import Augmentation, Batches, Images
from banach.fast.plan import Plan
from banach.train.checkpoint import Position
from banach.train.evaluate import Scorer, evaluate
from banach.train.metrics import Epoch, History
from banach.train.penalties import Penalties
from banach.train.precision import arithmetic
from banach.train.run import Run, lock, noted_signals
from banach.train.settings import Settings
from banach.train.state import TrainState
from banach.train.steps import Steps

_WATCHED = 8  # images on which the contraction is measured after every epoch


def fit(
    net: nn.Module,
    train: Images,
    validation: Images | None,
    settings: Settings,
    *,
    augment: Augmentation | None = None,
    run: Run | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    on_step: Callable[[Position], None] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> History:
    """Train a network by cross entropy, on the device of the settings.

    Afterwards it is in eval mode, with the averaged weights if there are any. The global random state is restored.

    Args:
        net: the network; it is moved to the device.
        train: images to train on.
        validation: images to validate on after every epoch; None: nothing is validated.
        settings: how to train.
        augment: changes the training images.
        run: a run directory. Training goes on from its last checkpoint, on a CPU bit by bit as if it had never
            stopped. SIGINT and SIGTERM make it checkpoint and return.
        on_epoch, on_step: called after every epoch and step.
        on_plan: called once, before the first step, with the `Plan` that says how steps run.
    """
    device = settings.torch_device
    _check_splits(train, validation)
    if (penalties := Penalties.of(settings)) is not None:
        penalties.check(net)
    batches = Batches(train.to(device), settings.batch_size, settings.seed, augment)
    held = None if validation is None else validation.to(device)
    state = TrainState(net.to(device), batches, held, settings)
    identity = state.identity()

    def save() -> None:
        if run is not None:
            run.save(state.position, state.tensors(), state.state(identity))

    with ExitStack() as stack:
        if run is not None:
            stack.enter_context(lock(run.path))
            _resume(run, state, identity)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(arithmetic(settings.precision, device, search=settings.fast or None))
        stack.enter_context(_counting(state))
        signals = stack.enter_context(noted_signals(run is not None))
        steps = Steps(state)
        scorer: Scorer | None = None
        if state.epoch < settings.epochs:
            steps.prepare()
            _report(steps.plan, run, on_plan)
        while state.epoch < settings.epochs and not signals:
            net.train()
            for _ in range(state.step, len(batches)):
                steps.take()
                state.step += 1
                if on_step is not None:
                    on_step(state.position)
                if _is_due(state):
                    save()
                if signals:
                    break
            else:
                # A capture that failed in training is not tried again: one warning is enough.
                fast = settings.fast and not steps.failed
                scorer = scorer or Scorer(net, settings.precision, fast=fast)
                state.end_epoch(_look_back(state, scorer))
                try:
                    if on_epoch is not None:
                        on_epoch(state.done[-1])
                finally:  # after it: what it writes is never behind a checkpoint, even if interrupted here
                    if run is not None:
                        save()
                        run.write_metrics(state.done)
                state.begin_clock()  # the next epoch's time and memory do not include callbacks and files
        if run is not None and (state.step or run.latest() is None):
            save()
    if state.average is not None:
        state.average.put_into(net)
    net.eval()
    return History(tuple(state.done), state.epoch >= settings.epochs, signals[0] if signals else None)


def _report(made: Plan, run: Run | None, on_plan: Callable[[Plan], None] | None) -> None:
    """Write the plan to the run's environment.json, and call the user."""
    if run is not None:
        run.write_plan(made.to_dict())
    if on_plan is not None:
        on_plan(made)


def _look_back(state: TrainState, scorer: Scorer) -> Epoch:
    """Read what the epoch came to: the only host sync of the loop."""
    seen, lr, products = state.metrics.read(), state.rate(state.step - 1), state.products
    seconds = state.seconds  # of training; the device has finished
    # Of training too: a validation in batches of another size has another peak.
    memory = torch.cuda.max_memory_allocated(state.device) if state.device.type == "cuda" else None
    state.net.eval()
    held = _validate(state, scorer)
    sigma = _contraction(state)
    return Epoch(
        epoch=state.epoch + 1,
        **vars(seen),
        **held,
        lr=lr,
        sigma=sigma,
        products=products,
        seconds=seconds,
        memory=memory,
        warm_up=state.warm_up,
    )


def _validate(state: TrainState, scorer: Scorer) -> dict[str, Any]:
    """Validate with the averaged weights if there are any, copied into the network, where the scorer sees them."""
    kept = ("loss", "accuracy", "depth", "converged")
    if state.validation is None:
        return {f"validation_{name}": None for name in kept}
    averaged = nullcontext() if state.average is None else state.average.inside(state.net)
    with averaged:
        found = evaluate(
            state.net,
            state.validation,
            batch_size=state.settings.batch_size,
            precision=state.settings.precision,
            scorer=scorer,
        )
    return {f"validation_{name}": getattr(found, name) for name in kept}


def _contraction(state: TrainState) -> float | None:
    """Return the largest sigma_max(dT/du) on a few training images, in eval mode."""
    net: Any = state.net
    if not state.settings.monitor or not state.implicit or net.tolerance.max_steps == 0:
        return None
    images = state.batches.images
    try:
        state.monitor(net, images.normalise(images.pixels[:_WATCHED]))
    except RuntimeError as error:  # such as of a layer without second derivative
        if len(state.done) == 0:
            said = " ".join(str(error).split())
            warnings.warn(f"the contraction of R cannot be measured, so it is skipped: {said}", stacklevel=2)
        return None
    return state.monitor.history[-1].sigma


def _is_due(state: TrainState) -> bool:
    """Return True if a checkpoint is due within the epoch; there is always one at its end."""
    every = state.settings.checkpoint_every
    return every > 0 and state.step % every == 0 and state.step < len(state.batches)


def _resume(run: Run, state: TrainState, identity: dict[str, str]) -> None:
    run.check(state.settings)
    checkpoint = run.latest()
    if checkpoint is not None:
        state.restore(checkpoint, identity)
        run.write_metrics(state.done)


def _check_splits(train: Images, validation: Images | None) -> None:
    for name, images in (("train", train), ("validation", validation)):
        if images is not None and images.split == "test":
            raise ValueError(
                f"{name} is the test split, which chooses nothing: give {name} images of another split"
            )


@contextmanager
def _counting(state: TrainState) -> Iterator[None]:
    """Count J-products and keep calling the user's `report`.

    Not with check_every=0, where a report would sync with the host at every step.
    """
    net: Any = state.net
    mode = net.backward if state.implicit else None
    if not isinstance(mode, Implicit) or not mode.checked:
        yield
        return

    def report(products: int, residual: Tensor, status: Any) -> None:
        state.products += products
        if mode.report is not None:
            mode.report(products, residual, status)

    net.backward = replace(mode, report=report)
    try:
        yield
    finally:
        net.backward = mode
