"""plan(): decide how a network runs, and say why not faster. The only place that decides."""

import functools
import glob
import importlib.util
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from banach.backward import JFB, Implicit, Neumann
from banach.kernels import declares, describe, lacks
from banach.network import ImplicitNetwork, is_coupled
from banach.nn.layers import draws_masks, is_hooked, modules_of, uses_batch_statistics
from banach.solve import RMS, Anderson, Euclidean, Picard, WorstPixel
from banach.solve.context import assigned

LONGEST = 8  # differences that the kernels of Anderson keep
WIDEST = 64  # channels; cuDNN is fast enough for wider convolutions
_NOT_ONE_BY_ONE = "Q, R and S are not called one by one"
_NO_FIXED_POINT = "the network contains no ImplicitNetwork"
MAY_CHANGE = "R may change buffers in training mode"
_INSIDE = "the fixed point is that of a module inside the network"
_PARALLEL = "torch.nn.parallel.", "torch.distributed.fsdp."  # modules of wrappers: DDP, FSDP, DataParallel


@dataclass(frozen=True)
class Choice:
    """A decision, true or false, and its reason."""

    yes: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.yes

    def __str__(self) -> str:
        return ("yes" if self.yes else "no") + (f", {self.why}" if self.why else "")


def _titled(title: str) -> Any:
    return field(metadata={"title": title})


@dataclass(frozen=True)
class Plan:
    """How a network runs. `print(plan)` shows every choice with its reason.

    Attributes:
        task: "training step" or "prediction".
        device: where the weights are.
        precision: "fp32", "tf32" or "bf16".
        graph: the training step or the prediction is captured as CUDA graphs, cut at its while nodes and launched
            without a host sync. Without it everything runs eagerly, and the choices below are not used.
        own_loop: Q, R and S are called one by one.
        kernel: one kernel launch iterates R until it converges.
        loop: a while node in the CUDA graph iterates R until every sample has stopped.
        fused_step: kernels measure and move all samples after an evaluation of R; else `solve` does.
        bf16_weights: matrices are cast to bf16 once per step, or per prediction on a GPU.
        fused_blocks: stacks of residual blocks run as fused kernels.
        windows: convolutions of few channels run as Triton kernels.
        channels_last: the weights of convolutions should be in that memory format. `fit` converts them; in your
            own loop call `channels_last(net)`.
        compiled: Q, R, S and the loss go through torch.compile.
    """

    task: str
    device: str
    precision: str
    graph: Choice = _titled("CUDA graph")
    own_loop: Choice = _titled("Q, R, S one by one")
    kernel: Choice = _titled("one-launch kernel")
    loop: Choice = _titled("while node")
    fused_step: Choice = _titled("fused step")
    bf16_weights: Choice = _titled("bf16 weights")
    fused_blocks: Choice = _titled("fused blocks")
    windows: Choice = _titled("window convolutions")
    channels_last: Choice = _titled("channels_last")
    compiled: Choice = _titled("torch.compile")

    def to_dict(self) -> dict[str, str]:
        """Return what runs, as text by title, ready for JSON."""
        shown = fields(self) if self.graph else fields(self)[:4]
        return {one.metadata.get("title", one.name): str(getattr(self, one.name)) for one in shown}

    def __str__(self) -> str:
        first = f"{self.task} on {self.device}, {self.precision}: {'captured' if self.graph else 'eager'}"
        lines = (f"  {title}: {text}" for title, text in list(self.to_dict().items())[3:])
        return "\n".join((first, *lines))


