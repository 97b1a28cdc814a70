"""The solve for a latent by its kernel: sizes of tiles, memory of the programs' own, and the launch.

Nothing here asks the device anything, so a solve can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from banach.kernels.latent_form import WIDEST, LatentMap, Solved, Stop
from banach.kernels.latent_kernel import iterate
from banach.kernels.latent_pack import pack

MOST = 128  # multiprocessors whose programs meet: each of them adds the sums of all
SPINS = 1 << 21  # looks at a meeting before it is given up: a second or two


@dataclass(frozen=True)
class LatentTile:
    """`rows` pixels at a time by `warps` warps, `stages` products' loads in flight, `places` programs on a
    multiprocessor, which must have room for as many: `registers` limits those of a thread, if not zero.

    split: float32 numbers are multiplied as sums of two of 16 bits, on tensor cores; else as they are, far more
    slowly. near: pixels are loaded in pieces so small that they pass through the first cache. stay: the weights
    of a convolution are loaded once for all tiles, and the stages are of tiles; of three rows and not split alone.
    """

    rows: int = 128
    warps: int = 8
    stages: int = 3
    places: int = 1
    split: bool = True
    near: bool = True
    registers: int = 0
    stay: bool = False


@dataclass(frozen=True)
class Sizes:
    """Shapes that follow from the channels, rows and columns of a latent."""

    channels: int
    height: int
    width: int

    @property
    def pitch(self) -> int:
        """Elements from one pixel to the next: it begins on 16 bytes."""
        return -(-self.channels // 8) * 8

    @property
    def columns(self) -> int:
        return max(16, _power_of_two(self.channels))

    @property
    def groups(self) -> int:
        """Rows of the kernel as three products, or its taps as nine, where three channels' worth is too deep."""
        return 3 if 3 * self.pitch <= 128 else 9

    @property
    def depth(self) -> int:
        return max(16, _power_of_two(self.pitch * (9 // self.groups)))

    @property
    def area(self) -> int:
        """Elements of an image in its frame, and of what a product reads beyond the last pixel."""
        beyond = self.depth - self.pitch * (9 // self.groups)
        return -(-((self.height + 2) * (self.width + 2) * self.pitch + beyond) // 64) * 64

    def shared(self, tile: LatentTile, dtype: torch.dtype) -> int:
        """Bytes of shared memory that a program needs: operands of the products in flight."""
        if tile.stay:  # and values of the residual stream, which are loaded ahead too
            pixels = tile.stages * tile.rows * (3 * self.depth * dtype.itemsize + 4 * self.columns)
            return pixels + 3 * self.columns * self.depth * dtype.itemsize
        halves = 2 if dtype == torch.float32 and tile.split else 1
        return tile.stages * (tile.rows + self.columns) * self.depth * halves * _stored(tile, dtype).itemsize

    def constants(self) -> dict[str, int]:
        return {
            "C": self.channels, "P": self.pitch, "WIDTH": self.columns, "DEPTH": self.depth,
            "GROUPS": self.groups, "H": self.height, "W": self.width, "AREA": self.area,
        }  # fmt: skip


def tile_for(sizes: Sizes, pixels: int, dtype: torch.dtype, shared: int) -> LatentTile:
    """The tile in use where a program has so many pixels at a time, for products of numbers of a type.

    What was found fastest on an H200 or, where `shared` bytes are too few for it, the next smaller one.
    """
    near = sizes.pitch & (sizes.pitch - 1) != 0  # pixels on powers of two come as fast in large pieces
    tile = LatentTile(rows=64 if pixels <= 64 else 128, near=near)
    if dtype == torch.float32:
        tile = replace(tile, warps=4) if pixels <= 64 else replace(tile, stages=2)
    while sizes.shared(tile, dtype) > shared and tile.rows > 16:
        if tile.stages > 2 or (tile.rows <= 64 and tile.stages > 1):
            tile = replace(tile, stages=tile.stages - 1)
        else:
            tile = replace(tile, rows=tile.rows // 2, warps=4)
    return tile


def _stored(tile: LatentTile, dtype: torch.dtype) -> torch.dtype:
    """The type of what is multiplied, where it stands for numbers of another."""
    return torch.float16 if dtype == torch.float32 and tile.split else dtype


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _shared(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 96 * 1024))  # an old PyTorch does not tell


def programs_for(images: int, places: int, device: torch.device, *, coupled: bool) -> int:
    """Programs that meet must all run at once, and have equal shares of the images."""
    most = (min(MOST, _processors(device)) if coupled else _processors(device)) * places
    return max(1, min(images, most))


@dataclass(frozen=True)
class Plan:
    """How a solve is launched."""

    images: int
    sizes: Sizes
    tile: LatentTile
    programs: int
    coupled: bool
    dtype: torch.dtype

    @property
    def split(self) -> bool:
        return self.tile.split and self.dtype == torch.float32

    @property
    def stored(self) -> torch.dtype:
        return _stored(self.tile, self.dtype)

    @property
    def alone(self) -> bool:
        """Has every program one tile of pixels, where they meet?"""
        share = -(-self.images // self.programs)
        return self.coupled and share * self.sizes.height * self.sizes.width <= self.tile.rows

    @property
    def places(self) -> int:
        """Images that the programs have memory for."""
        return self.images if self.coupled else self.programs

    @property
    def pixels(self) -> int:
        return self.places * self.sizes.height * self.sizes.width


def plan(v: Tensor, coupled: bool, dtype: torch.dtype, tile: LatentTile | None, programs: int | None) -> Plan:
    images, channels, height, width = v.shape
    if not images:
        raise ValueError("a batch has at least one image, got none")
    if channels > WIDEST:
        raise ValueError(f"the kernel takes at most {WIDEST} channels, got {channels}; use banach.solve")
    if programs is None:
        programs = programs_for(images, 1 if tile is None else tile.places, v.device, coupled=coupled)
    sizes = Sizes(channels, height, width)
    if tile is None:
        pixels = height * width * (-(-images // programs) if coupled else 1)
        tile = tile_for(sizes, pixels, dtype, _shared(v.device))
    made = Plan(images, sizes, tile, programs, coupled, dtype)
    if tile.stay and (sizes.groups != 3 or made.split):
        raise ValueError("weights stay where they are three rows of numbers that are not split; use stay=False")
    if max(3 * made.pixels * made.sizes.pitch, 2 * made.places * made.sizes.area) >= 2**31:
        raise ValueError(f"a batch of {images} images has too many pixels for one launch; use a smaller one")
    return made


def kernel_latent_solve(
    R: LatentMap,
    v: Tensor,
    z0: Tensor | None,
    stop: Stop,
    dtype: torch.dtype,
    *,
    tile: LatentTile | None = None,
    programs: int | None = None,
) -> Solved:
    """One launch to pack the weights, one for the solve. dtype: of the numbers that are multiplied."""
    how = plan(v, R.known is None, dtype, tile, programs)
    memory, out = _Memory(how, R.blocks, v.device), _Out(how, v.device)
    sizes = how.sizes
    pack[(9 * len(R.weights),)](
        R.weights, memory.weights, memory.counters, C=sizes.channels, P=sizes.pitch, DEPTH=sizes.depth,
        WIDTH=sizes.columns, GROUPS=sizes.groups, LAYERS=len(R.weights), SPLIT=how.split,
    )  # fmt: skip
    _iterate(how, memory, out, R, _lying(v), None if z0 is None else _lying(z0), stop)
    return out.solved()


def _iterate(
    how: Plan, memory: _Memory, out: _Out, R: LatentMap, v: Tensor, z0: Tensor | None, stop: Stop
) -> None:
    form, sizes, tile, pixels = R.form, how.sizes, how.tile, how.images * how.sizes.height * how.sizes.width
    scale = stop.scale(sizes.channels * (pixels if how.coupled else sizes.height * sizes.width))
    known = memory.sums if R.known is None else _wide(R.known, sizes.columns)
    iterate[(how.programs,)](
        v, v if z0 is None else z0, memory.weights, _wide(R.biases, sizes.columns), known, memory.slots,
        memory.held, memory.stream, memory.operand, memory.hidden, memory.sums, memory.tests, memory.pivots,
        memory.counters, out.value, out.residual, out.steps, out.flags,
        how.images, how.places, stop.max_steps, sizes.groups, stop.atol / scale, stop.rtol, scale, 1.0 / pixels,
        R.eps, form.inner, form.outer, form.slope, form.slope_after,
        **sizes.constants(), BLOCKS=R.blocks, ROWS=tile.rows, STAGES=tile.stages, NEAR=tile.near, SPLIT=how.split,
        CHUNK=max(16, _power_of_two(how.programs)) if how.coupled else 16, TRAIN=how.coupled,
        PIXEL=stop.worst_pixel, RELATIVE=stop.rtol > 0, LATE=form.late, FROM_ZERO=z0 is None, SPINS=SPINS,
        ALONE=how.alone, STAY=tile.stay,
        num_warps=tile.warps, **({"maxnreg": tile.registers} if tile.registers else {}),
    )  # fmt: skip


def _lying(x: Tensor) -> Tensor:
    """Pixels in rows, channels side by side: costs nothing where x is channels_last."""
    return x.detach().permute(0, 2, 3, 1).contiguous()


def _wide(values: Tensor, columns: int) -> Tensor:
    missing = columns - values.shape[-1]
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).float().contiguous()


class _Memory:
    """What the programs write for themselves and, in sums, tests and counters, for one another."""

    def __init__(self, how: Plan, blocks: int, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        sizes, halves, columns = how.sizes, 1 + how.split, how.sizes.columns
        self.slots, self.held, self.stream = (empty(k, how.pixels, sizes.pitch) for k in (3, 1, 1))
        self.operand, self.hidden = empty(2, halves, how.places, sizes.area, dtype=how.stored)
        self.sums, self.tests = empty(2, how.programs, 2, columns), empty(2, how.programs, 4)
        self.pivots = empty(how.programs, blocks, columns)
        self.weights = empty(halves, 2 * blocks, sizes.groups, columns, sizes.depth, dtype=how.stored)
        self.counters = empty(2, dtype=torch.int32)


class _Out:
    """What the kernel answers."""

    def __init__(self, how: Plan, device: torch.device) -> None:
        shape = how.images, how.sizes.height, how.sizes.width, how.sizes.channels
        self.value = torch.empty(shape, device=device, dtype=torch.float32)
        self.residual = torch.empty(how.images, device=device, dtype=torch.float32)
        self.steps = torch.empty(how.images, device=device, dtype=torch.int64)
        self.flags = torch.empty((3, how.images), device=device, dtype=torch.int8)

    def solved(self) -> Solved:
        converged, nonfinite, stalled = self.flags.view(torch.bool)
        return Solved(self.value.permute(0, 3, 1, 2), self.residual, converged, self.steps, nonfinite, stalled)
