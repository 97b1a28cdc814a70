"""What a checkpoint must hold: names, shapes and dtypes of its tensors, and the types of its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from banach import checks
from banach.train.metrics import Epoch
from banach.train.shards import local

KEYS = ("epoch", "step", "products", "seconds", "warned", "done", "identity")  # of a complete state
_LATER = {"rewinds": 0, "tensors": None}  # keys that older checkpoints do not have, and what they mean without
_COUNTS = [0, 2, 3, 4, 6, 7]  # entries of tally.sums that count


def check_state(state: Any) -> dict[str, Any]:
    """Return the state of a checkpoint with the keys of `KEYS` and `_LATER`.

    Raises:
        ValueError: if a key is missing or a value has the wrong type.
    """
    if not isinstance(state, dict):
        raise ValueError(f"the state must be a table, got {_short(state)}")
    if missing := [key for key in KEYS if key not in state]:
        raise ValueError(f"state.json has no {', '.join(missing)}")
    state = {**_LATER, **state}
    if unknown := sorted({*state} - {*KEYS, *_LATER}):
        raise ValueError(f"state.json has an unknown key {_short(unknown[0])}")
    for key in ("epoch", "step", "products", "rewinds"):
        checks.whole(key, state[key])
    checks.number("seconds", state["seconds"])
    if not isinstance(state["warned"], bool):
        raise ValueError(f"warned must be true or false, got {_short(state['warned'])}")
    if state["tensors"] is not None:
        checks.whole("tensors", state["tensors"])
    named = state["identity"]
    if not isinstance(named, dict) or not all(isinstance(value, str) for value in named.values()):
        raise ValueError(f"identity must be a table of strings, got {_short(named)}")
    _check_epochs(state["done"], state["epoch"])
    return state


def _check_epochs(done: Any, count: int) -> None:
    if not isinstance(done, list) or not all(isinstance(values, dict) for values in done):
        raise ValueError(f"done must be a list of tables, got {_short(done)}")
    numbers = [Epoch.from_dict(values).epoch for values in done]
    if len(done) != count or numbers != list(range(1, count + 1)):
        raise ValueError(f"done must hold the epochs 1 to {_short(count)}, got {_short(numbers)}")


def check_tensors(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse other names, shapes or dtypes than those of `wanted`.

    Raises:
        ValueError: if something differs.
    """
    for name in sorted({*got, *wanted}):
        if name not in got or name not in wanted:
            raise ValueError(f"{_short(name)} is {'missing' if name in wanted else 'not expected'}")
        here, own = (f"{tuple(t.shape)} of {t.dtype}" for t in (got[name], wanted[name]))
        if here != own:
            raise ValueError(f"{name} has the shape {here}, expected {own}")


def optimizer_tensors(
    got: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, keys: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return tensors as the optimizer's state must have them, by "INDEX.KEY", for the weights that `got` names.

    A weight that never had a gradient has no state, so not every index needs to occur.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    step = torch.zeros((), dtype=torch.get_default_dtype())
    indices = {name.partition(".")[0] for name in got}
    found = [index for index in range(len(weights)) if str(index) in indices]
    return {f"{index}.{key}": step if key == "step" else weights[index] for index in found for key in keys}


def check_tally(sums: Tensor, most: Tensor) -> None:
    """Refuse counts that no epoch can have.

    Raises:
        ValueError: if a count is negative or not finite.
    """
    counts = torch.cat([sums[_COUNTS], most[:1]])
    if not bool((counts.isfinite() & (counts >= 0)).all()):
        raise ValueError(f"the tally must hold counts, got {counts.tolist()}")


def nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a weight, buffer or optimizer state that is NaN or infinite, None if all are finite."""
    for name, tensor in ((name, local(tensor)) for name, tensor in tensors.items()):
        if not name.startswith("tally.") and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return name
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