def plan(
    net: nn.Module,
    device: torch.device | str | None = None,
    precision: str | None = None,
    *,
    training: bool = True,
    compile: bool = False,
    observed: bool = False,
    refused: str | None = None,
    keeps_buffers: bool = False,
) -> Plan:
    """Decide how a network runs.

    Args:
        net: an `ImplicitNetwork`, or any module.
        device: None: where the weights are.
        precision: "fp32", "tf32" or "bf16" (autocast). None: fp32, or tf32 where cuDNN convolves in TF32.
        training: plan a training step; otherwise a prediction in eval mode.
        compile: torch.compile was asked for.
        observed: penalties observe the network's own pass, so Q, R and S are not called one by one.
        refused: a reason not to capture, such as "fast is off".
        keeps_buffers: R is known to leave its buffers as they are, such as tables of rotary embeddings.
    Returns:
        Plan; print it.
    Raises:
        TypeError, ValueError: if `net` is not a module, or `precision` is none of the three.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"plan takes a network, got {type(net).__name__}")
    weight = next(net.parameters(), None)
    device = torch.device(device or ("cpu" if weight is None else weight.device))
    precision = precision or ("tf32" if device.type == "cuda" and convolves_in_tf32() else "fp32")
    if precision not in ("fp32", "tf32", "bf16"):
        raise ValueError(f"precision must be fp32, tf32 or bf16, got {precision!r}")
    no_kernel = _no_kernel(net, device)
    copied = training and _not_copied(getattr(net, "R", None), keeps_buffers)
    ways = _ways_to_iterate(net, no_kernel, copied, training=training, observed=observed)
    # Reasons, which are false where they do not hold.
    no_parts = training and not ways["own_loop"] and _NOT_ONE_BY_ONE
    no_training = not training and "for training steps only"
    no_bf16 = precision != "bf16" and f"the precision is {precision}"
    no_stack = not any(map(is_stack, net.modules())) and "there is no stack of known blocks"
    no_window = not any(map(is_window, net.modules())) and "there is no convolution of few channels"
    in_tf32 = precision == "tf32" and "cuDNN is faster in TF32"
    windows = _unless(no_training, no_kernel, no_parts, in_tf32, no_window)
    no_gpu = not runs_graphs(device) and "needs a CUDA GPU"
    no_tensor_cores = precision == "fp32" and not windows and "fp32 does not use tensor cores"
    return Plan(
        task="training step" if training else "prediction",
        device=str(device),
        precision=precision,
        graph=_graph(net, device, refused, ways["kernel"], training=training),
        **ways,
        bf16_weights=_unless(no_bf16, no_parts, not training and no_gpu),
        fused_blocks=_unless(no_bf16, no_kernel, no_parts, no_stack),
        windows=windows,
        channels_last=_unless(no_gpu, no_tensor_cores),
        compiled=_unless(not compile and "not asked for", isinstance(net, ImplicitNetwork) and no_parts),
    )


def convolves_in_tf32() -> bool:
    """Return True if cuDNN convolves float32 in TF32. PyTorch refuses the old flag where the new one was set."""
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return bool(backends.cudnn.allow_tf32)
    flags = (backends.cudnn.conv.fp32_precision, backends.cudnn.fp32_precision, backends.fp32_precision)
    return next((flag for flag in flags if flag != "none"), "ieee") == "tf32"


def arithmetic(
    precision: str, device: torch.device, *, search: bool | None = None
) -> AbstractContextManager[None]:
    """Set TF32 for the block and restore it: on a GPU it is a global switch, and on for convolutions.

    `search` lets cuDNN try its algorithms, which pays where shapes repeat; None: as it is.
    """
    backends: Any = torch.backends
    matmul, cudnn, tf32 = backends.cuda.matmul, backends.cudnn, precision == "tf32"
    changes: list[Any] = [(matmul, "allow_tf32", tf32), (cudnn, "allow_tf32", tf32)]
    try:
        _ = matmul.allow_tf32, cudnn.allow_tf32
    except RuntimeError:  # the new flags were set: PyTorch refuses to read the old ones
        changes = [(one, "fp32_precision", "tf32" if tf32 else "ieee") for one in (matmul, cudnn.conv, cudnn.rnn)]
    if search is not None:
        changes.append((cudnn, "benchmark", search))
    return assigned(changes if device.type == "cuda" else [])


def networks_in(net: nn.Module) -> list[ImplicitNetwork]:
    """Return the implicit networks that a module contains; the module itself may be the first."""
    return [module for module in net.modules() if isinstance(module, ImplicitNetwork)]


def is_as_written(net: object) -> bool:
    """Return True if the network answers by `ImplicitNetwork`'s methods: then its parts may be called instead."""
    if not isinstance(net, ImplicitNetwork) or is_hooked(net):
        return False
    own = [name for name, value in vars(ImplicitNetwork).items() if callable(value)]
    names = {"__call__", *own} - {"__init__", "extra_repr"}
    inherited = all(getattr(type(net), name) is getattr(ImplicitNetwork, name) for name in names)
    return inherited and vars(net).keys().isdisjoint(names)


