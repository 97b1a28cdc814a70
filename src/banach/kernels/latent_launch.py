"""The solve for a latent by its kernel: sizes of tiles, memory of the programs' own, and the launch.

Nothing here asks the device anything, so a solve can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from banach.kernels.latent_form import WIDEST, LatentMap, Solved, Stop
from banach.kernels.latent_kernel import iterate
from banach.kernels.latent_pack import pack
from banach.kernels.latent_tiles import LatentTile, Sizes, power_of_two, stored, tile_for

MOST = 128  # multiprocessors whose programs meet: each of them adds the sums of all
MANY = 4  # images for each multiprocessor, from which on two of them are at work there at a time
SPINS = 1 << 21  # looks at a meeting before it is given up: a second or two


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


@functools.cache
def _all_at_once() -> dict[str, bool]:
    """For programs that meet: none runs before all can, so two solves that share the device never wait in vain.

    Without it, where an old Triton does not know it, a device that is not shared has room for all of them.
    """
    from triton.backends.nvidia.compiler import CUDAOptions

    known = {field.name for field in fields(CUDAOptions)}
    return {"launch_cooperative_grid": True} if "launch_cooperative_grid" in known else {}


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
        return stored(self.tile, self.dtype)

    @property
    def alone(self) -> bool:
        """Has every program one tile of pixels, where they meet?"""
        share = -(-self.images // self.programs)
        return self.coupled and share * self.sizes.height * self.sizes.width <= self.tile.rows

    @property
    def keep(self) -> bool:
        """Do weights stay in place? Where they are few."""
        return self.tile.keep and self.sizes.groups == 3 and not self.split

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
    sizes = Sizes(channels, height, width)
    if tile is None:
        one_each = programs or programs_for(images, 1, v.device, coupled=coupled)
        pixels = height * width * (-(-images // one_each) if coupled else 1)
        many = not coupled and images >= MANY * one_each
        tile = tile_for(sizes, pixels, dtype, _shared(v.device), coupled=coupled, many=many)
    if programs is None:
        programs = programs_for(images, tile.places, v.device, coupled=coupled)
    made = Plan(images, sizes, tile, programs, coupled, dtype)
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
        CHUNK=max(16, power_of_two(how.programs)) if how.coupled else 16, TRAIN=how.coupled,
        PIXEL=stop.worst_pixel, RELATIVE=stop.rtol > 0, LATE=form.late, FROM_ZERO=z0 is None, SPINS=SPINS,
        ALONE=how.alone, KEEP=how.keep,
        num_warps=tile.warps, **({"maxnreg": tile.registers} if tile.registers else {}),
        **(_all_at_once() if how.coupled else {}),
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
