"""Monotone operator networks: u = relu(W u + v) has one solution, which two splittings find."""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from banach import checks
from banach.latent import Latent, Space, leaves, map_leaves
from banach.solve import solve
from banach.solve.context import device_inverse, device_loop, weights_are_constant
from banach.solve.warning import warn_user

_steps: Counter[str] = Counter()  # of all optimizers: fused ones leave the `_version` of a weight as it is
register_optimizer_step_post_hook(lambda *_: _steps.update(["taken"]))


class MonotoneWarning(RuntimeWarning):
    """The guarantee of a monotone network does not hold: W is not monotone, or a step size is too large."""


class MonotoneLinear(nn.Module):
    """u -> W u,  W = (1 - m) I - A'A + B - B',  so that I - W >= m I in its symmetric part, whatever A and B.

    Then u = relu(W u + v) has exactly one solution for every v. W itself may have any norm: plain Picard can
    diverge, while `ForwardBackward` with a small step, or `PeacemanRachford` with any, finds the solution.
    (Winston and Kolter 2020.)
    """

    def __init__(self, width: int, m: float = 0.1) -> None:
        super().__init__()
        self.m = checks.above_zero("m", m)
        self.A = nn.Parameter(nn.init.xavier_normal_(torch.empty(width, width)))
        self.B = nn.Parameter(nn.init.xavier_normal_(torch.empty(width, width)))

    @property
    def weight(self) -> Tensor:
        """W, made from A and B. (A while loop of torch.export refuses their `.mT`.)"""
        eye = torch.eye(len(self.A), dtype=self.A.dtype, device=self.A.device)
        return (1 - self.m) * eye - self.A.t() @ self.A + self.B - self.B.t()

    def forward(self, u: Tensor) -> Tensor:
        return F.linear(u, self.weight)

    def matrices(self) -> Tensor:
        return self.weight

    def product(self, matrices: Tensor, z: Tensor, *, border: bool = True) -> Tensor:
        return F.linear(z, matrices)

    def inverse(self, matrices: Tensor, alpha: float, like: Tensor) -> Tensor:
        W = at_least_float32(matrices)
        eye = torch.eye(len(W), dtype=W.dtype, device=W.device)
        return inverse_of((1 + alpha) * eye - alpha * W).to(matrices.dtype)

    def invert(self, inverse: Tensor, h: Tensor) -> Tensor:
        return F.linear(h, inverse)

    def activate(self, u: Tensor) -> Tensor:
        return torch.relu(u)

    def extra_repr(self) -> str:
        return f"width={len(self.A)}, m={self.m}"


