"""What a latent is: nests, rows and back, layouts, types, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from banach.latent import Space, detach, leaves, leaves_like, map_leaves, rebuild, select
from problems import normal


class Pair(NamedTuple):
    left: Any
    right: Any


A, B, C = normal(2, 3, dtype=torch.float32), normal(2, dtype=torch.float32), normal(2, 2, 2, dtype=torch.float32)
NESTS: dict[str, Any] = {
    "tensor": A,
    "tuple": (A, B),
    "list": [A, B, C],
    "ordered": OrderedDict(x=A, y=B),
    "named": Pair(A, (B, C)),
    "deep": {"x": [A, {"y": (B,)}], "z": C},
    "one": (A,),
}
nests = pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS.keys())
couplings = pytest.mark.parametrize("coupled", [False, True])


def structure(nest: Any) -> Any:
    """The nest without its tensors, types included."""
    if isinstance(nest, Tensor):
        return None
    if isinstance(nest, dict):
        return (type(nest), {key: structure(part) for key, part in nest.items()})
    return (type(nest), *[structure(part) for part in nest])


@nests
def test_leaves_and_back(nest: Any) -> None:
    parts = leaves(nest)
    again = rebuild(nest, parts)
    assert structure(again) == structure(nest)
    assert all(a is b for a, b in zip(leaves(again), parts, strict=True))
    doubled = map_leaves(lambda a, b: a + b, nest, nest)
    assert structure(doubled) == structure(nest)
    assert all(torch.equal(twice, 2 * once) for twice, once in zip(leaves(doubled), parts, strict=True))
    free = detach(map_leaves(lambda leaf: leaf.clone().requires_grad_(), nest))
    assert structure(free) == structure(nest)
    assert not any(leaf.requires_grad for leaf in leaves(free))


def test_dictionaries_may_list_their_keys_in_any_order() -> None:
    parts = leaves_like({"x": A, "y": B}, {"y": B, "x": A}, "T")
    assert parts[0] is A
    assert parts[1] is B


def test_select_keeps_layout_and_order() -> None:
    image = normal(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    picked = select({"image": image, "number": torch.arange(4.0)}, torch.tensor([3, 1]))
    assert picked["number"].tolist() == [3.0, 1.0]
    assert torch.equal(picked["image"], image[[3, 1]])
    assert picked["image"].is_contiguous(memory_format=torch.channels_last)


@nests
@couplings
def test_rows_and_back(nest: Any, coupled: bool) -> None:
    space = Space.of(nest, coupled=coupled)
    rows = space.rows(nest)
    samples = [torch.cat([leaf[i].flatten() for leaf in leaves(nest)]) for i in range(2)]  # a row is one sample
    parts = [leaf.flatten() for leaf in leaves(nest)]
    assert torch.equal(rows, torch.cat(parts)[None] if coupled else torch.stack(samples))
    assert sum(space.sizes) == rows.shape[1]
    back = space.nest(rows)
    assert structure(back) == structure(nest)
    assert all(torch.equal(a, b) for a, b in zip(leaves(back), leaves(nest), strict=True))
    assert (space.batch, space.samples) == (2, 1 if coupled else 2)
    # A space is held by graphs and closures: the tensors it remembers are empty.
    assert all(leaf.untyped_storage().nbytes() == 0 for leaf in leaves(space.template))


FORMATS = [(4, torch.contiguous_format), (4, torch.channels_last), (5, torch.channels_last_3d)]


@pytest.mark.parametrize(("dim", "memory"), FORMATS, ids=str)
@couplings
def test_one_tensor_is_viewed_not_copied(dim: int, memory: torch.memory_format, coupled: bool) -> None:
    z = normal(2, 3, *[4] * (dim - 2)).contiguous(memory_format=memory)
    space = Space.of(z, coupled=coupled)
    rows = space.rows(z)
    back = space.nest(rows)
    assert rows.is_contiguous()
    assert rows.data_ptr() == back.data_ptr() == z.data_ptr()
    assert back.stride() == z.stride()
    assert torch.equal(back, z)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rows_are_in_at_least_float32(dtype: torch.dtype, autocast: bool) -> None:
    z, long = torch.ones(2, 3, dtype=dtype), torch.float64 if dtype == torch.float64 else torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        space = Space.of(z)
    assert space.autocast is autocast
    assert space.rows(z).dtype == long
    assert space.nest(space.rows(z)).dtype == space.dtype == (long if autocast else dtype)


def test_a_number_is_one_coupled_sample() -> None:
    space = Space.of(torch.tensor(3.0))
    assert (space.batch, space.samples, space.coupled) == (1, 1, True)
    assert space.rows(torch.tensor(3.0)).shape == (1, 1)
    assert space.nest(torch.full((1, 1), 4.0)).shape == ()
    mixed = Space.of((torch.zeros(5, 2), torch.tensor(0.0)))
    assert (mixed.batch, mixed.samples, mixed.sizes) == (5, 1, (10, 1))


@pytest.mark.parametrize(("shape", "rows"), [((0,), (0, 1)), ((0, 3), (0, 3)), ((2, 0, 4), (2, 0))])
@couplings
def test_nothing_is_a_latent_too(shape: tuple[int, ...], rows: tuple[int, ...], coupled: bool) -> None:
    z = torch.zeros(shape)
    space = Space.of(z, coupled=coupled)
    assert space.rows(z).shape == ((1, 0) if coupled else rows)
    assert space.nest(space.rows(z)).shape == shape


def test_resized_and_spread() -> None:
    space = Space.of({"a": torch.zeros(4, 3), "b": torch.zeros(4)})
    assert space.resized(2).nest(torch.zeros(2, 4))["a"].shape == (2, 3)
    assert space.spread(torch.arange(4)).tolist() == [0, 1, 2, 3]
    assert Space.of(torch.zeros(3, 2), coupled=True).spread(torch.tensor([7])).tolist() == [7, 7, 7]
