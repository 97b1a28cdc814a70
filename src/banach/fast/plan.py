"""plan(): decide how a network runs, and say why not faster. The only place that decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from banach.backward import JFB, Implicit, Neumann
from banach.network import ImplicitNetwork
from banach.nn.layers import draws_masks, is_hooked, uses_batch_statistics
from banach.solve import RMS, Anderson, Euclidean, Picard, WorstPixel

LONGEST = 8  # differences that the kernels of Anderson keep
WIDEST = 64  # channels; cuDNN is fast enough for wider convolutions


@dataclass(frozen=True)
class Choice:
    """A decision, true or false, and its reason."""

    yes: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.yes

    def __str__(self) -> str:
        return ("yes" if self.yes else "no") + (f", {self.why}" if self.why else "")


_TITLES = {
    "graph": "CUDA graph",
    "bare": "own loop",
    "kernel": "one-launch kernel",
    "loop": "while node",
    "step": "fused step",
    "bf16_weights": "bf16 weights",
    "fused": "fused blocks",
    "windows": "window convolutions",
    "channels_last": "channels_last",
    "compiled": "torch.compile",
}


@dataclass(frozen=True)
class Plan:
    """How a network runs. `print(plan)` shows every choice with its reason.

    Attributes:
        task: "training step" or "prediction".
        device: where the weights are.
        precision: "fp32", "tf32" or "bf16".
        graph: the training step or the prediction is captured as CUDA graphs, cut at its while nodes and launched
            without a host sync. Without it everything runs eagerly, and the choices below are not used.
        bare: Q, R and S are called one by one, and R is iterated by Picard, or by Anderson with a fused step.
        kernel: one kernel launch iterates R until it converges.
        loop: a while node in the CUDA graph iterates R until every sample has stopped.
        step: kernels measure and move all samples after an evaluation of R.
        bf16_weights: matrices are cast to bf16 once per step.
        fused: stacks of residual blocks run as fused kernels.
        windows: convolutions of few channels run as Triton kernels.
        channels_last: the weights of convolutions should be in that memory format. `fit` converts them; in your
            own loop call `channels_last(net)`.
        compiled: Q, R, S and the loss go through torch.compile.
    """

    task: str
    device: str
    precision: str
    graph: Choice
    bare: Choice
    kernel: Choice
    loop: Choice
    step: Choice
    bf16_weights: Choice
    fused: Choice
    windows: Choice
    channels_last: Choice
    compiled: Choice

    def without_graph(self, why: str) -> Plan:
        """Return the same plan for eager execution."""
        return replace(self, graph=Choice(False, why))

    def to_dict(self) -> dict[str, str]:
        """Return what runs, as text by title, ready for JSON."""
        how = {"task": self.task, "device": self.device, "precision": self.precision}
        names = _TITLES if self.graph else ("graph",)
        return how | {_TITLES[name]: str(getattr(self, name)) for name in names}

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
) -> Plan:
    """Decide how a network runs.

    Args:
        net: an `ImplicitNetwork`, or any module.
        device: None: where the weights are.
        precision: "fp32", "tf32" or "bf16" (autocast). None: fp32, or tf32 where cuDNN convolves in TF32.
        training: plan a training step; otherwise a prediction in eval mode.
        compile: torch.compile was asked for.
        observed: penalties observe the network's own pass, so it is not taken apart.
        refused: a reason not to capture, such as "fast is off".
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
    no_step = no_kernel or _no_step(net)
    bare = _bare(net, no_step, training=training, observed=observed)
    whole = training and not bare, "the network is not taken apart"
    predicts = not training, "for training steps only"
    half = precision != "bf16", f"the precision is {precision}"
    windows = _unless(
        predicts,
        (bool(no_kernel), no_kernel),
        whole,
        (precision == "tf32", "cuDNN is faster in TF32"),
        (not any(map(is_window, net.modules())), "there is no convolution of few channels"),
    )
    kernel = _unless((bool(no_kernel), no_kernel), whole, *_no_latent_kernel(net, device))
    loop = _loop(net, kernel)
    no_stack = not any(map(is_stack, net.modules()))
    return Plan(
        task="training step" if training else "prediction",
        device=str(device),
        precision=precision,
        graph=_graph(net, device, refused, loop) if training else _graph_of_prediction(net, device, refused, loop),
        bare=bare,
        kernel=kernel,
        loop=loop,
        step=_unless(
            (not bare, bare.why),
            (bool(kernel), "a kernel iterates R"),
            (not _iterates(net), "max_steps is 0"),
            (bool(no_step), no_step),
        ),
        bf16_weights=_unless(predicts, half, whole),
        fused=_unless(half, (bool(no_kernel), no_kernel), whole, (no_stack, "there is no stack of known blocks")),
        windows=windows,
        channels_last=_channels_last(device, precision, windows),
        compiled=_unless(
            (not compile, "not asked for"), (isinstance(net, ImplicitNetwork) and whole[0], whole[1])
        ),
    )


