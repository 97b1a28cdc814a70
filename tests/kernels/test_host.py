"""Host code of the kernels without Triton: launches, refusals, tiles, masks."""

import importlib.metadata
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import banach.kernels
from banach.fast.iteration import Iteration
from banach.fast.network import with_kernels
from banach.kernels import (
    AndersonMemory,
    LatentForm,
    describe,
    has_triton,
    host,
    lacks,
    latent_solve,
    residual_stack,
    stack,
    window,
)
from banach.kernels.latent import launch_of, shared_memory, sizes_of, tiled
from banach.models.blocks import LatentResNet
from banach.solve import RMS, Anderson, Picard, Tolerance
from kernels.cases import NETWORKS, Block, network, stack_of, tolerance


class Recorder:
    """In place of a module of device code: kernels that only count their launches and programs."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.grids: dict[str, tuple[int, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return type("Kernel", (), {"__getitem__": lambda kernel, grid: self._launch(name, grid)})()

    def _launch(self, name: str, grid: tuple[int, ...]) -> Any:
        self.launches[name] += 1
        self.grids[name] = grid
        return lambda *arguments, **settings: None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name in ("latent_kernel", "stack_kernel", "steps_kernel", "window_kernel"):
        monkeypatch.setitem(sys.modules, f"banach.kernels.{name}", recorder)
        monkeypatch.setattr(banach.kernels, name, recorder, raising=False)
    monkeypatch.setattr(host, "constants", lambda record: record)
    monkeypatch.setattr(stack, "has_kernel", lambda x: True)
    monkeypatch.setattr(window, "has_kernel", lambda x, weight: True)
    return recorder


@pytest.mark.parametrize(
    ("version", "new"), [("3.6.0", True), ("3.4.0+git1", True), ("3.3.1", False), (None, False)]
)
def test_triton_must_be_new_enough(monkeypatch: pytest.MonkeyPatch, version: str | None, new: bool) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert has_triton.__wrapped__() is new


@pytest.mark.parametrize(
    ("capability", "hip", "version", "lacking"),
    [
        ((9, 0), None, "3.4.0", ""),
        ((8, 6), None, "3.4.0", ""),
        ((7, 5), None, "3.6.0", "an NVIDIA GPU of compute capability 8.0"),
        ((9, 4), "6.4", "3.6.0", "an NVIDIA GPU of compute capability 8.0"),
        ((10, 0), None, "3.7.1", "Triton 3.8"),
        ((10, 0), None, "3.8.0", ""),
        ((12, 0), None, "3.6.0", ""),
    ],
)
def test_gpus_that_the_kernels_do_not_fit_take_the_general_path(
    monkeypatch: pytest.MonkeyPatch, capability: Any, hip: str | None, version: str, lacking: str
) -> None:
    """On a T4 they needed more shared memory than there is, and for a B200 Triton 3.7 failed to compile one."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(host, "has_triton", has_triton.__wrapped__)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert lacks.__wrapped__(torch.device("cuda")) == lacking


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_solve_is_two_launches(device: Recorder, dtype: torch.dtype, train: bool) -> None:
    R, v = network("cifar10", train=train)
    found = latent_solve(R, v.to(dtype), tolerance=tolerance())
    assert device.launches == {"pack": 1, "iterate": 1}
    assert device.grids["iterate"] == (2,)  # a CPU counts as two multiprocessors
    assert found.value.shape == v.shape
    assert found.value.is_contiguous(memory_format=torch.channels_last)
    assert found.steps.shape == found.diverged.shape == (len(v),)


@pytest.mark.parametrize(
    ("solver", "launches"), [(Picard(), {"picard": 8}), (Anderson(3), {"products": 4, "fit": 4, "mix": 4})]
)
def test_launches_of_fused_steps(device: Recorder, solver: Any, launches: dict[str, int]) -> None:
    """Picard makes one per tensor of the latent and step, Anderson three per step."""
    z: Any = torch.zeros(3, 5) if isinstance(solver, Anderson) else (torch.zeros(3, 5), torch.zeros(3, 2, 4))
    found = Iteration(lambda u, v: u, solver, Tolerance(max_steps=4))(z, z)
    assert device.launches == launches
    assert found.steps.shape == (3,)