class Splitting(nn.Module):
    """R of a monotone network: a map whose fixed point solves z = relu(W z + v), with a step size `alpha`.

    What depends on the weights alone is computed once per pass, and cached until v or a weight changes. (PyTorch
    counts no changes through `.data`: call `train()` or `eval()` after one.) `alpha` is a number, not a weight; it
    is stored in the state_dict. From train to eval mode the guarantee is checked: see `check`.

    The layer has I - W >= m I in its symmetric part, and these methods:

        matrices()                      what W is made of, from the parameters; made once per pass
        product(matrices, z)            W z; `border=False`: what `activate` sets to zero may have any value
        inverse(matrices, alpha, like)  what `invert` needs for V = (I + alpha (I - W))^-1 on latents shaped so
        invert(inverse, h)              V h
        activate(u)                     relu, and zero on a border if there is one
    """

    layer: Any
    any_step_size = True  # it converges for every alpha

    def __init__(self, layer: nn.Module, alpha: float) -> None:
        super().__init__()
        self.layer, self.alpha = layer, checks.above_zero("alpha", alpha)
        self._kept: tuple[Any, Tensor, Any] | None = None
        self._shapes: list[torch.Size] = []

    def check(self) -> None:
        """Warn if the guarantee does not hold for the weights as they are, on latents as seen in the last call."""
        if not self._shapes:
            return
        least, L = monotonicity(self.layer, self._shapes)
        if not least >= self.layer.m - 2e-3 * L:  # also where it is NaN; TF32 rounds W by 1e-3
            fault = "W is not monotone, so that there may be no solution or several; check that weights are finite"
        elif not self.any_step_size and self.alpha * L**2 >= 2 * self.layer.m:
            fault = "alpha is not below 2 m / |I - W|^2; lower it, or use PeacemanRachford, if solves fail"
        else:
            return
        warn_user(f"the splitting may not converge: {fault}", MonotoneWarning)

    def train(self, mode: bool = True) -> Self:
        if self.training and not mode:
            self.check()
        self._kept = None
        return super().train(mode)

    def tune(self, net: Any, *d: Any) -> bool:
        """Tune alpha on a batch, see `tune_alpha`; `fit` calls this. Return True if alpha has changed."""
        return self.alpha != tune_alpha(net, *d)

    def _records_weights(self) -> bool:
        """Is this evaluation differentiated in the weights? A product with the Jacobian in u is not."""
        if not weights_are_constant():
            return torch.is_grad_enabled()
        return not all(p.is_leaf for p in self.layer.parameters())  # computed ones may depend on u

    def _once(self, v: Latent, make: Callable[[], Any]) -> Any:
        """Return make(), or what it gave earlier in this pass or capture for these weights; never recorded."""
        first, make = leaves(v)[0], torch.no_grad()(make)
        if torch.compiler.is_compiling():  # what is traced, such as an exported loop, changes no attribute
            return make()
        try:
            weights = [(p.data_ptr(), p._version) for p in self.layer.parameters()]
            kind, inference = first.device.type, torch.is_inference_mode_enabled()  # autograd refuses its tensors
            autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
            key: Any = (_place(first), first.shape[1:], self.alpha, weights, _steps.total(), autocast, inference)
        except RuntimeError:  # tensors of torch.func have no address
            key = None
        if (kept := self._kept) is not None and key is not None and kept[0] == key:
            return kept[2]
        made = make()
        # Holding v keeps its address from being given to the v of another pass, or of another CUDA graph.
        self._kept = None if key is None else (key, first.detach(), made)
        self._shapes = [leaf.shape for leaf in leaves(v)]
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "alpha"] = torch.tensor(self.alpha, dtype=torch.float64, device="cpu")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict = dict(state_dict)
        self.alpha = float(state_dict.pop(prefix + "alpha", self.alpha))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


class ForwardBackward(Splitting):
    """R(z, v) = relu((1 - a) z + a (W z + v)), W monotone and a `alpha`: same fixed point as relu(W z + v).

    It contracts for 0 < a < 2 m / |I - W|^2, by the factor sqrt(1 - 2 a m + a^2 |I - W|^2). Steps a few times
    larger often converge in practice. Damping instead mixes after the relu.
    """

    any_step_size = False

    def forward(self, u: Latent, v: Latent) -> Latent:
        kept = self._once(v, self.layer.matrices)
        M = self.layer.matrices() if self._records_weights() else kept
        Wu = self.layer.product(M, u, border=False)
        moved = map_leaves(lambda a, b, c: torch.lerp(a, (b + c).to(a.dtype), self.alpha), u, Wu, v)
        return self.layer.activate(moved)


class PeacemanRachford(Splitting):
    """R(u, v) = 2 y - h,  h = 2 z - u,  z = relu(u),  y = V (h + a v),  V = (I + a (I - W))^-1.

    At the fixed point u* the latent z* = relu(u*) solves z = relu(W z + v), so S must begin with the activation.
    It converges for every a > 0, and `Implicit(Picard())` is the exact backward pass by the same splitting. V is
    made once per pass, without autograd. Where the weights are differentiated, y comes from z by two steps of
    iterative refinement, y <- y + V (h + a v - V^-1 y). The first one gives y, the second all first derivatives at
    every u, and those of dR/du in the weights. At u* y is z, so that all derivatives of `Implicit` are exact.
    """

    def forward(self, u: Latent, v: Latent) -> Latent:
        layer, alpha = self.layer, self.alpha
        inverse = self._once(v, lambda: layer.inverse(layer.matrices(), alpha, v))
        minus_twice, z = partial(torch.sub, alpha=2), layer.activate(u)
        h = map_leaves(minus_twice, u, z)  # this, b and y with the other sign
        b = map_leaves(partial(torch.sub, alpha=alpha), h, v)
        if not self._records_weights():
            return map_leaves(minus_twice, h, layer.invert(inverse, b))
        M, y = layer.matrices(), map_leaves(torch.neg, z)
        for _ in range(2):
            rest = map_leaves(lambda b, y, Wy: b - (1 + alpha) * y + alpha * Wy, b, y, layer.product(M, y))
            y = map_leaves(torch.add, y, layer.invert(inverse, rest))
        return map_leaves(minus_twice, h, y)


