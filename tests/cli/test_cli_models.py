"""`banach models`: what is printed of a network is what it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from banach import models
from banach.cli.app import main
from banach.cli.console import console
from banach.models import registry

IMPLICIT = ("digits", "mnist", "svhn", "cifar10")
LATENT = {"digits": "24x4x4", "mnist": "32x9x9", "svhn": "64x8x8", "cifar10": "35x10x10", "resnet56": "-"}
IMAGES = {"digits": "1x8x8", "mnist": "1x28x28", "svhn": "3x32x32", "cifar10": "3x32x32", "resnet56": "3x32x32"}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test leaves a model behind, and lines are as long as they need be."""
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    monkeypatch.setattr(console, "_width", 200)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def ask(*arguments: str) -> str:
        assert main(["models", *arguments]) == 0
        return capsys.readouterr().out

    return ask


def parameters(name: str) -> list[int]:
    """Of Q, R, S and all of them; tests/models counts them by hand."""
    net: Any = models.build(name)
    return [sum(p.numel() for p in part.parameters()) for part in (net.Q, net.R, net.S, net)]


def rows(text: str) -> dict[str, list[str]]:
    split = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    return {name: rest for name, *rest in split}


def test_all_of_them(said: Callable[..., str]) -> None:
    found = rows(said())
    assert found.keys() == set(models.names())
    for name, shape in LATENT.items():
        count, latent, images, explicit, twin, recipes = found[name]
        implicit = name in IMPLICIT
        assert int(count.replace(",", "")) == (parameters(name)[-1] if implicit else 853_018)
        assert (latent, images) == (shape, IMAGES[name])
        assert (explicit, twin) == (("yes", "yes") if implicit else ("is explicit", "no"))
        assert recipes == ", ".join(models.get(name).recipes)
    assert found["mnist"][-1] == "released, paper, jacobian, decayed"


def test_one_of_them(said: Callable[..., str]) -> None:
    text = said("cifar10")
    found = rows(text)
    counts = zip(("Q", "R", "S", "all"), parameters("cifar10"), strict=True)
    assert "parameters: " + ", ".join(f"{name} {count:,}" for name, count in counts) in text.splitlines()
    assert f"latent {LATENT['cifar10']}" in text
    assert "(blocks): Sequential" in text
    assert found["eps"] == ["0.1", "0.1", "0.0001"]
    assert found["max_steps"] == ["50", "50", "500"]
    assert found["momentum"] == ["Adam"] * 3
    assert found["schedule"] == ["Steps(at=(200, 400, 600, 800), factor=0.5)"] * 3
    assert found["norm"] == ["WorstPixel()"] * 3
    text = said("resnet56")  # without a fixed point
    assert "parameters: all 853,018" in text
    assert rows(text)["momentum"] == ["SGD, 0.9"]


def test_a_network_of_ones_own(said: Callable[..., str]) -> None:
    class Pair(nn.Module):
        """A latent of two tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, d: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(d.flatten(1)), d[:, :, 0]

    def build(image: Any, classes: int) -> tuple[Any, Any, Any]:
        return Pair(), lambda u, v: v, nn.Linear(5, classes)

    models.register("own", build, description="[brackets] stay", image=(2, 2, 3), classes=7)
    assert rows(said())["own"] == ["107", "5 + 2x3", "2x2x3", "yes", "no", "default"]
    text = said("own")
    assert "[brackets] stay" in text
    assert "parameters: Q 65, S 42, all 107" in text


def test_a_narrow_terminal_loses_nothing_and_no_random_number_is_drawn(
    said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", 80)
    before = torch.get_rng_state()
    assert "…" not in said()
    assert "…" not in said("mnist")
    assert torch.equal(torch.get_rng_state(), before)