def test_anderson_keeps_differences_in_bf16_under_its_autocast_alone() -> None:
    def kinds(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        made = AndersonMemory.start(torch.zeros(2, 3), torch.zeros(2, dtype=dtype), 4)
        return made.dR.dtype, made.dG.dtype, made.before.dtype

    assert kinds(torch.float32) == (torch.float32,) * 3
    with torch.autocast("cpu", torch.bfloat16):
        assert kinds(torch.float32) == (torch.bfloat16, torch.bfloat16, torch.float32)
        assert kinds(torch.float64) == (torch.float64,) * 3
    with torch.autocast("cpu", torch.float16):
        assert kinds(torch.float32) == (torch.float32,) * 3


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_launches_of_a_stack(device: Recorder, train: bool) -> None:
    """Per block: two convolutions each way, weight gradients in two parts, batch norm folded into the weights."""
    blocks = stack_of(3, dropout=0.2, train=train)
    x = torch.randn(2, 35, 6, 5, requires_grad=True)
    residual_stack(blocks, x).sum().backward()
    assert device.launches["convolve"] == 12
    assert device.launches["correlate"] == device.launches["unfold"] == 6
    assert device.launches["fold"] == (5 if train else 2)  # of these one for the gradients of the inputs
    assert device.launches["unnormalise"] == 3
    assert device.launches["average"] == (3 if train else 0)
    assert device.launches["enter"] == device.launches["leave"] == 2
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_a_stack_without_a_gradient_launches_its_forward_pass(device: Recorder) -> None:
    with torch.no_grad():
        residual_stack(stack_of(3), torch.randn(2, 35, 20, 20))
    assert device.launches == {"enter": 1, "convolve": 6, "fold": 4, "leave": 1}


def test_a_stack_refuses_second_derivatives(device: Recorder) -> None:
    x = torch.randn(2, 35, 3, 3).requires_grad_()
    out = residual_stack(stack_of(1), x)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("stride", [1, 2])
def test_launches_of_a_compiled_convolution(device: Recorder, stride: int) -> None:
    """A compiler takes it as one call, forward and back."""
    layer = with_kernels(nn.Conv2d(16, 32, 3, stride, 1), windows=True)
    x = torch.randn(3, 16, 9, 8, requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    y.sum().backward()
    assert y.shape == (3, 32, -(-9 // stride), -(-8 // stride))
    assert device.launches == {"convolve": 2, "correlate": 1, "add": 1}
    torch.library.opcheck(
        torch.ops.banach.conv2d.default, (x, layer.weight, layer.bias, stride, 1), test_utils="test_faketensor"
    )


class OtherNorm(RMS):
    pass


def by_form(R: Any, u: Tensor, v: Tensor) -> Tensor:
    """R(u, v) by the formula of `LatentForm`."""
    form = R.latent_form
    x = v + form.inner * u
    for block in R.blocks:
        y = block.conv2(F.leaky_relu(block.conv1(x), form.slope))
        y = F.leaky_relu(x + y, form.slope_after) if form.late else x + F.leaky_relu(y, form.slope_after)
        x = block.norm(y)
    return form.outer * x


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_form_that_a_latent_map_declares_is_what_it_computes(name: str, train: bool) -> None:
    """The kernel that iterates R goes by this form."""
    R, v = network(name, train=train)
    R, v = R.double(), v.double()
    assert describe(R) is not None
    u = torch.randn_like(v)
    torch.testing.assert_close(by_form(R, u, v), R(u, v))


def test_what_the_kernel_does_not_know_is_refused() -> None:
    good, mixed, v = LatentResNet(16, 2, 0.5), LatentResNet(16, 2, 0.5), torch.randn(2, 16, 4, 4)
    mixed.blocks[0].eval()
    cases: list[tuple[str, tuple[Any, ...], Tolerance]] = [
        ("LatentForm", (LatentResNet(16, 2, 0.5, batch_norm=False), v), tolerance()),
        ("LatentForm", (LatentResNet(80, 1, 0.5), torch.randn(2, 80, 4, 4)), tolerance()),
        ("one mode", (mixed, v), tolerance()),
        ("LatentForm", (nn.Conv2d(16, 16, 3), v), tolerance()),
        ("v must be", (good, v[:, :8]), tolerance()),
        ("not empty", (good, v[:0]), tolerance()),
        ("in torch.float64", (good, v.double()), tolerance()),
        ("z0", (good, v, v[:1]), tolerance()),
        ("norm", (good, v), tolerance(OtherNorm())),
    ]
    for message, given, stop in cases:
        with pytest.raises(ValueError, match=message):
            latent_solve(*given, tolerance=stop)


class OtherForward(LatentResNet):
    """Inherits what its parent says of itself, and computes something else."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * super().forward(u, v) + 1


class DoubledConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def altered(how: str) -> Any:
    R: Any = (OtherForward if how == "another forward" else LatentResNet)(16, 2, 0.5, batch_norm=how != "no norm")
    conv1 = R.blocks[0].conv1
    if how == "a hook":
        conv1.register_forward_hook(lambda module, given, out: 2 * out)
    elif how == "another conv":
        R.blocks[0].conv1 = DoubledConv(16, 16, 3, padding=1)
    elif how == "a parametrisation":
        nn.utils.parametrizations.weight_norm(conv1)
    return R


@pytest.mark.parametrize("how", ["no norm", "another forward", "a hook", "another conv", "a parametrisation"])
def test_an_R_that_computes_something_else_than_its_class_says_has_no_form(how: str) -> None:
    assert describe(altered("nothing")) == LatentForm(outer=0.5, slope_after=0.1**2)
    assert describe(altered(how)) is None
    assert describe(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shared", [227 * 1024, 163 * 1024, 99 * 1024], ids=["H200", "A100", "small"])
def test_the_tile_of_a_solve_fits_into_shared_memory(name: str, shared: int) -> None:
    """And on an H200 it is the one that was fastest there."""
    sizes, pixels = sizes_of(*NETWORKS[name]), NETWORKS[name][1] * NETWORKS[name][2]
    hows: list[dict[str, bool]] = [{"coupled": True}, {"coupled": False}, {"coupled": False, "many": True}]
    tiles = {d: [tiled(sizes, pixels, d, shared, **how) for how in hows] for d in (torch.float32, torch.bfloat16)}
    for dtype, found in tiles.items():
        assert all(shared_memory(tile, dtype) * tile.per_multiprocessor <= shared for tile in found)
    if shared == 227 * 1024:
        kept = {"cifar10": [True, True, True], "mnist": [True, False, False], "svhn": [False, False, False]}
        assert [tile.keep for tile in tiles[torch.bfloat16]] == kept[name]
        programs = [tile.per_multiprocessor for tile in tiles[torch.bfloat16]]
        assert programs == ([1, 1, 2] if name == "cifar10" else [1, 1, 1])


def test_a_batch_whose_numbers_a_kernel_cannot_count_is_refused() -> None:
    """In eval mode only the programs' memory was counted: offsets into a batch of 2^31 numbers overflowed."""
    assert launch_of(torch.empty(800_000, 32, 9, 9, device="meta"), False, torch.float32)
    with pytest.raises(ValueError, match="a batch of 900000 images is too large for one launch"):
        launch_of(torch.empty(900_000, 32, 9, 9, device="meta"), False, torch.float32)


def test_without_a_kernel_a_stack_is_its_modules() -> None:
    blocks, x = stack_of(3, train=False).double(), torch.randn(3, 35, 5, 4, dtype=torch.float64)
    assert torch.equal(residual_stack(blocks, x), blocks(x))


RATE = 0.25


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Simulate kernels; return the masks and scales they are called with."""
    seen: list[Any] = []

    def record(blocks: Any, x: Tensor, masks: Tensor | None, scale: float) -> Tensor:
        seen.append((masks, scale))
        return x

    monkeypatch.setattr(stack, "has_kernel", lambda x: True)
    monkeypatch.setattr(stack, "fused_stack", record)
    return seen


def test_masks_are_drawn_at_the_rate_of_the_blocks(kernel: list[Any]) -> None:
    blocks, x = stack_of(4, dropout=RATE), torch.randn(200, 35, 1, 1)
    residual_stack(blocks, x)
    residual_stack(blocks.eval(), x)
    (masks, scale), without = kernel
    assert masks.shape == (4, 200, 35)
    assert float(masks.float().mean()) == pytest.approx(1 - RATE, abs=0.02)  # 28,000 draws: a deviation of .0026
    assert scale == 1 / (1 - RATE)
    assert without == (None, 1.0)


def changed(name: str, value: nn.Module) -> Callable[[], nn.Sequential]:
    def make() -> nn.Sequential:
        blocks = stack_of(2, dropout=RATE)
        setattr(blocks[0], name, value)
        return blocks

    return make


UNFIT: dict[str, Callable[[], nn.Sequential]] = {
    "affine": changed("norm", nn.BatchNorm2d(35)),
    "no momentum": changed("norm", nn.BatchNorm2d(35, affine=False, momentum=None)),
    "a larger convolution": changed("conv2", nn.Conv2d(35, 35, 5, padding=2)),
    "two modes": changed("norm", nn.BatchNorm2d(35, affine=False).eval()),
    "two rates": changed("drop", nn.Dropout2d(0.5)),
    "another dropout": changed("drop", nn.Dropout(RATE)),
    "no batch norm": lambda: nn.Sequential(Block(batch_norm=False)),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_blocks_that_would_be_computed_wrongly_are_left_to_the_modules(unfit: str, kernel: list[Any]) -> None:
    for dropout in (0.0, RATE):
        residual_stack(stack_of(2, dropout=dropout), torch.randn(2, 35, 4, 4))
    assert len(kernel) == 2
    residual_stack(UNFIT[unfit](), torch.randn(2, 35, 4, 4))
    assert len(kernel) == 2
