"""The words of the command line, and the sentences for words it does not know."""

from __future__ import annotations

from typing import Any

import pytest

from banach import (
    GMRES,
    JFB,
    RMS,
    Anderson,
    Broyden,
    Euclidean,
    Implicit,
    Neumann,
    NormalCG,
    Picard,
    Unroll,
    WorstPixel,
)
from banach.data import Affine, Chain, Crop, Erase, Flip, paper_cifar10
from banach.models import Constant, Cosine, Steps
from banach.train import OneCycle, words


@pytest.mark.parametrize(
    ("read", "word", "meant"),
    [
        (words.solver, "picard", Picard()),
        (words.solver, "picard:0.25", Picard(damping=0.25)),
        (words.solver, "Anderson:3", Anderson(memory=3)),
        (words.solver, "broyden:7", Broyden(memory=7)),
        (words.backward, "jfb", JFB()),
        (words.backward, "neumann:2", Neumann(2)),
        (words.backward, "unroll:3", Unroll(3)),
        (words.norm, "worst-pixel", WorstPixel()),
        (words.norm, "rms", RMS()),
        (words.norm, "euclidean", Euclidean()),
        (words.schedule, "constant", Constant()),
        (words.schedule, "cosine", Cosine()),
        (words.schedule, "one-cycle", OneCycle()),
        (words.schedule, "steps:10,15:0.5", Steps((10, 15), 0.5)),
        (words.augment, "none", None),
        (words.augment, "paper", paper_cifar10()),
        (words.augment, "flip+crop:2+erase+affine", Chain(Flip(), Crop(2), Erase(), Affine())),
        (words.augment, "flip", Flip()),
    ],
)
def test_a_word_is_the_object_it_names(read: Any, word: str, meant: Any) -> None:
    assert read(word) == meant


@pytest.mark.parametrize(
    ("word", "method", "rtol"),
    [
        ("implicit", NormalCG(), 1e-3),
        ("implicit:cg", NormalCG(), 1e-3),
        ("implicit:gmres:1e-5", GMRES(), 1e-5),
        ("implicit:anderson", Anderson(), 1e-3),
    ],
)
def test_implicit_words(word: str, method: Any, rtol: float) -> None:
    mode = words.backward(word)
    assert isinstance(mode, Implicit)
    assert mode.method == method
    assert mode.tolerance is not None
    assert (mode.tolerance.atol, mode.tolerance.rtol) == (0, rtol)


@pytest.mark.parametrize("norm", [RMS(), Euclidean(), WorstPixel()])
def test_every_norm_has_a_word(norm: Any) -> None:
    assert words.norm(words.name_of_norm(norm)) == norm
    assert words.norm(str(norm)) == norm


@pytest.mark.parametrize(
    ("read", "word", "said"),
    [
        (words.solver, "andersen", "did you mean 'anderson'"),
        (words.solver, "anderson:x", "needs a whole number, got 'x'"),
        (words.solver, "anderson:1:2", "expected picard"),
        (words.solver, "anderson:0", "memory"),
        (words.backward, "jfb:3", "expected jfb"),
        (words.backward, "neumann:-1", "order"),
        (words.backward, "implicit:cgg", "did you mean 'cg'"),
        (words.norm, "worst", "did you mean 'worst-pixel'"),
        (words.schedule, "steps", "expected constant"),
        (words.schedule, "steps:a:0.1", "needs a whole number"),
        (words.augment, "flip+crp:4", "did you mean 'crop'"),
    ],
)
def test_other_words_are_refused_with_advice(read: Any, word: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(word)
