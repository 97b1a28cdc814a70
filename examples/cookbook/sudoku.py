"""A recursive network on 4 x 4 Sudoku: JFB, Neumann, Unroll and Implicit at equal compute.

The latent holds a vector per cell; R lets every cell look at its row, its column and its box, and is repeated
twelve times. Every mode gets the same budget, counted in evaluations of R and products with its
Jacobian, which cost about the same. So a costlier gradient leaves fewer training steps.

    python -m examples.cookbook.sudoku
"""

import itertools

import matplotlib.pyplot as plt
import torch
from examples.cookbook.recipe import main
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from banach import GMRES, JFB, Implicit, ImplicitNetwork, Neumann, Tolerance, Unroll
from banach.backward import Mode

WIDTH, BLANKS, BATCH, DEPTH = 48, 6, 64, 12
MODES: dict[str, tuple[Mode, int]] = {  # and what its backward pass costs, in evaluations and J-products
    "JFB": (JFB(), 2),
    "Neumann(3)": (Neumann(3), 5),
    "Unroll(4)": (Unroll(4), 8),
    "Implicit(GMRES), 8 steps": (Implicit(GMRES(), Tolerance(max_steps=8, check_every=0)), 10),
}


def boards() -> Tensor:
    """Return all 288 solutions as (288, 16) numbers 0 to 3."""
    rows = list(itertools.permutations(range(4)))
    every = torch.tensor(list(itertools.product(rows, repeat=4))).view(-1, 16)
    for places in places_of_groups():
        every = every[(every[:, places].sort(1)[0] == torch.arange(4)).all(1)]
    return every


def places_of_groups() -> list[list[int]]:
    """Return the places of the rows, the columns and the boxes."""
    grid = torch.arange(16).view(4, 4)
    boxes = grid.view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    return [row.tolist() for part in (grid, grid.T, boxes) for row in part]


def puzzles(solved: Tensor) -> Tensor:
    """Return one-hot boards (batch, 16, 5) with BLANKS cells hidden; the fifth symbol means blank."""
    hidden = torch.rand(solved.shape).argsort(1) < BLANKS
    return one_hot(solved.masked_fill(hidden, 4), 5).float()


class Reason(nn.Module):
    """R(u, v): mean of each cell's row, column and box, an MLP, layer norm, the puzzle added."""

    def __init__(self) -> None:
        super().__init__()
        looks = torch.zeros(3, 16, 16)
        for k, places in enumerate(places_of_groups()):
            for cell in places:
                looks[k // 4, cell, [other for other in places if other != cell]] = 1 / 3
        self.register_buffer("looks", looks)
        self.mlp = nn.Sequential(nn.Linear(4 * WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        x = u + v
        seen = torch.einsum("gij,bjw->bigw", self.looks, x).flatten(2)
        return 0.7 * self.norm(x + self.mlp(torch.cat((x, seen), 2)))


def train(mode: Mode, cost: int, boards: Tensor, budget: int) -> tuple[ImplicitNetwork, list[tuple[int, float]]]:
    """Train until the budget is spent; return the network and (spent, share of boards solved) along the way."""
    torch.manual_seed(0)
    tolerance = Tolerance(max_steps=DEPTH, check_every=0)  # a fixed depth
    net = ImplicitNetwork(nn.Linear(5, WIDTH), Reason(), nn.Linear(WIDTH, 4), tolerance=tolerance, backward=mode)
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    spent = 0
    curve: list[tuple[int, float]] = []
    every = budget // 25
    while spent < budget:
        solved = boards[torch.randint(len(boards), (BATCH,))]
        scores = net(puzzles(solved))
        loss = cross_entropy(scores.transpose(1, 2), solved)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent += DEPTH + cost
        if len(curve) * every <= spent:
            curve.append((spent, solved_share(net, boards)))
    return net, curve


@torch.no_grad()
def solved_share(net: ImplicitNetwork, boards: Tensor) -> float:
    guess = net(puzzles(boards)).argmax(2)
    return (guess == boards).all(1).double().mean().item()


def run(quick: bool) -> tuple[dict[str, float], Figure]:
    every = boards()
    every = every[torch.randperm(len(every))]
    seen, unseen = every[:200], every[200:]
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    numbers = {}
    for name, (mode, cost) in MODES.items():
        net, curve = train(mode, cost, seen, 40 if quick else 3000)
        numbers[f"boards solved, {name}"] = solved_share(net, unseen)
        axes.plot(*zip(*curve, strict=True), label=name)
    axes.set(xlabel="compute: evaluations of R and products with J", ylabel="share of boards solved")
    axes.legend()
    return numbers, figure


if __name__ == "__main__":
    main(run)
