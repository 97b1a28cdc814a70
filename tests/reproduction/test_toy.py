"""The toy example y = d + y^5: its mathematics by other routes, and the quick study."""

from math import comb
from pathlib import Path

import pytest
import torch

from reproduction import study, toy
from reproduction.study import Options


def bisection(d: float) -> float:
    """Return the root by bisection: y - d - y^5 increases on [-ALPHA, ALPHA]."""
    low, high = -toy.ALPHA, toy.ALPHA
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle - d - middle**5 < 0 else (low, middle)
    return (low + high) / 2


def test_newton_and_iteration_agree_with_bisection() -> None:
    d = toy.grid(41)
    wanted = torch.tensor([[bisection(float(value))] for value in d], dtype=torch.float64)
    torch.testing.assert_close(toy.root(d), wanted, rtol=0, atol=1e-14)
    iterates, found = toy.iterate(d)
    torch.testing.assert_close(iterates[:, -1:], wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(found.value, iterates[:, -1:])
    assert iterates[:, 0].abs().max() == 0
    torch.testing.assert_close(iterates[:, 2:3], d + d**5, rtol=0, atol=0)
    assert (toy.violations(iterates, wanted, 1), toy.violations(iterates, wanted, 2)) == (40, 0)  # all but d = 0


def test_statements_of_the_equation() -> None:
    rows = {row.key: row for row in toy.statements()}
    assert [key for key, row in rows.items() if row.holds is False] == ["printed"]
    assert rows["factor"].ours == pytest.approx(5 * toy.ALPHA**4, abs=1e-12)
    assert rows["reach"].ours == pytest.approx(0.5 + 10**-1.25)
    assert rows["rate"].ours == pytest.approx(5 * bisection(0.5) ** 4, rel=0.02)  # dT/dy at the fixed point
    assert rows["outside"].ours > 5**-0.25  # beyond the turning point of y - y^5
    assert toy.real_roots(torch.tensor([0.6]))[0] == [0]  # beyond |d| = .535 there is none: the count can tell


def test_series_by_lagrange_inversion() -> None:
    """The solution of y = d + y^5 has the coefficients comb(5k, k) / (4k + 1)."""
    for d in (-0.4, 0.0, 0.3):
        wanted = sum(comb(5 * k, k) / (4 * k + 1) * d ** (4 * k + 1) for k in range(60))
        assert toy.series(d) == pytest.approx(wanted, abs=1e-14)


def test_quick_study(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    rows = toy.run(Options(quick=True, records=tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    assert study.read(toy.Row, tmp_path / toy.RECORDS) == rows
    values = toy.values(rows)
    assert (values["checked"], values["held"]) == (8, 7)
    assert values["table"].count("\n") == len(rows) + 1
    plot, pace = toy.figures(rows)["toy"].axes
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in (plot, pace))
    error, bound = (torch.as_tensor(line.get_ydata()) for line in pace.get_lines())
    assert (error < bound).all(), "the first error was above the line that the page calls a bound"
