"""What a module holds: layers that a pass has to care for, functions that R may not call, replaced parts."""

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from banach.solve.context import is_compiling

M = TypeVar("M")


def modules_of(R: Any) -> list[nn.Module]:
    """Return the modules of R, each once; none if R is a plain function."""
    return list(R.modules()) if isinstance(R, nn.Module) else []


_SPECIAL = (_BatchNorm, nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase, nn.RReLU)


@functools.cache
def _is_special(kind: type) -> bool:
    """Return True if modules of this class normalise by the batch, draw at random, or are sharded by FSDP2."""
    marks = ("one_mask_per_pass", "set_reshard_after_forward")
    return issubclass(kind, _SPECIAL) or any(hasattr(kind, mark) for mark in marks)


def special_layers(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that normalise by the batch, draw at random or are sharded. Most networks have none."""
    if torch.compiler.is_compiling():
        return modules
    return [module for module in modules if _is_special(type(module))]  # type: ignore[arg-type]


def check_sharded(modules: list[nn.Module], *, fixed_depth: bool, products: bool) -> None:
    """Refuse a part of R that gathers its weights at every evaluation, or frees them after products with J."""
    if products and any(hasattr(type(module), "set_reshard_after_forward") for module in modules):
        raise RuntimeError(
            "fully_shard makes a part of R free its weights after every product with its Jacobian, which Implicit "
            "needs: shard by banach.train.distributed.shard(net), or use JFB(), Neumann() or Unroll()"
        )
    if not fixed_depth and any(map(_gathers_often, modules)):
        raise RuntimeError(
            "fully_shard makes a part of R gather its weights from all ranks at every evaluation, and ranks may "
            "need different numbers of steps, so they would wait forever: pass reshard_after_forward=False for R"
        )


def _gathers_often(module: Any) -> bool:
    """Return True if FSDP2 frees the weights of a module after each call. PyTorch has no public way to ask."""
    if not hasattr(type(module), "set_reshard_after_forward") or torch.compiler.is_compiling():
        return False
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    nested = getattr(state, "_is_root", None) is False  # the outermost module keeps its weights
    return nested and any(getattr(group, "post_forward_mesh_info", None) is not None for group in groups)


def draws_masks(module: nn.Module) -> bool:
    """Return True if this module, in the mode it is in, drops by one mask per pass."""
    return module.training and hasattr(type(module), "one_mask_per_pass") and bool(getattr(module, "p", 0))


def uses_batch_statistics(R: Any, modules: list[nn.Module] | None = None) -> bool:
    """Return True if R mixes the samples of a batch: batch norm does, unless it uses its running statistics."""
    norms = [m for m in (modules_of(R) if modules is None else modules) if isinstance(m, _BatchNorm)]
    return any(norm.training or (norm.running_mean is None and norm.running_var is None) for norm in norms)


def is_hooked(module: nn.Module) -> bool:
    """Return True if hooks of this module, or hooks of all modules, are called with it."""
    kinds, of_all = ("forward", "forward_pre", "backward", "backward_pre"), nn.modules.module
    return any(getattr(module, f"_{kind}_hooks") or getattr(of_all, f"_global_{kind}_hooks") for kind in kinds)


# Every module R whose first pass in train mode drew nothing by a function. Later passes are not watched: that
# would cost about a microsecond for every operation of R.
_quiet: weakref.WeakSet[Any] = weakref.WeakSet()

# Functions that a watch looks at, and the names of their arguments by place, as far as they matter.
_PLAIN = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(_PLAIN, ("input", "p", "training")),
    torch.dropout: ("input", "p", "train"),
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p"),
    F.multi_head_attention_forward: (*map(str, range(10)), "dropout_p"),
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
}
_LAYER = "banach.nn.Dropout({p:g})"
_ATTENTION = f"banach.nn.scaled_dot_product_attention(q, k, v, dropout=layer) with layer = {_LAYER}"


class Watch(TorchFunctionMode):
    """Raises a RuntimeError, with advice, when R calls a function that changes R between two evaluations.

    That is dropout, which draws a new mask at every evaluation. In an R that is not a module, whose buffers are
    out of reach, it is also a batch norm that updates its statistics.
    """

    def __init__(self, R: Any) -> None:
        super().__init__()
        self.R = R

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None and isinstance(self.R, nn.Module):
            _quiet.add(self.R)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ARGUMENTS:
            given = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
            if given.get("training", given.get("train", True)):
                self._check(func, given)
        return func(*args, **kwargs)

    def _check(self, func: Any, given: dict[str, Any]) -> None:
        if p := given.get("p", given.get("dropout_p", 0.0)):
            advice = (_LAYER if "dropout_p" not in _ARGUMENTS[func] else _ATTENTION).format(p=p)
            raise RuntimeError(
                f"R calls {getattr(func, '__name__', func)} with a dropout probability of {p:g}, which draws a "
                "new mask at every evaluation, so there is no fixed point to find: make a layer in R's __init__ "
                f"and use {advice}"
            )
        if given.get("running_mean") is not None and not isinstance(self.R, nn.Module):
            raise RuntimeError(
                f"R is a {type(self.R).__name__} that calls batch_norm in train mode, whose statistics have to be "
                "kept for a whole pass: give ImplicitNetwork the module itself as R"
            )


def watch_over(R: Any) -> AbstractContextManager[Any]:
    """Return the watch over the first train-mode pass of a module R.

    Nothing is watched later, in eval mode, or if Dynamo compiles some of R: it would compile the watch too.
    """
    if is_compiling() or not isinstance(R, nn.Module) or not R.training or R in _quiet:
        return nullcontext()
    compiled = any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in R.modules())
    return nullcontext() if compiled else Watch(R)


def watched(R: Callable[..., Any]) -> Callable[..., Any]:
    """Return the plain function R with a watch over its first evaluation; R itself if Dynamo compiles it.

    Every pass needs one, since the layers that a function reaches, and their modes, are not known.
    """
    if is_compiling() or hasattr(R, "_torchdynamo_orig_callable"):
        return R
    waiting = [Watch(R)]

    def call(*given: Any) -> Any:
        with waiting.pop() if waiting else nullcontext():
            return R(*given)

    return call


def substitute(module: M, instead: Mapping[Any, Any] | None = None) -> M:
    """Return a copy of the module's structure with some tensors or submodules replaced.

    Parameters, buffers and submodules that are keys of `instead` become its values, wherever they occur. All other
    tensors are shared with the original, so training one trains both. Other attributes are copied: a flag that is
    set on the copy does not change the original.

    Args:
        module: an `nn.Module`; anything else, such as a plain function, is returned unchanged.
        instead: replacements by original.
    Returns:
        The copy, or the replacement of the module itself.
    """
    if not isinstance(module, nn.Module):
        return module
    plain = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers(), *plain)}
    replaced = {id(old): new for old, new in (instead or {}).items()}
    return copy.deepcopy(module, {**shared, **replaced})
