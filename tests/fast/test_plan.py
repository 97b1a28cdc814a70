"""A plan says what runs and why not something faster."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import banach
from banach import GMRES, Implicit, Neumann, Tolerance, Unroll, models
from banach.fast import Plan, plan
from fast.simulated import simulate_gpu


def build(name: str = "digits", **options: Any) -> Any:
    return models.build(name, **options).train()


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
        "  own loop: yes",
        "  one-launch kernel: yes",
        "  while node: no, a kernel iterates R",
        "  fused step: no, a kernel iterates R",
        "  bf16 weights: yes",
        "  fused blocks: yes",
        "  window convolutions: yes",
        "  channels_last: yes, window convolutions read it",
        "  torch.compile: no, not asked for",
    ]


GRAPH: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "refused": ({}, {"refused": "fast is off"}, "fast is off"),
    "Implicit": ({"backward": Implicit(GMRES())}, {}, "Implicit syncs with the host for its report or its method"),
}
BARE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mode": ({"backward": Neumann(1)}, {}, "the backward mode is Neumann"),
    "observed": ({}, {"observed": True}, "penalties observe the network's own pass"),
}


@pytest.mark.parametrize("name", [*GRAPH, *BARE])
def test_reasons(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, kernels=True)
    options, how, why = {**GRAPH, **BARE}[name]
    made = plan(build(**options), **how)
    assert (made.graph if name in GRAPH else made.own_loop).why.startswith(why)
    if name in BARE:
        assert made.graph
        assert made.kernel.why == made.windows.why == "the network is not taken apart"


def test_kernels_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch, kernels=True)
    assert plan(build(tolerance=Tolerance(max_steps=0))).kernel.why == "max_steps is 0"
    assert plan(build("mnist"), precision="tf32").windows.why == "cuDNN is faster in TF32"
    assert plan(build("mnist"), precision="fp32").channels_last
    assert not plan(build("mnist", backward=Neumann(1)), precision="fp32").channels_last
    assert plan(build("mnist"), precision="tf32").channels_last.why == "tensor cores read it"
    explicit = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert plan(explicit).graph
    assert plan(explicit).own_loop.why == "the network has no fixed point"


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
