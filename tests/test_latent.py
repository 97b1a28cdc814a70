"""What a latent is: nests, rows and back, layouts, types, and what is refused."""

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


def test_resized_and_spread() -> None:
    space = Space.of({"a": torch.zeros(4, 3), "b": torch.zeros(4)})
    assert space.resized(2).nest(torch.zeros(2, 4))["a"].shape == (2, 3)
    assert space.spread(torch.arange(4)).tolist() == [0, 1, 2, 3]
    assert Space.of(torch.zeros(3, 2), coupled=True).spread(torch.tensor([7])).tolist() == [7, 7, 7]
