"""Does T mix the samples of a batch, or draw at random? A probe of a few evaluations."""

import enum
from typing import Any

import torch
from torch import Tensor

from banach.latent import Latent, Space, detach
from banach.solve.context import no_derivatives, rounding
from banach.solve.solver import Map


class Fault(enum.Enum):
    """What is wrong with a T whose samples were taken to be independent."""

    MIXES = "T mixes samples: pass coupled=True, so that the batch stops as one"
    RANDOM = (
        "T gives another value each time it is evaluated at the same z: it draws at random; "
        "use banach.nn.Dropout or banach.nn.convert_dropout(R)"
    )


def mixes_samples(T: Map, z: Latent, inputs: tuple[Any, ...] = ()) -> bool:
    """Return True if the value of T at one sample depends on another sample of z.

    At most three evaluations without autograd: every second row of z is moved up, then down, since T may be flat
    in one direction; the rows between must not change. The probe cannot see a dependence between rows of one
    parity only.

    Args:
        T: the map, called as T(z, *inputs).
        z: a latent, a tensor or a nest of tensors that share axis 0 (the batch).
        inputs: further tensors for T.
    """
    return probe(T, z, inputs) is Fault.MIXES


@no_derivatives
def probe(T: Map, z: Latent, inputs: tuple[Any, ...] = (), row: int | None = None) -> Fault | None:
    """Return what keeps the samples of T from being independent, None if nothing was found.

    With `row`, all other rows are moved, and this one must not change. If it does, one more evaluation tells
    random numbers from mixing.
    """
    z, inputs = detach(z), detach(tuple(inputs))
    space = Space.of(z)
    rows = space.rows(z, "z")
    if len(rows) < 2 or not rows.numel():
        return None
    number = torch.arange(len(rows), device=rows.device)
    watched = number % 2 == 1 if row is None else number == row
    before = space.rows(T(z, *inputs)).clone()  # T may write its next value into the same memory
    # Far, but of the size of the rows: small changes can vanish in a ReLU or in rounding.
    size = torch.linalg.vector_norm(rows, dim=1, keepdim=True) / rows.shape[1] ** 0.5
    move = size.clamp(min=1.0) * (torch.cos(torch.arange(rows.shape[1], device=rows.device).to(rows)) + 1.5)
    for sign in (1, -1):
        moved = torch.where(watched[:, None], rows, torch.nan_to_num(rows + sign * move))
        try:
            after = space.rows(T(space.nest(moved), *inputs))
        except Exception:  # T need not be defined where no iterate has been
            continue
        if differ(before[watched], after[watched], space):
            break
    else:
        return None
    again = space.rows(T(space.nest(rows.clone()), *inputs))
    return Fault.RANDOM if differ(before[watched], again[watched], space) else Fault.MIXES


def differ(before: Tensor, after: Tensor, space: Space) -> bool:
    """Do rows that are finite in both differ by more than rounding?"""
    finite = before.isfinite().all(1) & after.isfinite().all(1)
    allowed = min(100 * rounding(space), 1e-2) * before.abs().amax(1).clamp(min=1e-30)
    return bool((finite & ((after - before).abs().amax(1) > allowed)).any())