def is_window(layer: Any) -> bool:
    """Return True for a convolution that the window kernels compute."""
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str) or is_hooked(layer):
        return False
    square = all(len(set(pair)) == 1 for pair in (layer.kernel_size, layer.stride, layer.padding))
    plain = (layer.dilation, layer.groups, layer.padding_mode) == ((1, 1), 1, "zeros")
    return square and plain and max(layer.in_channels, layer.out_channels) <= WIDEST


def is_stack(module: nn.Module) -> bool:
    """Return True for a Sequential of residual blocks that the fused kernels compute."""
    blocks: list[Any] = list(module) if isinstance(module, nn.Sequential) and not is_hooked(module) else []
    declared = (getattr(block, "fusable", False) and declares(block, "fusable") for block in blocks)
    known = all(declared) and all(isinstance(block.norm, nn.BatchNorm2d) for block in blocks)
    return bool(blocks) and known and not any(is_hooked(part) for block in blocks for part in block.modules())


def runs_graphs(device: torch.device) -> bool:
    """Return True if the device can run CUDA graphs and kernels."""
    return device.type == "cuda"


@functools.cache
def while_nodes_lack() -> str:
    """Return what while nodes lack on this machine, "" if nothing."""
    if not torch.cuda.is_available() or torch.version.hip:
        return "a CUDA GPU"
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return "PyTorch 2.8"
    try:
        from cuda.bindings import driver
    except ImportError:  # "cuda" may also be another package, or a file of the user
        return "cuda.bindings (pip install cuda-bindings)"
    if driver.cuDriverGetVersion()[1] < 12040:  # PyTorch does not say it
        return "a driver of CUDA 12.4"
    return "" if device_runtime() else "libcudadevrt.a (pip install nvidia-cuda-runtime)"


