"""Memory against depth: what autograd keeps is counted by hand, and the study must find it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from banach.backward import JFB, Implicit, Unroll
from banach.paper import Options, memory
from banach.paper.memory import LiveBytes, Measured, Plan

CPU = torch.device("cpu")


def latent_bytes(plan: Plan) -> int:
    return plan.batch * 24 * 4 * 4 * 4  # digits: 24x4x4 floats


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Options]:
    folder = tmp_path_factory.mktemp("memory")
    options = Options(quick=True, device="cpu", out=folder / "out", runs=folder / "runs")
    return memory.run(options), options


def test_one_more_step_keeps_what_autograd_saves(found: Any) -> None:
    """Unrolled: the inputs of two convolutions and of two activations. Checkpointed: u. The others: nothing."""
    findings, _ = found
    latent = latent_bytes(memory.QUICK)
    peak = {(row["scheme"], row["depth"]): 1e6 * row["peak MB"] for row in findings.rows}
    growth = {name: (peak[name, 16] - peak[name, 8]) / 8 for name in memory.SCHEMES}
    assert growth["unrolled"] == pytest.approx(4 * latent, rel=1e-3)
    assert growth["unrolled, checkpointed"] == pytest.approx(latent, rel=1e-3)
    assert growth["JFB"] == pytest.approx(0, abs=0.01 * latent)
    assert growth["Jacobian-based"] == pytest.approx(0, abs=0.01 * latent)
    assert peak["JFB", 16] < peak["Jacobian-based", 16] < peak["unrolled", 16]


def test_columns_notes_and_figure(found: Any) -> None:
    findings, options = found
    assert len(findings.rows) == len(memory.SCHEMES) * len(memory.QUICK.depths)
    columns = {"scheme", "depth", "paper", "peak MB", "milliseconds", "time against JFB", "J-products per sample"}
    assert all(columns <= set(row) for row in findings.rows)
    products = {row["scheme"]: row["J-products per sample"] for row in findings.rows}
    assert products["JFB"] == 0
    assert products["unrolled"] is products["unrolled, checkpointed"] is None  # autograd's own
    assert products["Jacobian-based"] >= 4
    pytest.importorskip("matplotlib")
    assert {path.name for path in findings.write(options)} >= {"memory.json", "memory.png", "memory.svg"}
    assert any("unrolled 4.00, unrolled, checkpointed 1.00" in note for note in findings.notes)


def test_all_schemes_differentiate_the_same_map() -> None:
    """Deep enough, unrolling gives the implicit gradient; JFB gives another one."""
    R, v = memory._map(Plan(model="digits", batch=2, depths=(1,), repeats=1), CPU)
    R, v = R.double(), v.double()

    def gradient(name: str, depth: int) -> torch.Tensor:
        from banach.network import fixed_point
        from banach.solve import Tolerance

        scheme = memory.SCHEMES[name]
        tolerance = Tolerance(atol=0, max_steps=scheme.solved(depth), check_every=0)
        R.zero_grad()
        u: Any = fixed_point(
            R, torch.zeros_like(v), inputs=(v,), tolerance=tolerance, backward=scheme.mode(depth, None)
        )
        u.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in R.parameters()])

    unrolled = gradient("unrolled", 60)
    assert torch.allclose(gradient("unrolled, checkpointed", 60), unrolled)
    assert torch.linalg.vector_norm(gradient("Jacobian-based", 60) - unrolled) < 2e-3 * unrolled.norm()
    assert torch.linalg.vector_norm(gradient("JFB", 60) - unrolled) > 1e-2 * unrolled.norm()
    kinds = [type(scheme.mode(3, None)) for scheme in memory.SCHEMES.values()]
    assert kinds == [JFB, Implicit, Unroll, Unroll]


def test_live_bytes_by_hand() -> None:
    with LiveBytes() as live:
        a = torch.zeros(1000)  # 4,000 bytes
        b = a + 1  # 8,000 alive
        view = b[:10]
        b.mul_(2)
        del a
        c = torch.zeros(250)  # 5,000
        assert (live.now, live.peak) == (5000, 8000)
        del b
        assert live.now == 5000  # the view holds it
        del view, c
    assert (live.now, live.peak) == (0, 8000)


def test_growth_is_taken_over_the_deeper_half() -> None:
    plan = Plan(model="digits", batch=1, depths=(1, 2, 4, 8), repeats=1)
    found = {
        ("JFB", k): Measured(bytes=1000 + (100 * k if k > 2 else 0), seconds=1.0, products=0) for k in plan.depths
    }
    assert memory.growth("JFB", plan, found) == 100


def test_quick_is_on_digits_and_full_on_the_papers_map() -> None:
    assert memory.QUICK.model == "digits"
    assert memory.FULL.model == "svhn"
    assert memory.FULL.depths[-1] == 200
    assert Path(memory.__file__).name == "memory.py"
