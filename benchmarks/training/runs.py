"""Data sets trained end to end by one command each: what the test set says, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from banach.provenance import Summary
from benchmarks.report import Result, Row, Target
from benchmarks.training.place import Place


@dataclass(frozen=True)
class Settings:
    """What differs from the recipes of the networks."""

    flags: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)


def digits(place: Place) -> Result:
    """The default: three seeds, each at least 98% in under 90 s."""
    settings = Settings((), (0, 1, 2))
    rows = _rows("digits", settings, Place(place.data_dir, "cpu", place.runs))
    targets = [
        Target("digits, least test accuracy of 3 seeds", min(row["test"] for row in rows), 0.98, at_least=True),
        Target("digits, longest run in seconds", max(row["seconds"] for row in rows), 90),
    ]
    return _result("digits", "what do the default settings come to?", rows, targets, settings, "cpu")


def mnist(place: Place) -> Result:
    """The paper's network by JFB, three epochs on a CPU."""
    settings = Settings(("--data", "mnist", "--epochs", "3"))
    rows = _rows("mnist", settings, Place(place.data_dir, "cpu", place.runs))
    target = Target("MNIST, test accuracy after 3 epochs by JFB", rows[0]["test"], 0.985, at_least=True)
    return _result("mnist", "the paper's MNIST network on a CPU", rows, [target], settings, "cpu")


def mnist_gpu(place: Place) -> Result:
    return _on_gpu("mnist-gpu", Settings(("--data", "mnist", "--epochs", "5")), place)


def svhn_gpu(place: Place) -> Result:
    return _on_gpu("svhn-gpu", Settings(("--data", "svhn", "--epochs", "3")), place)


def cifar10_gpu(place: Place) -> Result:
    flags = ("--data", "cifar10", "--epochs", "5", "--precision", "bf16")
    return _on_gpu("cifar10-gpu", Settings(flags), place)


def _on_gpu(name: str, settings: Settings, place: Place) -> Result:
    rows = _rows(name, settings, place)
    return _result(name, "real data, end to end, on one GPU", rows, [], settings, place.device)


def _rows(name: str, settings: Settings, place: Place) -> list[Row]:
    return [place.train(f"{name}-{seed}", *settings.flags, "--seed", str(seed)) for seed in settings.seeds]


def _result(
    name: str, question: str, rows: list[Row], targets: list[Target], settings: Settings, device: str
) -> Result:
    accuracy = Summary.of(row["test"] for row in rows)
    spread = "" if accuracy.spread is None else f" ± {accuracy.spread:.2%}"
    note = f"test accuracy {accuracy.mean:.2%}{spread}, n = {accuracy.count}; clean images, eval mode, last epoch"
    where = "cuda" if device == "auto" else device
    short = [{key: value for key, value in row.items() if key not in ("epochs", "settings")} for row in rows]
    details = [{key: row[key] for key in ("command", "epochs", "settings")} for row in rows]
    return Result(name, question, short, targets, [note], settings, where, details)
