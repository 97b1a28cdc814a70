"""FastNetwork: Q, R and S with the layers of the plan, called one by one without a host sync; memory formats."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from banach import kernels
from banach.fast.iteration import Iteration
from banach.fast.plan import Plan, draws, is_stack, is_window, plan
from banach.latent import Latent, detach, leaves, map_leaves
from banach.network import ImplicitNetwork, as_inputs, is_coupled, zeros
from banach.nn import substitute
from banach.nn.dropout import check_dropout
from banach.nn.layers import modules_of, watch_over
from banach.nn.passes import Pass
from banach.solve import Solution, solve

Net = TypeVar("Net", bound=nn.Module)

# Layers whose weights autocast would cast at every call. Norms keep theirs in fp32, as autocast does.
_CAST = nn.Linear, _ConvNd


class FastNetwork:
    """d -> (output, Solution): N(d) with the layers of the plan. Without a fixed point the Solution is None.

    By JFB, Q, R and S are called one by one: a kernel that knows R iterates it, or an `Iteration`, or `solve`.
    Other modes go through the network itself. With bf16 weights call `bf16.refresh()` before the passes of a step,
    and `bf16.collect()` after each backward.
    """

    def __init__(self, net: Any, how: Plan | None = None) -> None:
        self.net, self.plan = net, plan(net) if how is None else how
        self.network = net if isinstance(net, ImplicitNetwork) else compiled(net, self.plan)
        self.bf16 = Bf16Weights({})
        predicts = self.plan.task == "prediction"
        if not (self.plan.own_loop or predicts):
            return
        if not predicts:
            check_dropout(net.R)
        parts = parts_of(net, self.plan)
        if self.plan.bf16_weights:
            self.bf16 = Bf16Weights(parts)
            parts = self.bf16.modules
        # Not bound methods of the network: compiled parts are called in its place.
        self.Q, self.R, self.S = (compiled(part, self.plan) for part in parts.values())
        self.iterated = self.R if predicts else compiled(frozen_copy(parts["R"]), self.plan)

    def __call__(self, d: Any) -> tuple[Any, Solution | None]:
        if not self.plan.own_loop:
            return run_network(self.network, as_inputs(d))
        v = self.Q(*as_inputs(d))
        R = self.net.R
        # A pass holds the dropout masks of R for all evaluations of this call.
        masks = Pass(R) if draws(R) else nullcontext()
        with nullcontext() if self.plan.compiled else watch_over(R), masks:
            found = self.solve(detach(v))
            u = self.R(found.value, v)
        return self.S(u), found

    @torch.no_grad()
    def solve(self, v: Latent, z0: Latent | None = None, *, checked: bool = False) -> Solution:
        """Find u = R(u, v) from z0, by default the network's start. `checked`: by `solve`, with host checks."""
        net, tolerance, plan = self.net, self.net.tolerance, self.plan
        kernel, fused = plan.kernel and not checked, plan.fused_step and not checked
        if z0 is None and not (kernel and net.start is zeros):
            z0 = net.start(v)
        if kernel:
            return kernels.latent_solve(net.R, v, z0, tolerance=tolerance)
        if fused:
            halves = not draws(net.R)  # masks are those of the whole batch
            return Iteration(self.iterated, net.solver, tolerance, halves=halves)(promoted(z0), v)
        compact = checked and not plan.graph and tolerance.check_every != 0 and len(leaves(v)[0]) > 0
        options: Any = {"tolerance": tolerance, "coupled": is_coupled(net), "compact": compact}
        return solve(self.iterated, promoted(z0), net.solver, inputs=(v,), **options)


def run_network(net: Any, d: tuple[Any, ...], call: Callable[..., Any] | None = None) -> tuple[Any, Any]:
    """Call the network, by `call` if given. Return its output and its Solution, None without fixed point."""
    call = net if call is None else call
    own = net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net
    return call(*d, solution=True) if isinstance(own, ImplicitNetwork) else (call(*d), None)


def promoted(z: Latent) -> Latent:
    """Return z in at least fp32 under autocast, as in `solve`: rounding to bf16 alone can exceed the tolerance."""
    if not torch.is_autocast_enabled(leaves(z)[0].device.type):
        return z
    return map_leaves(lambda leaf: leaf.to(torch.promote_types(leaf.dtype, torch.float32)), z)


def parts_of(net: ImplicitNetwork, plan: Plan) -> dict[str, Any]:
    """Return Q, R and S with the layers of the plan.

    R is not fused where its values measure the residual: fused blocks keep them in bf16, whose rounding is above a
    tolerance of 0.1 in the paper's CIFAR-10 network. Nor where it drops: fused blocks draw masks of their own.
    """
    measures = (not plan.kernel and net.tolerance.max_steps > 0) or draws(net.R)
    stacks = {"Q": plan.fused_blocks, "R": plan.fused_blocks and not measures, "S": plan.fused_blocks}
    windows = bool(plan.windows)
    return {part: with_kernels(getattr(net, part), stacks=bool(stacks[part]), windows=windows) for part in stacks}


