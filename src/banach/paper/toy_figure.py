"""The figure of the toy example: the paper's plot, the iterates, the learned functions and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from banach.paper.toy_equation import ALPHA, T, grid, iterate, partial_sums, root
from banach.paper.toy_learning import Learned

PAPER_D = 1 / 3  # in the paper's plot
HARD_D = 0.5  # where the iteration and the series are slowest


def toy_figure(learned: Sequence[Learned]) -> Any:
    """Four panels. Drawn from the first seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    paper, pace, functions, errors = figure.subplots(2, 2).flat
    _paper_plot(paper)
    _pace(pace)
    _functions(functions, learned)
    _errors(errors, learned)
    for axes in (paper, pace, functions, errors):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def _paper_plot(axes: Any) -> None:
    """y and d + y^5, and the staircase of the iterates between them."""
    y, d = grid(401, 1.0)[:, 0], torch.tensor([[PAPER_D]], dtype=torch.float64)
    axes.plot(y, y, label="y")
    axes.plot(y, T(y, d[0]), label="d + y^5, d = 1/3")
    steps = iterate(d).iterates[0, :8].tolist()
    across = [value for value in steps for _ in range(2)]
    axes.plot(across[:-1], [0.0, *across[2:]], color="black", linewidth=0.8, marker=".", label="iterates from 0")
    axes.axvspan(-ALPHA, ALPHA, alpha=0.1, label="|y| <= 10^(-1/4)")
    axes.set(title="the fixed point", xlabel="y", xlim=(-1, 1), ylim=(-0.7, 1.35))


def _pace(axes: Any) -> None:
    """Errors at the hardest d: iterates of T, and sums of the series, which is the explicit solution."""
    d = torch.tensor([[HARD_D]], dtype=torch.float64)
    iterates, sums = iterate(d).error[0, :31], (partial_sums(HARD_D, 31) - root(d)[0]).abs()
    k = range(31)
    axes.semilogy(k, iterates, marker=".", label="after k steps of T")
    axes.semilogy(k, sums, marker=".", label="after k + 1 terms of the series")
    axes.semilogy(k, [float(iterates[0]) * 0.5**n for n in k], color="black", linestyle=":", label="2^-k")
    axes.set(title="two ways to y at d = 1/2", xlabel="k", ylabel="error", ylim=(1e-12, 1))


def _functions(axes: Any, learned: Sequence[Learned]) -> None:
    """Less d, which all of them are given: what is left is what they had to learn."""
    d = grid(len(learned[0].value))
    axes.plot(d, root(d) - d, color="black", linewidth=3, alpha=0.3, label="y(d)")
    for way, style in zip(learned, ("-", "--", ":"), strict=False):
        axes.plot(d, way.value[:, :1] - d, linestyle=style, label=way.name)
    axes.set(title="learned from samples, equal parameters", xlabel="d", ylabel="y - d")


def _errors(axes: Any, learned: Sequence[Learned]) -> None:
    d = grid(len(learned[0].value))
    for way, style in zip(learned, ("-", "--", ":"), strict=False):
        axes.semilogy(d, way.error[:, 0].clamp(min=1e-9), linestyle=style, label=way.name)
    axes.set(title="their errors", xlabel="d", ylabel="|learned - y|")
