"""Which settings a run gets: recipe, then file, then flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from banach import models
from banach.models import Cosine, Steps
from banach.network import ImplicitNetwork
from banach.solve import RMS, WorstPixel
from banach.train import Settings

choose = Settings.choose


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_recipe_of_the_digits_network() -> None:
    settings, recipe = choose({}), models.recipe("digits")
    assert (settings.data, settings.model, settings.solver, settings.backward) == (
        "digits",
        "digits",
        "picard",
        "jfb",
    )
    assert (settings.lr, settings.epochs, settings.schedule) == (recipe.lr, recipe.epochs, recipe.schedule)
    assert (settings.norm, settings.eps, settings.threads) == ("rms", recipe.eps, 1)


@pytest.mark.parametrize("name", ["mnist", "svhn", "cifar10"])
def test_the_paper_networks_stop_by_the_norm_they_were_tuned_with(name: str) -> None:
    settings = choose({"data": name})
    net: Any = settings.build()
    recipe = models.recipe(name)
    assert net.tolerance == recipe.tolerance
    assert isinstance(net.tolerance.norm, WorstPixel)
    assert isinstance(choose({"data": name, "norm": "rms"}).tolerance(recipe.tolerance).norm, RMS)


def test_flags_go_before_the_file_and_the_file_before_the_recipe(tmp_path: Path) -> None:
    file = write(tmp_path, 'epochs = 7\nbatch-size = 32\nschedule = "steps:2,4:0.5"\nbackward = "neumann:2"\n')
    settings = choose({"epochs": 3}, file)
    assert (settings.epochs, settings.batch_size, settings.backward) == (3, 32, "neumann:2")
    assert settings.schedule == Steps((2, 4), 0.5)
    assert settings.lr == models.recipe("digits").lr


def test_a_schedule_may_be_a_table(tmp_path: Path) -> None:
    assert choose({}, write(tmp_path, '[schedule]\nkind = "cosine"\n')).schedule == Cosine()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epoch = 3", "did you mean 'epochs'"),
        ('eps = "small"', "eps must be a number"),
        ("epochs = = 3", "is not TOML"),
        ('schedule = "cosin"', "did you mean 'cosine'"),
        ("schedule = 3", "a schedule is"),
        ("data = [1]", "data must be a name"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        choose({}, write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (choose({"seed": seed}).build() for seed in (1, 1, 2))
    assert all(bool((a == b).all()) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(bool((a == b).all()) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("flags", "side_by_side"), [({}, True), ({"fast": False}, False)])
def test_on_a_cpu_channels_lie_side_by_side(flags: dict[str, Any], side_by_side: bool) -> None:
    net: Any = choose({"device": "cpu", **flags}).build()
    weights = [layer.weight for layer in net.R.modules() if isinstance(layer, nn.Conv2d)]
    assert weights
    assert all(weight.is_contiguous(memory_format=torch.channels_last) is side_by_side for weight in weights)


def test_a_network_of_your_own_is_laid_out_if_it_says_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that views an image as rows of pixels would fail."""
    known = models.get("digits")
    for may in (False, True):
        monkeypatch.setitem(models.registry._MODELS, "digits", replace(known, channels_last=may))
        net: Any = choose({"device": "cpu"}).build()
        assert next(net.R.parameters()).is_contiguous(memory_format=torch.channels_last) is may


def test_a_model_without_a_fixed_point_is_given_none() -> None:
    settings = choose({"data": "cifar10", "model": "resnet56"})
    assert (settings.solver, settings.backward, settings.eps, settings.max_steps) == (None, None, None, None)
    assert (settings.optimizer, settings.momentum, settings.augment) == ("sgd", 0.9, "flip+crop:4")
    assert not isinstance(settings.build(), ImplicitNetwork)
    with pytest.raises(ValueError, match="resnet56 has no fixed point"):
        choose({"data": "cifar10", "model": "resnet56", "backward": "jfb"})
    for key, value in (("jacobian_penalty", 0.1), ("correction", 0.1), ("correction_steps", "2,5")):
        with pytest.raises(ValueError, match=f"resnet56 has no fixed point; leave out {key.replace('_', '-')}"):
            choose({"data": "cifar10", "model": "resnet56", key: value})


def test_penalties_by_file_and_flag(tmp_path: Path) -> None:
    file = write(tmp_path, "jacobian-penalty = 0.5\ncorrection = 1\ncorrection-steps = [1, 4]")
    settings = choose({}, file)
    assert (settings.jacobian_penalty, settings.correction, settings.correction_steps) == (0.5, 1, (1, 4))
    assert choose({"correction_steps": "2,3"}, file).correction_steps == (2, 3)
    with pytest.raises(ValueError, match="'2,x' needs a whole number, got 'x'"):
        choose({"correction_steps": "2,x"})
    with pytest.raises(ValueError, match="explicit twin, without a fixed point to penalise"):
        choose({"max_steps": 0, "jacobian_penalty": 0.5})


def test_another_optimizer_forgets_the_recipe_momentum() -> None:
    settings = choose({"data": "cifar10", "model": "resnet56", "optimizer": "adamw"})
    assert (settings.optimizer, settings.momentum) == ("adamw", 0.0)


def test_the_explicit_twin_takes_no_step_and_no_other_mode() -> None:
    net: Any = choose({"max_steps": 0}).build()
    assert net.tolerance.max_steps == 0
    with pytest.raises(ValueError, match="explicit twin"):
        choose({"max_steps": 0, "backward": "neumann:5"})


def test_data_without_a_model_of_its_name_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from banach import data
    from banach.data import dataset

    monkeypatch.setitem(dataset._registry, "mine", replace(data.get("digits"), name="mine"))
    with pytest.raises(ValueError, match="choose one with --model"):
        choose({"data": "mine"})
    assert choose({"data": "mine", "model": "digits"}).model == "digits"


def test_another_recipe_is_taken_by_name() -> None:
    settings = choose({"data": "mnist", "recipe": "paper"})
    assert (settings.recipe, settings.eps, settings.lr) == ("paper", 1e-4, 1e-4)
    with pytest.raises(ValueError, match="did you mean 'paper'"):
        choose({"data": "mnist", "recipe": "papr"})