@functools.cache
def device_runtime() -> str | None:
    """Return where CUDA's device runtime library is: in NVIDIA's wheels, or in a CUDA toolkit."""
    wheels = importlib.util.find_spec("nvidia")
    roots = list(wheels.submodule_search_locations or ()) if wheels else []
    roots.append(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    found = (glob.glob(os.path.join(root, "**", "libcudadevrt.a"), recursive=True) for root in roots)
    return next((paths[0] for paths in found if paths), None)


def _unless(*reasons: Any) -> Choice:
    """Return no for the first reason, a text, that holds; else yes."""
    why = next((reason for reason in reasons if reason), "")
    return Choice(not why, why)


def _ways_to_iterate(
    net: Any, no_kernel: str, not_copied: str | bool, *, training: bool, observed: bool
) -> dict[str, Choice]:
    """Decide what iterates R."""
    if not isinstance(net, ImplicitNetwork):
        loops = [one.tolerance.max_steps and one.tolerance.steps_per_check for one in networks_in(net)]
        no = Choice(False, _INSIDE if loops else _NO_FIXED_POINT)
        return {"own_loop": no, "kernel": no, "loop": replace(no, yes=any(loops)), "fused_step": no}
    modes = (JFB,) if training else (JFB, Neumann, Implicit)  # of those the value is T(z)
    own_loop = _unless(
        not is_as_written(net) and "the network overrides forward or has hooks",
        type(net.backward) not in modes and f"the backward mode is {type(net.backward).__name__}",
        observed and "penalties observe the network's own pass",
        not_copied,
    )
    explicit = net.tolerance.max_steps == 0 and "max_steps is 0"
    no_tests = net.tolerance.check_every == 0 and "check_every is 0, so the depth is max_steps"
    no_parts = training and not own_loop and _NOT_ONE_BY_ONE
    no_masks = draws(net.R) and "R draws dropout masks"
    kernel = _unless(no_kernel, no_parts, explicit, no_masks) and _unless(_no_latent_kernel(net))
    by_kernel = kernel and "a kernel iterates R"
    norm, memory = type(net.tolerance.norm), getattr(net.solver, "memory", 0)
    known = _unless(
        is_coupled(net) and "the samples stop as one",
        type(net.solver) not in (Picard, Anderson) and f"the solver is {type(net.solver).__name__}",
        norm not in (RMS, Euclidean) and f"the norm is {norm.__name__}",
        memory > LONGEST and f"the memory of the solver is {memory}, at most {LONGEST}",
    )
    return {
        "own_loop": own_loop,
        "kernel": kernel,
        "loop": _unless(by_kernel, explicit, no_tests),
        "fused_step": _unless(own_loop.why, by_kernel, explicit, no_kernel, known.why),
    }


def _not_copied(R: Any, keeps_buffers: bool) -> str:
    """Return why R cannot be iterated by a copy that keeps no statistics, "" if it can."""
    if not isinstance(R, nn.Module):
        return "R is a function, not a module"
    norms = [module for module in R.modules() if isinstance(module, _BatchNorm)]
    known = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    others = any(id(buffer) not in known for buffer in R.buffers())
    if others and any(module.training for module in R.modules()) and not keeps_buffers:
        return MAY_CHANGE
    updates = any(norm.training and norm.track_running_stats for norm in norms)  # a copy would draw other masks
    return "R draws dropout masks and updates statistics" if updates and draws(R) else ""


def draws(R: Any) -> bool:
    """Return True if R has dropout that is on, with one mask per pass."""
    return any(map(draws_masks, modules_of(R)))


def _no_kernel(net: nn.Module, device: torch.device) -> str:
    """Return why Triton kernels are not used, "" if they are."""
    if not runs_graphs(device):
        return "needs a CUDA GPU"
    if getattr(next(net.parameters(), None), "dtype", None) != torch.float32:
        return "needs float32 weights"
    return f"needs {missing}" if (missing := lacks(device)) else ""


def _no_latent_kernel(net: ImplicitNetwork) -> str:
    """Return why one kernel does not compute the iteration of this network, "" if it does."""
    solver, norm = net.solver, type(net.tolerance.norm)
    return _unless(
        (type(solver) is not Picard or solver.damping) and f"the solver is {solver}",
        norm not in (WorstPixel, RMS, Euclidean) and f"the norm is {norm.__name__}",
        net.coupled not in (None, uses_batch_statistics(net.R)) and f"coupled is {net.coupled}",
        describe(net.R) is None and "R is not a known latent map",
    ).why


def _graph(net: Any, device: torch.device, refused: str | None, kernel: Choice, *, training: bool) -> Choice:
    implicit, networks = isinstance(net, ImplicitNetwork), networks_in(net)
    loops = [one for one in networks[bool(kernel) :] if one.tolerance.max_steps and one.tolerance.steps_per_check]
    solvers, modes = [one.solver for one in loops], [one.backward for one in networks if training]
    parallel = next((type(m).__name__ for m in net.modules() if type(m).__module__.startswith(_PARALLEL)), "")
    shares = implicit and not training and (bool(net.coupled) or uses_batch_statistics(net.R))
    missing = solvers and runs_graphs(device) and while_nodes_lack()
    counts_steps = any(type(solver) is not Picard and not hasattr(solver, "memory") for solver in solvers)
    syncs = any(isinstance(mode, Implicit) and mode.syncs_with_host for mode in modes)
    return _unless(
        not training and not implicit and (_INSIDE if networks else _NO_FIXED_POINT),
        not runs_graphs(device) and f"the weights are on the {device.type.upper()}",
        refused,
        parallel and f"{parallel} exchanges tensors between devices in every step",
        missing and f"a while node needs {missing}",
        counts_steps and "the solver may depend on the number of the step; give it a `memory`",
        syncs and "Implicit syncs with the host for its report or its method; NormalCG and Anderson do not",
        shares and "the samples of a batch share statistics",
        not training and any(m.training for m in net.modules()) and "a part of the network is in training mode",
    )
