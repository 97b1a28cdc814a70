"""Settings: recipe, then file, then flags; the words they are written in; what is refused; to a file and back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from banach import GMRES, RMS, Anderson, Implicit, NormalCG, Picard, Tolerance, Unroll, WorstPixel, data, models
from banach.data import Affine, Chain, Crop, Erase, Flip, dataset, paper_cifar10
from banach.models import Constant, Cosine, Steps
from banach.network import ImplicitNetwork
from banach.train import OneCycle, Settings, words

choose = Settings.choose


def implicit(method: Any, rtol: float = 1e-3, steps: int = 500) -> Implicit:
    return Implicit(method, Tolerance(atol=0, rtol=rtol, max_steps=steps))


@pytest.mark.parametrize(
    ("read", "word", "meant"),
    [
        (words.solver, "picard:0.25", Picard(damping=0.25)),
        (words.solver, "Anderson:3", Anderson(memory=3)),
        (words.backward, "unroll:5:0.5", Unroll(5, damping=0.5)),
        (words.backward, "implicit", implicit(NormalCG())),
        (words.backward, "implicit:gmres:1e-5", implicit(GMRES(), 1e-5)),
        (words.backward, "implicit:picard:1e-2:20", implicit(Picard(), 1e-2, 20)),
        (words.norm, words.name_of_norm(RMS()), RMS()),
        (words.schedule, "one-cycle", OneCycle()),
        (words.schedule, "steps:10,15:0.5", Steps((10, 15), 0.5)),
        (words.schedule, {"kind": "cosine"}, Cosine()),
        (words.augment, "none", None),
        (words.augment, "paper", paper_cifar10()),
        (words.augment, "flip+crop:2+erase+affine", Chain(Flip(), Crop(2), Erase(), Affine())),
    ],
)
def test_a_word_is_the_object_it_names(read: Any, word: Any, meant: Any) -> None:
    assert read(word) == meant


class Own:
    """A schedule, or a norm, that has no name."""

    def multiplier(self, epoch: float, epochs: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("read", "word", "said"),
    [
        (words.solver, "andersen", "did you mean 'anderson'"),
        (words.solver, "anderson:x", "needs a whole number from 1 to 100, got 'x'"),
        (words.solver, "anderson:1:2", "expected picard"),
        (words.backward, "jfb:3", "expected jfb"),
        (words.backward, "neumann:-1", "needs a whole number from 0 to 10000, got '-1'"),
        (words.backward, "implicit:cgg", "did you mean 'cg'"),
        (words.backward, "implicit:cg:0", "must be between 0 and 1"),
        (words.backward, "implicit:picard:1e-2:0", "steps must be a whole number"),
        (words.norm, "worst", "did you mean 'worst-pixel'"),
        (words.name_of_norm, Own(), "to be chosen by a word"),
        (words.schedule, "steps", "expected constant"),
        (words.schedule, "steps:5:nan", "factor must be a number"),
        (words.schedule, {"kind": "cosin"}, "unknown schedule: 'cosin'; did you mean 'cosine'"),
        (words.schedule, {"kind": "steps", "at": [1], "facto": 0.1}, "cannot be made of .* argument 'facto'"),
        (words.augment, "flip+crp:4", "did you mean 'crop'"),
    ],
)
def test_other_words_are_refused_with_advice(read: Any, word: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(word)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epochs": -1}, "epochs must be a whole number, at least 0 and at most 1000000000, got -1"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"threads": 1_000_000}, "threads must be a whole number, at least 1 and at most 1024"),
        ({"lr": -1e-3}, "lr must be a number, at least 0"),
        ({"lr": 10**400}, "lr must be a number, at least 0 and at most"),
        ({"label_smoothing": 1.0}, "label_smoothing must be a number, at least 0 and below 1"),
        ({"clip": 0}, "clip=0 would stop all learning"),
        ({"optimizer": "adamm"}, "did you mean 'adam'"),
        ({"momentum": 0.9}, "momentum is a setting of sgd"),
        ({"schedule": Cosine}, "schedule must be an object"),
        ({"monitor": 1}, "monitor must be true or false"),
        ({"device": "gpu0"}, "device must be auto, cpu"),
        ({"data": 3}, "data must be a name"),
        ({"solver": " "}, "solver must be a name, or left out, got ' '"),
        ({"correction_steps": ()}, r"correction_steps must be numbers of iterates such as \(2, 5\), got \(\)"),
        ({"correction_steps": (0,)}, "every one of correction_steps must be a whole number, at least 1"),
        ({"finite_difference": True}, "finite_difference is a way to compute jacobian_penalty"),
    ],
)
def test_a_wrong_value_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Settings(**changes)


@pytest.mark.parametrize("schedule", [Constant(), Cosine(), Steps((3, 5), 0.1), OneCycle(0.2)])
def test_through_json_and_back(schedule: Any) -> None:
    settings = Settings(data="digits", backward="neumann:5", clip=1.0, ema=0.9, schedule=schedule, seed=7)
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    with pytest.raises(ValueError, match="unknown setting: 'epoch'; did you mean 'epochs'"):
        Settings.from_dict({"epoch": 3})
    with pytest.raises(ValueError, match="to be stored in a file"):
        Settings(schedule=Own()).to_dict()


def test_defaults_are_the_recipe_of_the_digits_network() -> None:
    settings, recipe = choose({}), models.recipe("digits")
    assert (settings.data, settings.model) == ("digits", "digits")
    assert (settings.solver, settings.backward) == ("picard", "jfb")
    assert (settings.lr, settings.epochs, settings.schedule) == (recipe.lr, recipe.epochs, recipe.schedule)
    assert (settings.norm, settings.eps, settings.threads) == ("rms", recipe.eps, 1)
    own = Settings.of_recipe(recipe, epochs=3)
    assert (own.lr, own.weight_decay, own.schedule) == (recipe.lr, recipe.weight_decay, Cosine())
    assert (own.epochs, own.optimizer, own.max_steps) == (3, "adam", recipe.max_steps)


@pytest.mark.parametrize("name", ["mnist", "svhn", "cifar10"])
def test_the_paper_networks_stop_by_the_norm_they_were_tuned_with(name: str) -> None:
    net: Any = choose({"data": name}).build()
    assert net.tolerance == models.recipe(name).tolerance
    assert isinstance(net.tolerance.norm, WorstPixel)
    assert choose({"data": name, "norm": "rms"}).tolerance(net.tolerance).norm == RMS()


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.toml"
    path.write_text(text)
    return path


def test_flags_override_the_file_and_the_file_overrides_the_recipe(tmp_path: Path) -> None:
    file = write(tmp_path, 'epochs = 7\nbatch-size = 32\nschedule = "steps:2,4:0.5"\nbackward = "neumann:2"\n')
    settings = choose({"epochs": 3, "backward": None}, file)
    assert (settings.epochs, settings.batch_size, settings.backward) == (3, 32, "neumann:2")
    assert settings.schedule == Steps((2, 4), 0.5)
    assert settings.lr == models.recipe("digits").lr
    file = write(tmp_path, "jacobian-penalty = 0.5\ncorrection = 1\ncorrection-steps = [1, 4]")
    settings = choose({}, file)
    assert (settings.jacobian_penalty, settings.correction, settings.correction_steps) == (0.5, 1, (1, 4))
    assert choose({"correction_steps": "2,3"}, file).correction_steps == (2, 3)
    assert choose({"max_steps": 5}, file).correction_steps == (1, 4)  # the last iterate that a solve goes on from
    assert choose({"max_steps": 2}).correction == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epoch = 3", "did you mean 'epochs'"),
        ('eps = "small"', "eps must be a number"),
        ("epochs = = 3", "is not a TOML file of settings"),
        ('schedule = "cosin"', "did you mean 'cosine'"),
        ("schedule = 3", "a schedule is"),
        ("schedule = {kind = [[[[1]]]]}", "unknown schedule: "),
        ("data = [1]", "data must be a name"),
        ('correction-steps = "2,x"', "'2,x' needs a whole number, got 'x'"),
        ("max-steps = 0\njacobian-penalty = 0.5", "explicit twin, .*; leave out jacobian-penalty"),
        ('max-steps = 0\nbackward = "neumann:5"', "explicit twin.* gradient is exact by jfb; leave out backward"),
        ("tune = true", "tune needs a module with a method tune, digits has none; use --no-tune"),
        ("correction = 1\nmax-steps = 5", "correction-steps must be below max-steps 5, got 5; take"),
        ('data = "mnist"\nrecipe = "papr"', "did you mean 'paper'"),
        ('data = "cifar10"\nmodel = "resnet56"\nbackward = "jfb"', "no fixed point; leave out backward"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        choose({}, write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (
        torch.cat([p.flatten() for p in choose({"seed": k}).build().parameters()]) for k in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_on_a_cpu_a_network_that_allows_it_is_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that views an image as rows of pixels would fail."""

    def channels_last(**flags: Any) -> bool:
        net: Any = choose({"device": "cpu", **flags}).build()
        weights = [layer.weight for layer in net.R.modules() if isinstance(layer, nn.Conv2d)]
        return all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)

    assert channels_last()
    assert not channels_last(fast=False)
    known = models.get("digits")
    monkeypatch.setitem(models.registry._MODELS, "digits", replace(known, channels_last=False))
    assert not channels_last()


