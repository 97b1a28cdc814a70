"""The digits network on the real digits: it learns, and its fixed points stay within reach of Picard."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from banach import ImplicitNetwork, models


def digits() -> tuple[Tensor, Tensor]:
    whole = pytest.importorskip("sklearn.datasets").load_digits()
    pixels = torch.tensor(whole.images, dtype=torch.float32)[:, None]
    return (pixels - pixels.mean()) / pixels.std(), torch.tensor(whole.target)


def train(epochs: int, seed: int) -> tuple[float, int]:
    """Accuracy on a fifth held out, and the most steps that one of its images took."""
    torch.manual_seed(seed)
    recipe = models.recipe("digits")
    net = models.build("digits")
    assert isinstance(net, ImplicitNetwork)
    d, labels = digits()
    order = torch.randperm(len(d))
    held, order = order[:360], order[360:]
    optimizer = torch.optim.Adam(net.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    for epoch in range(epochs):
        parts = order[torch.randperm(len(order))].split(recipe.batch_size)
        for i, part in enumerate(parts):
            optimizer.param_groups[0]["lr"] = recipe.lr * recipe.schedule.multiplier(
                epoch + i / len(parts), epochs
            )
            loss = F.cross_entropy(net(d[part]), labels[part], label_smoothing=recipe.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval()
    with torch.no_grad():
        output, found = net(d[held], solution=True)
    assert found.converged.all()
    return float((output.argmax(1) == labels[held]).float().mean()), int(found.steps.max())


def test_one_epoch() -> None:
    accuracy, steps = train(1, seed=0)
    assert accuracy > 0.9
    assert steps <= 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_whole_recipe(seed: int) -> None:
    accuracy, steps = train(models.recipe("digits").epochs, seed)
    assert accuracy > 0.98
    assert steps <= 30
