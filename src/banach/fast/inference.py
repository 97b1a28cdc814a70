"""compile(net): the same network for prediction; on a GPU Q, the iteration and S are captured as CUDA graphs."""

from typing import Any

import torch
from torch import Tensor

from banach.fast.capture import CapturedCalls, HeldFixed
from banach.fast.network import FastNetwork, promoted
from banach.fast.plan import is_as_written, plan
from banach.latent import Latent, leaves, map_leaves, select
from banach.network import ImplicitNetwork
from banach.nn.layers import uses_batch_statistics
from banach.solve import Solution, Status, mixes_samples
from banach.solve.solution import DEFERRED
from banach.solve.warning import warn_unconverged


class CompiledNetwork:
    """N(d) without gradients: `fast = banach.compile(net.eval())`, then `fast(d)` in place of `net(d)`.

    On a GPU Q, the iteration and S are CUDA graphs, one set per batch size and dtype; the batch is padded to the
    next power of two. A sample stops at its own step and costs little afterwards. Samples that diverge are solved
    once more by `solve`, which keeps their best iterate; to know them costs one host sync, except where a kernel
    knows R. (At `check_every=0` there is no sync, and by fused steps they keep their last one.) On a CPU `solve`
    lets converged samples leave the batch. `plan` says what runs. Later changes of the weights in place are seen.

    Args:
        net: a network in eval mode whose Q, R and S treat each sample by itself: they see parts of the batch. What
            they return is a tensor or a nest (tuple, list, dict) of tensors, all with one row per sample.
        bf16: compute under autocast.
        compile: compile Q, R and S by torch.compile.
    """

    def __init__(self, net: ImplicitNetwork, *, bf16: bool = False, compile: bool = False) -> None:
        if not is_as_written(net):
            got = type(net).__name__
            got += " with hooks or an overridden forward" if isinstance(net, ImplicitNetwork) else ""
            raise TypeError(f"compile takes an ImplicitNetwork whose Q, R and S it can call itself, got {got}")
        self.net, self.bf16, self.compiles = net, bf16, compile
        self._prepare()

    def _prepare(self) -> None:
        """Plan for the network as it is: its solver, tolerance and mode may be assigned later."""
        net = self.net
        if net.coupled:
            raise ValueError("compile takes a network whose samples stop one by one, got coupled=True")
        self._predicts = not any(m.training for m in net.modules()) and not uses_batch_statistics(net.R)
        self.plan = plan(net, precision="bf16" if self.bf16 else None, training=False, compile=self.compiles)
        self.fast = FastNetwork(net, self.plan)
        self._calls = CapturedCalls()
        self._independent = bool(self.plan.kernel)  # R is known to treat each sample by itself
        self._made_for: HeldFixed | None = self._held()

    def _held(self) -> HeldFixed:
        return HeldFixed(self.net, numbers=bool(self.plan.graph))

    @property
    def outdated(self) -> bool:
        """The network has changed since the last call, in a way that replays do not see."""
        return self._made_for is None or self._made_for.changed()

    @torch.no_grad()
    def __call__(self, *inputs: Any, z0: Latent | None = None, solution: bool = False) -> Any:
        """Return the output, or (output, Solution).

        Args:
            inputs: the inputs of Q, or one tuple of them; tensors with one row per sample.
            z0: starting latent, such as the `value` of the frame before.
            solution: also return the `Solution`.
        Warns:
            ConvergenceWarning: without `solution`, if samples did not converge, unless a kernel knows R or
                `check_every` is 0.
        """
        if self.outdated:
            self._prepare()
        if not self._predicts:
            raise RuntimeError("a compiled network predicts in eval mode; call net.eval() first")
        d = inputs[0] if len(inputs) == 1 and type(inputs[0]) is tuple else inputs
        others = [type(one).__name__ for one in d if not isinstance(one, Tensor)]
        if others or not d:
            got = ", ".join(others) or "none"
            raise TypeError(f"compile takes networks whose inputs are tensors, got {got}; call the network itself")
        batch = len(d[0])
        _check_rows("d", d, batch)
        if z0 is not None:
            _check_rows("z0", z0, batch)
        if not batch and self.plan.graph:  # there is no sample to pad a batch with
            return self.net(*d, z0=z0, solution=solution)
        if not self._independent and batch > 1 and self.net.tolerance.max_steps:
            self._check_independent(d)
        y, found = self._run(d, z0, solution=solution)
        self._made_for = self._made_for or self._held()
        if found.failures and not solution:
            # `coupled`: its samples are independent, so R is not probed.
            warn_unconverged(found, self.fast.R, (), coupled=True, owner=self.fast.R)
        return (y, found) if solution else y

    def _run(self, d: tuple[Tensor, ...], z0: Latent | None, *, solution: bool) -> tuple[Any, Solution]:
        """Return copies of the output and, if wanted, of the Solution, which the next call would overwrite."""
        elsewhere = d[0].device.type != torch.device(self.plan.device).type  # Q may move its input by itself
        if not self.plan.graph or elsewhere:
            return self._answer(d, z0, eager=True)
        batch, given = len(d[0]), (d,) if z0 is None else (d, z0)
        made: tuple[Any, ...] = self._calls(self._flat_answer, given)
        wanted = len(made) if solution else 1
        copied = map_leaves(lambda part: part[:batch].clone(), made[:wanted])  # before the host waits
        failures, again = self._failures(made, batch)
        if again is not None:
            better = self._flat_answer(*select(given, again), eager=True)[:wanted]
            for mine, other in zip(leaves(copied), leaves(better), strict=True):
                mine[again] = other.to(mine.dtype)
        made = (*copied, *made[wanted:])
        known: Any = {"solver": self.net.solver, "tolerance": self.net.tolerance, "failures": failures}
        return made[0], Solution(*made[1:], **known)

    def _failures(self, made: tuple[Any, ...], batch: int) -> tuple[frozenset[Status], Tensor | None]:
        """Return how samples failed, and which ones to solve again, None if none. Syncs with the host."""
        tolerance = self.net.tolerance
        if self.plan.kernel or not tolerance.max_steps or tolerance.check_every == 0:
            return frozenset(), None
        _, converged, _, _, nonfinite, diverged = (number[:batch] for number in made[2:])
        met, lost, far = torch.stack((converged, nonfinite, diverged)).cpu()
        kinds = {Status.NONFINITE: lost.any(), Status.MAX_STEPS: (~(met | lost)).any()}
        failures = frozenset(status for status, some in kinds.items() if some)
        if not self.plan.fused_step:  # only an `Iteration` keeps no best iterate
            return failures, None
        again = lost | far
        return failures, again.nonzero()[:, 0].to(converged.device) if again.any() else None

    def _answer(
        self, d: tuple[Tensor, ...], z0: Latent | None = None, *, eager: bool = False
    ) -> tuple[Any, Solution]:
        """Return N(d) and the Solution. `eager`: by `solve`, with host checks."""
        fast, count = self.fast, len(d[0])
        if self.plan.graph:
            self._made_for = None  # modules may change their numbers when they are called
        w = next(self.net.parameters(), d[0])  # d may be on another device: Q may move it
        with torch.cuda.device_of(w), torch.autocast(w.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            fast.bf16.refresh()
            v = _check_rows("Q(d)", fast.Q(*d), count)
            if eager:
                z0 = _check_rows("the latent", self.net.start(v) if z0 is None else z0, count)
            found = fast.solve(v, z0, checked=eager)
            z = _check_rows("the latent", found.value, count)
            return _check_rows("S(u)", fast.S(self.net.backward.attach(fast.R, z, (v,))), count), found

    def _flat_answer(self, *given: Any, eager: bool = False) -> tuple[Any, ...]:
        """Return the same as one nest: the output, the latent and the numbers of its samples."""
        y, found = self._answer(*given, eager=eager)
        return y, found.value, *(getattr(found, name) for name in DEFERRED)

    def _check_independent(self, d: tuple[Tensor, ...]) -> None:
        """Refuse an R that mixes samples, once, by a few evaluations: late samples go on as a smaller batch."""
        w = next(self.net.parameters(), d[0])  # d may be on another device: Q may move it
        with torch.cuda.device_of(w), torch.autocast(w.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            self.fast.bf16.refresh()
            v = _check_rows("Q(d)", self.fast.Q(*d), len(d[0]))
            _check_rows("Q(d) of one sample", self.fast.Q(*(one[:1] for one in d)), 1)
            self._independent = not mixes_samples(self.fast.R, promoted(self.net.start(v)), (v,))
        if not self._independent:
            got = "compile takes networks whose R treats each sample by itself, and this one mixes samples"
            raise ValueError(f"{got}; call the network itself, with coupled=True")


compile = CompiledNetwork  # `banach.compile(net)` reads like `torch.compile(net)`


def _check_rows(name: str, value: Latent, count: int) -> Latent:
    """Return the value if its tensors have a row for each sample: samples leave the batch one by one."""
    name = f"{name} of a compiled network"
    for leaf in leaves(value, name):
        if leaf.shape[:1] != (count,):
            got = f"got a tensor of shape {tuple(leaf.shape)}; otherwise call the network itself"
            raise ValueError(f"{name} must have a row for each of {count} samples, {got}")
    return value