def test_a_model_without_a_fixed_point_has_no_solver() -> None:
    settings = choose({"data": "cifar10", "model": "resnet56"})
    assert (settings.solver, settings.backward, settings.eps, settings.max_steps) == (None, None, None, None)
    assert (settings.optimizer, settings.momentum, settings.augment) == ("sgd", 0.9, "flip+crop:4")
    assert not isinstance(settings.build(), ImplicitNetwork)
    settings = choose({"data": "cifar10", "model": "resnet56", "optimizer": "adamw"})
    assert (settings.optimizer, settings.momentum) == ("adamw", 0.0)


def test_data_without_a_model_of_its_name_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dataset._registry, "mine", replace(data.get("digits"), name="mine"))
    with pytest.raises(ValueError, match="choose one with --model"):
        choose({"data": "mine"})
    assert choose({"data": "mine", "model": "digits"}).model == "digits"
    settings = choose({"data": "mnist", "recipe": "paper"})
    assert (settings.recipe, settings.eps, settings.lr) == ("paper", 1e-4, 1e-4)


def test_eps_alone_is_without_the_rtol_of_the_recipe() -> None:
    both = {"data": "cifar10", "model": "mdeq-tiny"}
    assert (Settings.choose(both).eps, Settings.choose(both).rtol) == (0.0, 1e-3)
    assert Settings.choose({**both, "eps": 1e-4}).rtol == 0.0
    assert Settings.choose({**both, "eps": 1e-4, "rtol": 1e-2}).rtol == 1e-2
