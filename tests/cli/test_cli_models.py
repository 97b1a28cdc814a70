"""`banach models`: what is printed of a network is what it has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from banach import models
from banach.cli.app import main
from banach.cli.console import console
from cli.conftest import rows

# Latent, images, explicit twin, without batch norm, recipes.
EXPECTED = {
    "digits": ["24x4x4", "1x8x8", "yes", "yes", "default"],
    "mnist": ["32x9x9", "1x28x28", "yes", "yes", "released, paper, jacobian, decayed"],
    "cifar10": ["35x10x10", "3x32x32", "yes", "yes", "released, paper, jacobian"],
    "mdeq-tiny": ["24x32x32 + 24x16x16", "3x32x32", "yes", "no", "own, common"],
    "resnet56": ["-", "3x32x32", "is explicit", "no", "he"],
}


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def ask(*arguments: str) -> str:
        assert main(["models", *arguments]) == 0
        return capsys.readouterr().out

    return ask


def by_name(text: str) -> dict[str, list[str]]:
    return {name: rest for name, *rest in rows(text)}


def test_all_of_them_and_one_of_them(said: Callable[..., str]) -> None:
    """tests/models counts the parameters by hand."""
    found = by_name(said())
    assert found.keys() == set(models.names())
    assert {name: found[name][1:] for name in EXPECTED} == EXPECTED
    assert [found[name][0] for name in ("mnist", "cifar10", "resnet56")] == ["54,352", "843,430", "853,018"]
    net: Any = models.build("cifar10")
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in net.named_children()}
    text = said("cifar10")
    sizes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    assert f"parameters: {sizes}, all 843,430" in text.splitlines()
    assert "latent 35x10x10" in text
    assert "(blocks): Sequential" in text
    found = by_name(text)
    assert found["eps"] == ["0.1", "0.1", "0.0001"]
    assert found["schedule"] == ["Steps(at=(200, 400, 600, 800), factor=0.5)"] * 3
    assert found["momentum (- is Adam)"] == ["-"] * 3
    text = said("resnet56")  # without a fixed point
    assert "parameters: all 853,018" in text
    assert by_name(text)["momentum (- is Adam)"] == ["0.9"]


def test_a_narrow_terminal_loses_nothing_and_nothing_is_drawn(said: Callable[..., str], monkeypatch: Any) -> None:
    monkeypatch.setattr(console, "_width", 80)
    before = torch.get_rng_state()
    assert "…" not in said() + said("mnist")
    assert torch.equal(torch.get_rng_state(), before)