def _place(v: Tensor) -> Any:
    """Return what tells a pass from others: the capture that it is part of, else the address of v.

    What was computed outside of a capture must not enter a CUDA graph, which is replayed with other weights. Parts
    of a batch in one capture share it.
    """
    captured = v.is_cuda and torch.cuda.is_current_stream_capturing()
    recording = getattr(device_loop(), "__self__", None) if captured else None
    return (v.data_ptr(), v.shape[0], captured) if recording is None else weakref.ref(recording)


@torch.no_grad()
def monotonicity(layer: Any, shapes: list[torch.Size], steps: int = 40) -> tuple[float, float]:
    """Estimate the least eigenvalue of sym(I - W), from above, and |I - W|_2, from below, by power iteration.

    Args:
        layer: W, a `MonotoneLinear` or `MonotoneConv2d`.
        shapes: of the tensors of a latent; the batch axis is ignored.
        steps: of the power iteration.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    parts = [draw(1, *shape[1:]).to(next(layer.parameters())) for shape in shapes]
    start = parts[0] if len(parts) == 1 else tuple(parts)
    space, M = Space.of(start), layer.matrices()

    def A(x: Tensor) -> Tensor:
        return x - space.rows(layer.product(M, space.nest(x)))

    x = y = space.rows(start)
    At = torch.func.vjp(A, x)[1]
    for _ in range(steps):
        x = F.normalize(At(A(x))[0])
    L = float(torch.linalg.vector_norm(A(x)))
    for _ in range(steps):
        y = F.normalize(L * y - (A(y) + At(y)[0]) / 2)
    return float((y * A(y)).sum()), L


def at_least_float32(x: Tensor) -> Tensor:
    """Return x, in float32 if its type is shorter: neither FFTs nor inverses exist in bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inverse_of(M: Tensor) -> Tensor:
    """Return the inverse of every matrix of a batch (..., n, n), each with a positive definite Hermitian part.

    In a capture by a kernel, or by Gauss-Jordan elimination, since the routines of LAPACK allocate memory. Such
    matrices need no pivoting.
    """
    if device_loop() is None:
        return torch.linalg.inv_ex(M).inverse
    if (found := device_inverse(M)) is not None:
        return found
    X = M.clone()
    for k, unit in enumerate(torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).unbind()):
        column = X[..., :, k].clone()
        X[..., :, k] = unit
        row = X[..., k, :] / column[..., k, None]
        X.addcmul_(column[..., :, None], row[..., None, :], value=-1)
        X[..., k, :] = row
    return X


@torch.no_grad()
def tune_alpha(net: Any, *d: Any, first: float = 1.0, halvings: int = 6) -> float:
    """Set `net.R.alpha` to the step size that solves a batch in the fewest steps, and return it.

    Starts at `first` and halves it while the mean number of steps does not rise. A sample that does not converge
    counts as twice the allowed steps. (Winston and Kolter 2020 do this at batch 30 and in mid-epoch.)

    Args:
        net: an `ImplicitNetwork` whose R is a `Splitting`.
        d: the inputs of Q.
        first: the largest step size to try.
        halvings: how often it may be halved.
    """
    v, best, fewest = net.Q(*d), first, float("inf")
    for k in range(halvings + 1):
        net.R.alpha = first / 2**k
        found = solve(net.R, net.start(v), net.solver, inputs=(v,), tolerance=net.tolerance)
        steps = int(torch.where(found.converged, found.steps, 2 * net.tolerance.max_steps).sum())
        if steps > fewest:
            break
        best, fewest = net.R.alpha, steps
    net.R.alpha = best
    return best
