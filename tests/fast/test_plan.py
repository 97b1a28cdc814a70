"""A plan says what runs and why not something faster."""

from typing import Any

import pytest
import torch
from torch import nn

import banach
from banach import GMRES, RMS, Anderson, Broyden, Implicit, Neumann, Picard, Tolerance, Unroll, models
from banach.fast import Plan, plan
from fast.simulated import PLAN, simulate_gpu


def build(name: str = "digits", coupled: bool | None = None, **options: Any) -> Any:
    net: Any = models.build(name, **options).train()
    net.coupled = coupled
    return net


def test_on_a_cpu_steps_are_eager() -> None:
    assert str(plan(build())) == "training step on cpu, fp32: eager\n  CUDA graph: no, the weights are on the CPU"
    how = plan(build(), refused="fast is off").to_dict()
    assert how["CUDA graph"] == "no, the weights are on the CPU"


def test_on_a_gpu_every_choice_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, kernels=True)
    lines = str(plan(build("cifar10"), precision="bf16")).splitlines()
    assert lines[0] == "training step on cpu, bf16: captured"
    assert lines[1:] == [
        "  CUDA graph: yes",
        "  Q, R, S one by one: yes",
        "  one-launch kernel: yes",
        "  while node: no, a kernel iterates R",
        "  fused step: no, a kernel iterates R",
        "  bf16 weights: yes",
        "  fused blocks: yes",
        "  window convolutions: yes",
        "  channels_last: yes",
        "  torch.compile: no, not asked for",
    ]


class OtherNorm(RMS):
    pass


class Momentum(Picard):
    """Its steps depend on their number."""

    def step(self, memory: Any, at: Any) -> Any:
        return torch.lerp(at.Tz, at.z, 1 / at.step), memory


OTHER_NORM, NO_STEPS = Tolerance(norm=OtherNorm()), Tolerance(max_steps=0)
REASONS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("graph", {}, {"refused": "fast is off"}, "fast is off"),
    ("graph", {"backward": Implicit(GMRES())}, {}, "Implicit syncs with the host for its report or its method"),
    ("graph", {"solver": Momentum()}, {}, "the solver may depend on the number of the step; give it a `memory`"),
    ("own_loop", {"backward": Neumann(1)}, {}, "the backward mode is Neumann"),
    ("own_loop", {}, {"observed": True}, "penalties observe the network's own pass"),
    ("kernel", {"solver": Picard(damping=0.1)}, {}, "the solver is Picard(damping=0.1)"),
    ("kernel", {"tolerance": NO_STEPS}, {}, "max_steps is 0"),
    ("kernel", {"tolerance": OTHER_NORM}, {}, "the norm is OtherNorm"),
    ("kernel", {"coupled": False}, {}, "coupled is False"),
    ("kernel", {"batch_norm": False}, {}, "R is not a known latent map"),
    ("fused_step", {"batch_norm": False, "solver": Broyden()}, {}, "the solver is Broyden"),
    ("fused_step", {"batch_norm": False, "solver": Anderson(9)}, {}, "the memory of the solver is 9, at most 8"),
    ("fused_step", {"batch_norm": False, "tolerance": OTHER_NORM}, {}, "the norm is OtherNorm"),
]


@pytest.mark.parametrize(("choice", "options", "how", "why"), REASONS)
def test_reasons(choice: str, options: Any, how: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, kernels=True)
    made = plan(build(**options), **how)
    assert getattr(made, choice).why.startswith(why)
    if choice == "own_loop":
        assert made.graph
        assert made.kernel.why == made.windows.why == "Q, R and S are not called one by one"


def test_kernels_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, kernels=True)
    assert plan(build("mnist"), precision="tf32").windows.why == "cuDNN is faster in TF32"
    assert plan(build("mnist"), precision="fp32").channels_last
    assert not plan(build("mnist", backward=Neumann(1)), precision="fp32").channels_last
    assert plan(build("mnist"), precision="tf32").channels_last
    explicit = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert plan(explicit).graph
    assert plan(explicit).own_loop.why == "the network contains no ImplicitNetwork"


def test_a_network_inside_another_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, kernels=True)
    net = build()
    larger = plan(nn.Sequential(net, nn.Flatten()))
    assert larger.graph
    assert str(larger.loop) == "yes, the fixed point is that of a module inside the network"
    net.tolerance = Tolerance(max_steps=0)
    assert not plan(nn.Sequential(net)).loop
    net.tolerance = Tolerance()
    assert plan(nn.DataParallel(net)).graph.why.startswith("DataParallel exchanges tensors between devices")
    net.solver = Momentum()
    assert plan(nn.Sequential(net)).graph.why.startswith("the solver may depend on the number of the step")
    net.solver, net.backward = Picard(), Implicit(GMRES())
    assert plan(nn.Sequential(net)).graph.why.startswith("Implicit syncs with the host")
    outer = build()
    outer.S.inner = build(solver=Momentum())
    assert outer.S.inner.solver == Momentum()
    assert plan(outer).kernel
    assert plan(outer).graph.why.startswith("the solver may depend on the number of the step")
    monkeypatch.setattr(PLAN, "while_nodes_lack", lambda: "PyTorch 2.8")
    net.backward = Implicit()
    assert plan(nn.Sequential(net)).graph.why == "a while node needs PyTorch 2.8"


def test_a_compiled_network_has_a_plan() -> None:
    fast = banach.compile(build().eval())
    assert isinstance(fast.plan, Plan)
    assert str(fast.plan).startswith("prediction on cpu, fp32: eager")


def test_predictions_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neumann's value is JFB's; Unroll goes through the network when it is evaluated."""
    simulate_gpu(monkeypatch, kernels=False)
    assert plan(build(backward=Neumann(2)).eval(), training=False).own_loop
    assert not plan(build(backward=Unroll(2)).eval(), training=False).own_loop
    assert plan(build(), training=False).graph.why == "the samples of a batch share statistics"
    net = build().eval()
    net.S.drop.train()
    assert plan(net, training=False).graph.why == "a part of the network is in training mode"


@pytest.mark.gpu
def test_on_a_real_gpu_the_papers_network_has_everything() -> None:
    net = build("cifar10").cuda()
    made = plan(net, precision="bf16")
    used = "graph", "own_loop", "kernel", "bf16_weights", "fused_blocks", "windows", "channels_last"
    assert all(getattr(made, name) for name in used)
    assert plan(net.double(), precision="fp32").kernel.why == "needs float32 weights"


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="bf16"):
        plan(nn.Linear(2, 2), precision="bf61")
    with pytest.raises(TypeError, match="plan takes a network, got str"):
        plan("x")  # type: ignore[arg-type]