def convolves_in_tf32() -> bool:
    """Return True if cuDNN convolves float32 in TF32. PyTorch refuses the old flag where the new one was set."""
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return bool(backends.cudnn.allow_tf32)
    flags = (backends.cudnn.conv.fp32_precision, backends.cudnn.fp32_precision, backends.fp32_precision)
    return next((flag for flag in flags if flag != "none"), "ieee") == "tf32"


def is_as_written(net: object) -> bool:
    """Return True if the network answers by `ImplicitNetwork`'s methods, without hooks.

    Only then may its parts be called in its place.
    """
    if not isinstance(net, ImplicitNetwork) or is_hooked(net):
        return False
    own = [name for name, value in vars(ImplicitNetwork).items() if callable(value)]
    names = {"__call__", *own} - {"__init__", "extra_repr"}
    inherited = all(getattr(type(net), name) is getattr(ImplicitNetwork, name) for name in names)
    return inherited and vars(net).keys().isdisjoint(names)


def is_window(layer: Any) -> bool:
    """Return True for a convolution that the window kernels compute."""
    return (
        type(layer) is nn.Conv2d
        and max(layer.in_channels, layer.out_channels) <= WIDEST
        and layer.kernel_size[0] == layer.kernel_size[1]
        and layer.stride[0] == layer.stride[1]
        and not isinstance(layer.padding, str)
        and layer.padding[0] == layer.padding[1]
        and layer.padding_mode == "zeros"
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and not is_hooked(layer)
    )


def is_stack(module: nn.Module) -> bool:
    """Return True for a Sequential of residual blocks that the fused kernels compute."""
    if not isinstance(module, nn.Sequential) or not len(module) or is_hooked(module):
        return False
    return all(_is_fusable(block) for block in module)


def runs_graphs(device: torch.device) -> bool:
    """Return True if the device can run CUDA graphs and kernels."""
    return device.type == "cuda"


def _unless(*reasons: tuple[bool, str]) -> Choice:
    """Return no for the first reason that holds, else yes."""
    return next((Choice(False, why) for holds, why in reasons if holds), Choice(True))


def _loop(net: Any, kernel: Choice) -> Choice:
    if not isinstance(net, ImplicitNetwork):
        return Choice(False, "the network has no fixed point")
    return _unless(
        (bool(kernel), "a kernel iterates R"),
        (net.tolerance.max_steps == 0, "max_steps is 0"),
        (net.tolerance.check_every == 0, "check_every is 0, so the depth is max_steps"),
    )


def _iterates(net: Any) -> bool:
    return isinstance(net, ImplicitNetwork) and net.tolerance.max_steps > 0


def _no_step(net: Any) -> str:
    """Return why kernels do not compute the steps of the solver, "" if they do."""
    if not isinstance(net, ImplicitNetwork):
        return "the network has no fixed point"
    coupled = uses_batch_statistics(net.R) if net.coupled is None else net.coupled
    norm, memory = type(net.tolerance.norm), getattr(net.solver, "memory", 0)
    return _unless(
        (bool(coupled), "the samples stop as one"),
        (norm not in (RMS, Euclidean), f"the norm is {norm.__name__}"),
        (memory > LONGEST, f"the memory of the solver is {memory}, at most {LONGEST}"),
    ).why


def _lacking(loop: Choice, device: torch.device) -> tuple[bool, str]:
    """Return whether a while node is needed that this machine does not have, and what it lacks."""
    from banach.fast.while_node import missing

    lacks = missing() if loop and runs_graphs(device) else ""
    return bool(lacks), f"a while node needs {lacks}"


def _graph(net: Any, device: torch.device, refused: str | None, loop: Choice) -> Choice:
    mode = net.backward if isinstance(net, ImplicitNetwork) else None
    syncs = isinstance(mode, Implicit) and mode.syncs_with_host
    return _unless(
        (not runs_graphs(device), f"the weights are on the {device.type.upper()}"),
        (refused is not None, str(refused)),
        _lacking(loop, device),
        (bool(loop) and _counts_steps(net), "the solver may depend on the number of the step; give it a `memory`"),
        (syncs, "Implicit syncs with the host for its report or its method; NormalCG and Anderson do not"),
    )


