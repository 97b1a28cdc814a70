"""What a latent is: a tensor, or a nest (tuple, list, dict) of tensors that share the batch axis.

Inside the library a latent is a matrix, one row per sample: `Space` knows the way there and back.
For one tensor both ways are views, in the order the memory already has (so channels_last survives);
for a nest the way there is one concatenation, and the way back copies images, which then have no gaps in memory.
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

# A nest of tensors. Recursive types gain nothing here: every function below walks it in the same way.
Latent = Any

_SHORT = (torch.bfloat16, torch.float16)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def leaves(nest: Latent, what: str = "a latent") -> list[Tensor]:
    """Return the tensors of a nest, dictionaries in the order of their own keys."""
    if isinstance(nest, Tensor):
        return [nest]
    if isinstance(nest, dict):
        return [leaf for part in nest.values() for leaf in leaves(part, what)]
    if isinstance(nest, (tuple, list)):
        return [leaf for part in nest for leaf in leaves(part, what)]
    raise TypeError(f"{what} must be a tensor or a tuple, list or dict of tensors, got {type(nest).__name__}")


def leaves_like(template: Latent, nest: Latent, what: str) -> list[Tensor]:
    """Return the tensors of `nest` in the order of `template`: dictionaries may list their keys in any order."""
    if isinstance(template, Tensor):
        if isinstance(nest, Tensor):
            return [nest]
    elif isinstance(template, dict):
        if isinstance(nest, dict) and nest.keys() == template.keys():
            return [leaf for key in template for leaf in leaves_like(template[key], nest[key], what)]
    elif isinstance(nest, (tuple, list)) and len(nest) == len(template):
        pairs = zip(template, nest, strict=True)
        return [leaf for a, b in pairs for leaf in leaves_like(a, b, what)]
    raise TypeError(f"{what} must keep the structure of z0: expected {outline(template)}, got {outline(nest)}")


def versions(tensors: list[Tensor]) -> list[int | None]:
    """Return how often each tensor was written to; None where that is not counted."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def rebuild(template: Latent, parts: Iterable[Tensor]) -> Latent:
    """Return the nest shaped like `template` whose tensors are `parts`."""
    parts = iter(parts)  # an iterator stays what it is: each call below takes what it needs
    if isinstance(template, Tensor):
        return next(parts)
    if isinstance(template, dict):
        made = {key: rebuild(part, parts) for key, part in template.items()}
        return OrderedDict(made) if isinstance(template, OrderedDict) else made
    children = [rebuild(part, parts) for part in template]
    return type(template)(*children) if hasattr(template, "_fields") else type(template)(children)


def map_leaves(function: Callable[..., Tensor], nest: Latent, *others: Latent) -> Latent:
    """Apply `function` to every tensor of a nest, and to those of `others` that stand in its place."""
    columns = [leaves(nest), *(leaves_like(nest, other, "T") for other in others)]
    return rebuild(nest, [function(*row) for row in zip(*columns, strict=True)])


def detach(nest: Latent) -> Latent:
    """Return the same values without a gradient."""
    if isinstance(nest, Tensor):
        return nest.detach()
    if type(nest) is tuple:
        return tuple([detach(part) for part in nest])
    return map_leaves(Tensor.detach, nest)


def select(nest: Latent, index: Tensor) -> Latent:
    """Return the samples of a nest that `index` names, along the batch axis."""
    # Not `index_select`, which forgets that an image was channels_last.
    return map_leaves(lambda leaf: leaf[index], nest)


def outline(nest: Latent) -> str:
    """Return the structure of a nest as text."""
    if isinstance(nest, dict):
        return "{" + ", ".join(f"{key!r}: {outline(part)}" for key, part in nest.items()) + "}"
    if isinstance(nest, (tuple, list)):
        return "(" + ", ".join(outline(part) for part in nest) + ")"
    return "tensor" if isinstance(nest, Tensor) else type(nest).__name__