def with_kernels(part: Any, *, stacks: bool = False, windows: bool = False) -> Any:
    """Return the part with kernels for its stacks of blocks and its convolutions; everything else is shared."""
    instead: dict[nn.Module, Any] = {}
    for module in modules_of(part):
        if stacks and is_stack(module):
            instead[module] = FusedStack(list(module.children()))
        elif windows and is_window(module):
            instead[module] = substitute(module)
            instead[module].__class__ = WindowConv2d
    return substitute(part, instead) if instead else part


def compiled(part: Any, plan: Plan) -> Any:
    """Return the part compiled for fixed shapes, if the plan says so: a CUDA graph has one."""
    return torch.compile(part, dynamic=False) if plan.compiled else part


class Bf16Weights:
    """Copies of modules whose matrix weights are bf16; the optimizer changes the fp32 originals.

    This is what autocast computes, in two kernels per step rather than two per weight and evaluation. Weights that
    a Triton kernel reads become channels_last, which it would otherwise copy at every evaluation. Other parameters
    and all buffers are shared with the originals.
    """

    def __init__(self, modules: dict[str, Any]) -> None:
        formats = {p: one for module in modules.values() for p, one in _matrices(module).items()}
        casts = {p: p.detach().to(torch.bfloat16, memory_format=one) for p, one in formats.items()}
        self.casts = {p: nn.Parameter(cast, p.requires_grad) for p, cast in casts.items()}  # by original
        self.modules = {name: substitute(module, self.casts) for name, module in modules.items()}

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the originals, before a step."""
        _copy(self.casts.values(), self.casts)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients to those of the originals, in fp32, after a backward pass, and drop them."""
        made = {p: cast.grad for p, cast in self.casts.items() if cast.grad is not None}
        found = [torch.empty_like(p) for p in made]
        _copy(found, made.values())
        for p, grad in zip(made, found, strict=True):
            # A loss may read the originals too, as weight decay does, and a batch may come in parts.
            p.grad, self.casts[p].grad = grad if p.grad is None else p.grad + grad, None


def _matrices(module: Any) -> dict[Tensor, torch.memory_format]:
    """Return the parameters to cast, and the memory format of their casts."""
    formats: dict[Tensor, torch.memory_format] = {}
    for layer in modules_of(module):
        if isinstance(layer, _CAST):
            formats |= dict.fromkeys(layer.parameters(recurse=False), torch.preserve_format)
        if isinstance(layer, WindowConv2d):
            formats[layer.weight] = torch.channels_last
    return {p: one for p, one in formats.items() if p.dtype == torch.float32}


def _copy(to: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy tensors, those that keep their strides in one kernel: one other pair would split it into many."""
    pairs = list(zip(to, values, strict=True))
    alike = [(one, value) for one, value in pairs if one.stride() == value.stride()]
    if alike:  # torch refuses empty lists
        torch._foreach_copy_([one for one, _ in alike], [value for _, value in alike])
    for one, value in pairs:
        if one.stride() != value.stride():
            one.copy_(value)


def frozen_copy(R: Any) -> Any:
    """Return R, a copy with the same weights if it has train-mode batch norm, which then keeps no statistics.

    What R computes once per capture, such as the inverses of a monotone network, is shared without a copy.
    """
    if not any(map(_tracks, modules_of(R))):
        return R
    made = substitute(R)
    for module in filter(_tracks, made.modules()):
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
    return made


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training and module.track_running_stats


class FusedStack(nn.Module):
    """A Sequential of blocks x -> BN(LReLU(x + conv(drop(LReLU(conv(x)))))), computed by fused kernels."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = list(blocks)  # the network's: in a list they stay out of parameters() and of copies

    @torch.compiler.disable  # kernels are launched as they are; the code around them is compiled
    def forward(self, x: Tensor) -> Tensor:
        return kernels.residual_stack(self.blocks, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedStack":
        return FusedStack(self.blocks)


class WindowConv2d(nn.Conv2d):
    """A Conv2d by `banach.kernels.conv2d`, in the dtype of autocast where it is on, else of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        kind, dtype = x.device.type, self.weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        bias = None if self.bias is None else self.bias.to(dtype)
        weight = self.weight.to(dtype)
        x = x.to(dtype, memory_format=torch.channels_last)  # here, where a compiler joins it with what made x
        if not kernels.window.has_kernel(x, weight):
            return self._conv_forward(x, weight, bias)
        return kernels.conv2d(x, weight, bias, self.stride[0], int(self.padding[0]))


def channels_last(net: Net) -> Net:
    """Return the network itself, the weights of its convolutions in channels_last memory format.

    The values stay the same. Activations follow the weights, so use `flatten` or `reshape` where the network views
    an image: `view` fails.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


def align_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's state the strides of its weights: fused optimizers refuse a mixture.

    Args:
        optimizer: of a network whose memory format has changed, or whose state was loaded.
    """
    for p, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == p.shape and value.stride() != p.stride():
                state[name] = torch.empty_like(p, dtype=value.dtype).copy_(value)