def _counts_steps(net: Any) -> bool:
    """Return True if the turns of a loop may not be the same for the solver."""
    return type(net.solver) is not Picard and not hasattr(net.solver, "memory")


def _graph_of_prediction(net: Any, device: torch.device, refused: str | None, loop: Choice) -> Choice:
    if not isinstance(net, ImplicitNetwork):
        return Choice(False, "the network has no fixed point")
    return _unless(
        (not runs_graphs(device), f"the weights are on the {device.type.upper()}"),
        (refused is not None, str(refused)),
        _lacking(loop, device),
        (bool(loop) and _counts_steps(net), "the solver may depend on the number of the step; give it a `memory`"),
        (bool(net.coupled) or uses_batch_statistics(net.R), "the samples of a batch share statistics"),
        (any(module.training for module in net.modules()), "a part of the network is in training mode"),
    )


def _bare(net: Any, no_step: str, *, training: bool, observed: bool) -> Choice:
    if not isinstance(net, ImplicitNetwork):
        return Choice(False, "the network has no fixed point")
    modes = (JFB,) if training else (JFB, Neumann, Implicit)  # of those the value is T(z)
    return _unless(
        (not is_as_written(net), "the network overrides forward or has hooks"),
        (type(net.solver) not in (Picard, Anderson), f"the solver is {type(net.solver).__name__}"),
        (type(net.solver) is Anderson and bool(no_step), f"the solver is Anderson, and its kernels: {no_step}"),
        (_halves_are_damped(net), "iterates of damped steps in half precision are kept in fp32"),
        (type(net.backward) not in modes, f"the backward mode is {type(net.backward).__name__}"),
        (observed, "penalties observe the network's own pass"),
        *(_not_copied(net.R) if training else ()),
    )


def _halves_are_damped(net: ImplicitNetwork) -> bool:
    kinds = {parameter.dtype for parameter in net.parameters()}
    return bool(getattr(net.solver, "damping", 0)) and not kinds.isdisjoint((torch.bfloat16, torch.float16))


def _not_copied(R: Any) -> list[tuple[bool, str]]:
    """Return why R cannot be iterated by a copy that keeps no statistics."""
    if not isinstance(R, nn.Module):
        return [(True, "R is a function, not a module")]
    norms = [module for module in R.modules() if isinstance(module, _BatchNorm)]
    known = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    changes = any(module.training for module in R.modules()) and any(id(b) not in known for b in R.buffers())
    masks = any(draws_masks(module) for module in R.modules())
    return [(changes, "R may change buffers in training mode"), (masks, "R draws dropout masks")]


def _no_kernel(net: nn.Module, device: torch.device) -> str:
    """Return why Triton kernels are not used, "" if they are. Kernels are imported only where they may be."""
    weight = next(net.parameters(), None)
    if not runs_graphs(device):
        return "needs a CUDA GPU"
    if weight is None or weight.dtype != torch.float32:
        return "needs float32 weights"
    from banach.kernels import has_triton

    return "" if has_triton() else "needs Triton 3.4"


def _no_latent_kernel(net: Any, device: torch.device) -> list[tuple[bool, str]]:
    """Return why the kernel does not compute the iteration of this network."""
    if not isinstance(net, ImplicitNetwork):
        return [(True, "the network has no fixed point")]
    solver, norm = net.solver, type(net.tolerance.norm)
    known = runs_graphs(device) and _describes(net.R)
    return [
        (type(solver) is not Picard or bool(solver.damping), f"the solver is {solver}"),
        (net.tolerance.max_steps == 0, "max_steps is 0"),
        (norm not in (WorstPixel, RMS, Euclidean), f"the norm is {norm.__name__}"),
        (net.coupled not in (None, uses_batch_statistics(net.R)), f"coupled is {net.coupled}"),
        (not known, "R is not a known latent map"),
    ]


def _describes(R: Any) -> bool:
    from banach.kernels import describe

    return describe(R) is not None


def _is_fusable(block: Any) -> bool:
    """Return True if the class that defines the block's `forward` declares it, and nothing was changed since."""
    if not getattr(block, "fusable", False) or any(map(is_hooked, block.modules())):
        return False
    from banach.kernels import says

    return says(block, "fusable") and isinstance(block.norm, nn.BatchNorm2d)


def _channels_last(device: torch.device, precision: str, windows: Choice) -> Choice:
    no = _unless(
        (not runs_graphs(device), "needs a CUDA GPU"),
        (precision == "fp32" and not windows, "fp32 does not use tensor cores"),
    )
    return Choice(True, "window convolutions read it" if windows else "tensor cores read it") if no else no