@dataclass(frozen=True)
class Space:
    """The layout of one latent, and the way between the user's nest and a matrix of rows.

    Coupled samples (and a 0-d latent) are one row. Rows are in at least float32, whatever the
    latent's own type; the nest handed back is in `dtype`, which is the latent's own, except that under
    autocast a half-precision latent becomes float32.
    """

    template: Latent
    shapes: tuple[tuple[int, ...], ...]  # of each leaf, batch axis included
    last: tuple[bool, ...]  # is the leaf channels_last in memory?
    dtype: torch.dtype
    device: torch.device
    coupled: bool
    autocast: bool
    sizes: tuple[int, ...] = field(init=False)  # columns that each leaf takes in the matrix
    is_matrix: bool = field(init=False)  # the latent is a matrix of rows already

    def __post_init__(self) -> None:
        start = 0 if self.coupled else 1
        one = len(self.shapes) == 1 and isinstance(self.template, Tensor) and not self.coupled
        object.__setattr__(self, "sizes", tuple([math.prod(shape[start:]) for shape in self.shapes]))
        object.__setattr__(self, "is_matrix", one and len(self.shapes[0]) == 2 and self.dtype not in _SHORT)

    @staticmethod
    def of(z0: Latent, *, coupled: bool = False) -> "Space":
        if isinstance(z0, Tensor):
            device = z0.device
            autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)  # meta tensors have none
            make = _space.__wrapped__ if torch.compiler.is_compiling() else _space
            return make(z0.shape, z0.dtype, device, _is_channels_last(z0), coupled, autocast)
        parts = leaves(z0)
        if not parts:
            raise ValueError("z0 must hold at least one tensor, got an empty nest")
        first = Space.of(parts[0], coupled=coupled or any(not leaf.dim() for leaf in parts))
        for leaf in parts[1:]:
            if leaf.dtype != parts[0].dtype:
                types = f"{_name(parts[0].dtype)} and {_name(leaf.dtype)}"
                raise TypeError(f"the tensors of z0 must share one dtype, got {types}")
            if not first.coupled and leaf.shape[0] != first.batch:
                lengths = f"{first.batch} and {leaf.shape[0]} rows"
                raise ValueError(f"the tensors of z0 must share their first (batch) axis, got {lengths}")
        return replace(
            first,
            template=rebuild(z0, [first.template] * len(parts)),
            shapes=tuple(tuple(leaf.shape) for leaf in parts),
            last=tuple(_is_channels_last(leaf) for leaf in parts),
        )

    @property
    def batch(self) -> int:
        """How many samples the user counts: the length of the first axis; a 0-d latent is one."""
        return self.shapes[0][0] if self.shapes[0] else 1

    @property
    def samples(self) -> int:
        """How many samples stop on their own: the rows of the matrix."""
        return 1 if self.coupled else self.batch

    @property
    def rows_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype in _SHORT else self.dtype

    def rows(self, nest: Latent, what: str = "T") -> Tensor:
        """Return the nest as a matrix (samples, width); a view where that is possible."""
        if isinstance(nest, Tensor) and isinstance(self.template, Tensor):  # the common case, kept short
            self._check_same(nest, self.shapes[0], what)
            flat = self._flatten(nest, self.last[0])
            return flat if flat.dtype == self.rows_dtype else flat.to(self.rows_dtype)
        return torch.cat(self.columns(self.check(nest, what)), 1).to(self.rows_dtype)

    def columns(self, parts: list[Tensor]) -> list[Tensor]:
        """Return each leaf as the columns that it takes in the matrix."""
        return list(map(self._flatten, parts, self.last))

    def check(self, nest: Latent, what: str = "T") -> list[Tensor]:
        """Return the tensors of a nest; refuse another structure, shape, dtype or device."""
        parts = leaves_like(self.template, nest, what)
        for leaf, shape in zip(parts, self.shapes, strict=True):
            self._check_same(leaf, shape, what)
        return parts

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Return the leaves that the rows hold, as views, still in the type of the rows."""
        columns = (rows,) if len(self.shapes) == 1 else rows.split(list(self.sizes), 1)
        return list(map(self._unflatten, columns, self.shapes, self.last))

    def nest(self, rows: Tensor) -> Latent:
        """Return the rows as the user's nest, in the latent's own type."""
        if rows.dtype != self.dtype:
            rows = rows.to(self.dtype)
        if isinstance(self.template, Tensor):
            return self._unflatten(rows, self.shapes[0], self.last[0])
        # Convolutions would copy columns of a matrix at every use.
        return rebuild(self.template, map(_dense, self.parts(rows), self.last))

    def empty(self) -> list[Tensor]:
        """Return leaves of this layout, without gaps in memory and without values."""
        columns = [torch.empty(self.samples, n, dtype=self.dtype, device=self.device) for n in self.sizes]
        return list(map(self._unflatten, columns, self.shapes, self.last))

    def resized(self, batch: int) -> "Space":
        """Return the same layout with another number of samples."""
        return replace(self, shapes=tuple((batch, *shape[1:]) for shape in self.shapes))

    def spread(self, per_row: Tensor) -> Tensor:
        """Return one value per sample the user counts, from one value per row."""
        return per_row.expand(self.batch) if self.coupled else per_row

    def _flatten(self, leaf: Tensor, last: bool) -> Tensor:
        if last:
            leaf = leaf.movedim(1, -1)
        if self.coupled:
            return leaf.reshape(1, -1)
        return leaf if leaf.dim() == 2 else leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]

    def _unflatten(self, columns: Tensor, shape: tuple[int, ...], last: bool) -> Tensor:
        if not last:
            return columns if len(shape) == 2 and not self.coupled else columns.view(shape)
        return columns.view((shape[0], *shape[2:], shape[1])).movedim(-1, 1)

    def _check_same(self, leaf: Tensor, shape: tuple[int, ...], what: str) -> None:
        if leaf.shape != shape:
            got = f"expected {shape}, got {tuple(leaf.shape)}; change it, or the shape of z0"
            raise ValueError(f"{what} must keep the shape of its input: {got}")
        if leaf.dtype != self.dtype and not (self.autocast and leaf.is_floating_point()):
            new = _name(leaf.dtype)
            text = f"{what} must keep the dtype of its input: expected {_name(self.dtype)}, got {new}"
            raise TypeError(f"{text}; give z0 in {new}" if leaf.is_floating_point() else text)
        if leaf.device != self.device:
            text = f"{what} must keep the device of its input: expected {self.device}, got {leaf.device}"
            raise ValueError(f"{text}; put z0 on {leaf.device}")


def _dense(leaf: Tensor, last: bool) -> Tensor:
    """Return an image or volume without gaps in memory, other leaves as they are."""
    if leaf.dim() < 3:
        return leaf
    return leaf.contiguous(memory_format=_CHANNELS_LAST[leaf.dim()] if last else torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def _space(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, last: bool, coupled: bool, autocast: bool
) -> Space:
    """Return the space of one tensor. Cached, since every pass of a network has the same."""
    if not dtype.is_floating_point:
        advice = "iterate on torch.view_as_real(z0)" if dtype.is_complex else "call z0.float()"
        raise TypeError(f"z0 must be of a floating-point dtype, got {_name(dtype)}; {advice}")
    return Space(
        template=torch.empty(0, dtype=dtype, device=device),
        shapes=(tuple(shape),),
        last=(last,),
        dtype=torch.float32 if autocast and dtype in _SHORT else dtype,
        device=device,
        coupled=coupled or len(shape) == 0,
        autocast=autocast,
    )


def _is_channels_last(leaf: Tensor) -> bool:
    memory = _CHANNELS_LAST.get(leaf.dim())
    return memory is not None and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=memory)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
