"""Dataclasses from the JSON they were kept as: exactly, or with a sentence about what does not fit."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from banach.paper.rebuild import rebuild
from banach.provenance import write_json


@dataclass(frozen=True)
class Leaf:
    number: float
    count: int
    yes: bool


@dataclass(frozen=True)
class Tree:
    name: str
    leaf: Leaf
    maybe: Leaf | None
    leaves: tuple[Leaf, ...]
    pair: tuple[int, str | None]
    named: dict[str, int]


LEAF = Leaf(0.1 + 0.2, 3, True)
TREE = Tree("nan", LEAF, None, (LEAF,), (1, None), {"a": 1})


def round_trip(made: Any, folder: Path) -> Any:
    return rebuild(type(made), json.loads(write_json(folder / "made.json", asdict(made)).read_text()))


@pytest.mark.parametrize("number", [1 / 3, 5e-324, -0.0, 1e300, 2.0, math.inf, -math.inf, math.nan])
def test_every_number_comes_back_as_it_was(number: float, tmp_path: Path) -> None:
    again = round_trip(Leaf(number, 2**60, False), tmp_path)
    assert repr(again) == repr(Leaf(number, 2**60, False))  # repr tells all floats apart, and NaN is NaN


def test_nests_come_back_with_their_types(tmp_path: Path) -> None:
    again = round_trip(TREE, tmp_path)
    assert again == TREE  # a list is no tuple, and a string "nan" no number
    assert repr(again) == repr(TREE)
    full = Tree("x", LEAF, LEAF, (), (1, "nan"), {})
    assert round_trip(full, tmp_path) == full


def test_a_whole_number_may_stand_for_a_float() -> None:
    again = rebuild(Leaf, {"number": 2, "count": 1, "yes": True})
    assert repr(again.number) == "2.0"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"leaf": {"number": "much", "count": 1, "yes": True}}, "Tree.leaf.number must be a number, got 'much'"),
        ({"leaf": {"number": True, "count": 1, "yes": True}}, "Tree.leaf.number must be a number, got True"),
        ({"leaf": {"number": 10**400, "count": 1, "yes": True}}, "Tree.leaf.number must be a number, got 1000"),
        ({"leaf": {"number": 1.0, "count": 1.5, "yes": True}}, "Tree.leaf.count must be a whole number, got 1.5"),
        (
            {"leaf": {"number": 1.0, "count": True, "yes": True}},
            "Tree.leaf.count must be a whole number, got True",
        ),
        ({"leaf": {"number": 1.0, "count": 1, "yes": 1}}, "Tree.leaf.yes must be true or false, got 1"),
        ({"leaf": {"number": 1.0, "yes": True}}, "Tree.leaf must have number, count, yes; got number, yes"),
        ({"leaf": {}}, "Tree.leaf must have number, count, yes; got nothing"),
        ({"leaf": None}, "Tree.leaf must be an object, got None"),
        ({"leaves": [7]}, r"Tree.leaves\[0\] must be an object, got 7"),
        ({"leaves": "abc"}, "Tree.leaves must be a list, got 'abc'"),
        ({"pair": [1]}, "Tree.pair must have 2 items, got 1"),
        ({"named": {"a": None}}, r"Tree.named\['a'\] must be a whole number, got None"),
        ({"maybe": 3}, "Tree.maybe must be an object, got 3; or Tree.maybe must be null, got 3"),
        ({"newer": 1}, "Tree must have name, leaf, .*; got .*newer"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], words: str) -> None:
    plain = json.loads(json.dumps(asdict(TREE)))
    with pytest.raises(ValueError, match=words):
        rebuild(Tree, plain | changes)


@dataclass(frozen=True)
class Odd:
    path: Path


def test_a_type_that_is_not_known_is_the_callers_mistake() -> None:
    with pytest.raises(TypeError, match=r"Odd\.path is of a type that cannot be rebuilt"):
        rebuild(Odd, {"path": "x"})
