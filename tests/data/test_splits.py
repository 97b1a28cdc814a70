"""The validation split: fixed, stratified, disjoint from the rest."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from banach.data import Arrays, DataError, DataSet, Images, get, load, names, register
from banach.data.images import held_out

LABELS = np.random.RandomState(0).choice(10, 2_000, p=[0.3, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.03, 0.02])


def shares(labels: np.ndarray, count: int) -> dict[int, int]:
    """Largest remainder, by fractions."""
    sizes = Counter(labels.tolist())
    exact = {c: Fraction(n * count, len(labels)) for c, n in sizes.items()}
    whole = {c: int(f) for c, f in exact.items()}
    for c in sorted(exact, key=lambda c: (whole[c] - exact[c], c))[: count - sum(whole.values())]:
        whole[c] += 1
    return {c: n for c, n in whole.items() if n}


@pytest.mark.parametrize("count", [0, 7, 199, 2_000])
def test_every_class_gives_its_share(count: int) -> None:
    index = held_out(LABELS, count)
    assert len(index) == len(set(index.tolist())) == count
    assert (np.diff(index) > 0).all()
    assert Counter(LABELS[index].tolist()) == shares(LABELS, count)


def test_the_split_never_changes() -> None:
    """Pinned: a change here makes every earlier result incomparable."""
    index = held_out(np.arange(60_000) % 10, 5_000)
    digest = hashlib.sha256(index.astype("<i8").tobytes()).hexdigest()
    assert digest == "ebc4cfbc9582f97fd06c30a5f18ced178f44a2018eb28c8c1e4c8ef63a51190c"


def test_digits_are_scikit_learns_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANACH_DATA", "/nowhere")  # which does not matter: they come inside a package
    from sklearn.datasets import load_digits

    whole = load_digits()
    parts = [load("digits", split) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [1_257, 180, 360]
    pixels, labels = torch.cat([p.pixels for p in parts]), torch.cat([p.labels for p in parts])
    values = pixels[:, 0].numpy() / 15
    mine = sorted((bytes(v.astype(np.uint8).ravel()), int(l)) for v, l in zip(values, labels, strict=True))
    theirs = sorted(
        (bytes(v.astype(np.uint8).ravel()), int(l)) for v, l in zip(whole.images, whole.target, strict=True)
    )
    assert np.array_equal(values, np.round(values))
    assert mine == theirs  # every image once: the splits are disjoint and lose nothing
    assert set(Counter(parts[1].labels.tolist()).values()) == {18}


def test_digits_are_normalised_and_have_a_fixed_stratified_subset() -> None:
    train = load("digits", "train")
    x = train.normalise(train.pixels)
    assert x.dtype == torch.float32
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3
    part = train.subset(100)
    assert Counter(part.labels.tolist()) == shares(train.labels.numpy(), 100)
    assert torch.equal(part.pixels, train.subset(100).pixels)
    with pytest.raises(ValueError, match="choose 0 to 1257"):
        train.subset(1258)


def test_an_unknown_split_or_name_is_refused() -> None:
    with pytest.raises(DataError, match="no split 'valid'; choose one of train, validation, test"):
        load("digits", "valid")
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        load("cifar-10", "train")
    with pytest.raises(DataError, match="choose from digits, mnist, cifar10, svhn"):
        load("zzz", "train")


def mine(read: Callable[..., Arrays], **changes: object) -> DataSet:
    made = DataSet(
        "mine", "Mine", (2, 3, 4), ("a", "b"), (0.5, 0.25), (1.0, 2.0), {"train": 10, "test": 4}, 4, read
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_one_training_image_leaves_none_for_validation() -> None:
    """An upper limit of 0 was taken for none."""
    with pytest.raises(ValueError, match="at least 1 and at most 0, got 1"):
        mine(lambda *_: None, counts={"train": 1, "test": 1}, validation=1)  # type: ignore[arg-type]


def read_mine(part: str, paths: tuple) -> Arrays:
    count = {"train": 10, "test": 4}[part]
    pixels = np.arange(count * 24, dtype=np.uint8).reshape(count, 2, 3, 4)
    return Arrays(pixels, (np.arange(count) % 2).astype(np.uint8))


def test_a_data_set_of_ones_own() -> None:
    register(mine(read_mine))
    assert names()[-1] == "mine"
    assert get("mine").title == "Mine"
    got = load("mine", "validation")
    assert got.labels.tolist().count(0) == 2
    mean, std = torch.tensor([[0.5, 0.25], [1, 2]])[..., None, None]
    torch.testing.assert_close(got.normalise(got.pixels), (got.pixels / 255 - mean) / std, atol=1e-6, rtol=0)
    with pytest.raises(DataError, match="replace=True"):
        register(mine(read_mine))


GOOD, LABEL = np.zeros((10, 2, 3, 4), np.uint8), np.zeros(10, np.uint8)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        (Arrays(GOOD / 2, LABEL), "float64 images"),
        (Arrays(GOOD.transpose(0, 1, 3, 2), LABEL), r"\(2, 4, 3\)"),
        (Arrays(GOOD[1:], LABEL[1:]), "9 images and 9 labels"),
        (Arrays(GOOD, LABEL[1:]), "10 images and 9 labels"),
        (Arrays(GOOD, LABEL + 2), "label of 2, expected 0 to 1"),
    ],
)
def test_a_reader_that_returns_something_else_is_refused(arrays: Arrays, expected: str) -> None:
    register(mine(lambda part, paths: arrays))
    with pytest.raises(DataError, match=f"mine cannot be used: .*{expected}"):
        load("mine", "train")


@pytest.mark.parametrize("changes", [{"counts": {"train": 10}}, {"validation": 10}])
def test_a_definition_that_cannot_be_is_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="got"):
        mine(read_mine, **changes)


def test_images_check_themselves() -> None:
    good = load("digits", "validation")
    options = {f: getattr(good, f) for f in ("name", "title", "split", "classes", "mean", "std")}
    with pytest.raises(TypeError, match="pixels must be uint8"):
        Images(good.pixels.float(), good.labels, **options)
    with pytest.raises(TypeError, match=r"labels int64 \(N,\), got .* and torch.int64 \(179,\)"):
        Images(good.pixels, good.labels[:-1], **options)
    for mean, std in (((0.5,) * 3, (0.5,) * 3), ((0.5,), (0.0,))):  # was broadcast to three channels; infinite
        with pytest.raises(ValueError, match="need a number per channel, those of std positive"):
            replace(good, mean=mean, std=std)
