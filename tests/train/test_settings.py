"""Settings: what is refused, and the way to a file and back."""

import json
from typing import Any

import pytest

from banach import models
from banach.models import Constant, Cosine, Steps
from banach.train import OneCycle, Settings


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epochs": -1}, "epochs must be a whole number, at least 0, got -1"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"accumulate": 0}, "accumulate must be a whole number, at least 1"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"lr": -1e-3}, "lr must be a number, at least 0"),
        ({"lr": "0.1"}, "lr must be a number"),
        ({"weight_decay": float("inf")}, "weight_decay must be a number"),
        ({"label_smoothing": 1.0}, "label_smoothing must be a number, at least 0 and below 1"),
        ({"ema": 1}, "ema must be a number, at least 0 and below 1"),
        ({"clip": 0}, "clip=0 would stop all learning"),
        ({"optimizer": "adamm"}, "did you mean 'adam'"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"momentum": 0.9}, "momentum is a setting of sgd"),
        ({"schedule": Cosine}, "schedule must be an object"),
        ({"schedule": "cosine"}, "schedule must be an object"),
        ({"monitor": 1}, "monitor must be true or false"),
        ({"device": "gpu0"}, "device must be auto, cpu"),
        ({"data": 3}, "data must be a name"),
        ({"correction": float("nan")}, "correction must be a number"),
        ({"correction_steps": ()}, r"correction_steps must be numbers of iterates such as \(2, 5\), got \(\)"),
        ({"correction_steps": (0,)}, "every one of correction_steps must be a whole number, at least 1, got 0"),
        ({"finite_difference": True}, "finite_difference is a way to compute jacobian_penalty"),
    ],
)
def test_a_wrong_value_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Settings(**changes)


def test_a_misspelt_option_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        Settings(epoch=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("schedule", [Constant(), Cosine(), Steps((3, 5), 0.1), OneCycle(0.2)])
def test_through_json_and_back(schedule: Any) -> None:
    settings = Settings(data="digits", backward="neumann:5", clip=1.0, ema=0.9, schedule=schedule, seed=7)
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"epoch": 3}, "unknown setting: 'epoch'; did you mean 'epochs'"),
        ({"learning_rate": 3}, "unknown setting: 'learning_rate'"),
        ({"schedule": {"kind": "cosin"}}, "unknown schedule: 'cosin'; did you mean 'cosine'"),
        ({"schedule": {"kind": "steps", "at": [1], "facto": 0.1}}, "did you mean 'factor'"),
        ({"schedule": {"kind": "steps"}}, "cannot be made of"),
        ({"schedule": "cosine"}, "a schedule is"),
        ({"schedule": {"kind": "one-cycle", "warm": 2}}, "warm must be between"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Settings.from_dict(values)


def test_a_schedule_of_ones_own_cannot_be_kept() -> None:
    class Own:
        def multiplier(self, epoch: float, epochs: int) -> float:
            return 1.0

    with pytest.raises(TypeError, match="to be stored in a file"):
        Settings(schedule=Own()).to_dict()


def test_the_settings_of_a_recipe() -> None:
    recipe = models.recipe("digits")
    settings = Settings.of_recipe(recipe, epochs=3)
    assert (settings.lr, settings.weight_decay, settings.schedule) == (recipe.lr, recipe.weight_decay, Cosine())
    assert (settings.epochs, settings.optimizer, settings.max_steps) == (3, "adam", recipe.max_steps)
