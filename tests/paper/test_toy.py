"""The toy example y = d + y^5: its mathematics by other routes, and the quick study."""

from __future__ import annotations

import json
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch

from banach.backward import JFB, Implicit
from banach.paper import Options, toy
from banach.paper import toy_equation as equation
from banach.paper import toy_learning as learning
from banach.paper.toy_learning import Lesson

SMALL = Lesson(seeds=2, steps=3, samples=20, width=4, grid=11)


def bisection(d: float) -> float:
    """y - d - y^5 increases on [-ALPHA, ALPHA]: no derivative and no iteration of T."""
    low, high = -equation.ALPHA, equation.ALPHA
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle - d - middle**5 < 0 else (low, middle)
    return (low + high) / 2


def test_the_root_and_the_iteration_agree_with_bisection() -> None:
    d = equation.grid(41)
    by_hand = torch.tensor([[bisection(float(value))] for value in d], dtype=torch.float64)
    torch.testing.assert_close(equation.root(d), by_hand, rtol=0, atol=1e-14)
    found = equation.iterate(d)
    torch.testing.assert_close(found.iterates[:, -1:], by_hand, rtol=0, atol=1e-11)
    assert found.iterates[:, 0].abs().max() == 0
    torch.testing.assert_close(found.iterates[:, 2:3], d + d**5, rtol=0, atol=0)
    # At the fixed point the rate is dT/dy = 5 y^4.
    assert float(found.rate[-1]) == pytest.approx(5 * float(by_hand[-1]) ** 4, rel=0.02)


def test_contraction_factor_and_reach() -> None:
    seen = equation.contraction(101)
    assert seen.derivative == pytest.approx(5 * equation.ALPHA**4, abs=1e-12) == 0.5
    assert seen.factor == pytest.approx(0.5, abs=1e-12)
    assert 0.45 < seen.pairs < 0.5
    assert seen.reach == pytest.approx(0.5 + 10**-1.25)
    assert seen.reach < equation.ALPHA


def test_one_root_inside_and_two_outside() -> None:
    """y^5 - y + d has three real roots for |d| < 4 / 5^(5/4) = .535."""
    roots = equation.real_roots(equation.grid(41))
    assert (roots.fewest, roots.most) == (1, 1)
    # Nearest to 0 at |d| = 1/2, on the other side of the turning point 5^(-1/4).
    assert roots.other > 5**-0.25 > equation.ALPHA
    assert equation.real_roots(torch.tensor([0.6])).most == 0  # none beyond: the count can tell


def test_the_printed_bound_fails_and_the_mended_one_holds() -> None:
    found = equation.iterate(equation.grid(21))
    assert found.violations(1) == 20  # all but d = 0
    assert found.violations(2) == 0


def test_series_by_lagrange_inversion() -> None:
    """Lagrange: the solution of y = d + y^5 has the coefficients comb(5k, k) / (4k + 1)."""
    assert equation.coefficients(12) == [Fraction(comb(5 * k, k), 4 * k + 1) for k in range(12)]
    assert equation.series_error([Fraction(1, 3), Fraction(-1, 2), Fraction(1, 2)]) < 1e-30
    assert float(equation.partial_sums(0.3, 40)[-1]) == pytest.approx(bisection(0.3), abs=1e-14)


def test_a_wrong_parameter_of_the_series_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equation, "LOWER", (Fraction(1, 2), Fraction(3, 4), Fraction(1)))
    assert equation.series_error([Fraction(1, 3)]) > 1e-4


def test_networks_have_equal_parameters_and_equal_starts() -> None:
    explicit, implicit = learning.build(SMALL, None), learning.build(SMALL, JFB())
    pairs = list(zip(explicit.parameters(), implicit.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert sum(a.numel() for a, _ in pairs) == SMALL.seeds * (3 * SMALL.width + 1)


def test_the_answer_of_the_implicit_network_is_its_fixed_point() -> None:
    net: Any = learning.build(SMALL, JFB())
    d, _ = learning.samples(SMALL)
    with torch.no_grad():
        y = net(d)
        torch.testing.assert_close(y, d + net.R.f(y), rtol=0, atol=1e-6)
        assert float((y - d - net.R.f(d)).abs().max()) > 1e-3  # which is not what f explicitly gives


def test_seeds_side_by_side_do_not_mix() -> None:
    both = learning.learn("both", SMALL, JFB())
    alone = learning.learn("alone", Lesson(**{**vars(SMALL), "seeds": 1}), JFB())
    torch.testing.assert_close(both.value[:, :1], alone.value, rtol=0, atol=1e-6)  # up to the solver's tolerance
    assert float((both.value[:, 0] - both.value[:, 1]).abs().max()) > 1e-5


@pytest.mark.parametrize("backward", [None, JFB(), Implicit()])
def test_learning_lowers_the_error(backward: JFB | Implicit | None) -> None:
    lesson = Lesson(seeds=1, steps=150, samples=64, width=8, grid=101)
    before = learning.learn("before", Lesson(**{**vars(lesson), "steps": 1}), backward)
    after = learning.learn("after", lesson, backward)
    assert after.rms[0] < before.rms[0] / 2
    d = equation.grid(101)
    rms = (after.value - equation.root(d)).square().mean().sqrt()
    assert after.rms[0] == pytest.approx(float(rms))


def test_a_polynomial_inside_is_exact_and_outside_is_not() -> None:
    lesson = Lesson(seeds=1, steps=1, grid=51)
    assert learning.polynomial_error(5, implicit=True, lesson=lesson)[0] < 1e-13
    assert learning.polynomial_error(4, implicit=True, lesson=lesson)[0] > 1e-5
    assert learning.polynomial_error(5, implicit=False, lesson=lesson)[0] > 1e-4


def test_quick_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(toy.LESSONS, "quick", Lesson(seeds=2, steps=5, samples=16, width=4, grid=21))
    state = torch.get_rng_state()
    found = toy.STUDY.run(Options(quick=True, out=tmp_path, runs=tmp_path / "runs", device="cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all({"what", "paper", "ours"} <= set(row) for row in found.rows)
    held = {row["what"]: row["holds"] for row in found.rows if row.get("holds") is not None}
    failing = [what for what, holds in held.items() if not holds]
    assert len(failing) == 1
    assert "as printed" in failing[0]
    assert len({row["parameters"] for row in found.rows if "network" in row["what"]}) == 1
    written = found.write(Options(quick=True, out=tmp_path, device="cpu"))
    assert {path.name for path in written} == {"toy.json", "toy.png", "toy.svg"}
    assert json.loads((tmp_path / "toy.json").read_text())["claim"] == toy.CLAIM
