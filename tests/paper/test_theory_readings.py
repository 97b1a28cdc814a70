"""Readings of the theory study: kept as they are measured, taken up where they are of the same, else made anew."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from banach import data
from banach.paper import (
    Options,
    theory,
    theory_cases,
    theory_dense,
    theory_measure,
    theory_perturb,
    theory_readings,
)
from banach.paper.beforehand import check_data
from banach.paper.rebuild import rebuild
from banach.paper.theory_cases import Case, Trained, train
from banach.paper.theory_measure import Batch, Reading
from banach.paper.theory_readings import Kept, readings_alone, readings_of
from banach.paper.together import carry_out_together
from banach.provenance import write_json
from banach.train import RunError

TINY = Case("digits", "digits", (0, 1), images=4, dense=1, dense_epochs=(1,))
FILES = ["epoch-00000.json", "epoch-00001.json"]
JOB = Case("mnist", "mnist", (0, 1), images=4, dense=0, dense_epochs=()).job()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained, list[Kept]]:
    """A training and its readings: measured once, copied by those that change something."""
    runs = tmp_path_factory.mktemp("readings") / "runs"
    trained = train(TINY, options_at(runs))
    return runs, trained, readings_of(trained, options_at(runs))


@pytest.fixture
def runs(first: tuple[Path, Trained, list[Kept]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(first[0], tmp_path / "runs"))


@pytest.fixture
def measured(first: tuple[Path, Trained, list[Kept]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that are measured; in place of measuring, the first readings again."""
    asked: list[int] = []

    def spied(moment: Any, trained: Trained) -> Reading:
        asked.append(moment.epoch)
        return next(one.reading for one in first[2] if one.reading.epoch == moment.epoch)

    monkeypatch.setattr(theory_readings, "measure", spied)
    return asked


def options_at(runs: Path, say: Callable[[str], None] = lambda _: None, at_once: int = 1) -> Options:
    return Options(quick=True, device="cpu", out=runs.parent / "out", runs=runs, say=say, at_once=at_once)


def folder(runs: Path) -> Path:
    return runs / TINY.name / "readings"


def test_readings_are_kept_and_taken_up(
    first: tuple[Path, Trained, list[Kept]], runs: Path, measured: list[int]
) -> None:
    _, _, made = first
    said: list[str] = []
    assert sorted(path.name for path in folder(runs).iterdir()) == FILES
    again = readings_of(train(TINY, options_at(runs)), options_at(runs, said.append))
    assert measured == []
    assert repr(again) == repr(made)  # to the last bit, NaN and all
    assert made[1].reading.locals
    begin = f"{TINY.name}: epoch 1 was measured before, in {made[1].seconds:.1f} seconds"
    assert (len(said), said[1]) == (2, begin)


def test_every_reading_is_kept_at_once_and_said(
    runs: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption between two of them loses the second alone."""
    shutil.rmtree(folder(runs))
    trained, said = train(TINY, options_at(runs)), list[str]()
    spied = theory_readings.measure

    def stopped(moment: Any, trained: Trained) -> Reading:
        if moment.epoch == 1:
            raise KeyboardInterrupt
        return spied(moment, trained)

    with monkeypatch.context() as patch:
        patch.setattr(theory_readings, "measure", stopped)
        with pytest.raises(KeyboardInterrupt):
            readings_of(trained, options_at(runs, said.append))
    assert [path.name for path in folder(runs).iterdir()] == FILES[:1]
    readings_of(trained, options_at(runs, said.append))
    assert measured == [0, 1]
    ends = ["0 is measured, in 0.0", "0 was measured before, in 0.0", "1 is measured, in 0.0"]
    assert said == [f"{TINY.name}: epoch {end} seconds" for end in ends]


@pytest.mark.parametrize(
    ("changes", "anew"),
    [
        ({}, []),
        ({"dense": 2}, [1]),  # of epoch 0 nothing is looked at closely either way
        ({"dense_epochs": (0, 1)}, [0]),
        ({"dense_epochs": ()}, [1]),
        ({"images": 5}, [0, 1]),
    ],
)
def test_another_case_is_measured_anew(
    changes: dict[str, Any], anew: list[int], runs: Path, measured: list[int]
) -> None:
    case = replace(TINY, **changes)
    readings_of(train(case, options_at(runs)), options_at(runs))
    assert measured == anew
    readings_of(train(case, options_at(runs)), options_at(runs))
    assert measured == anew  # what was made is kept in place of the other


def test_other_weights_are_measured_anew(runs: Path, measured: list[int]) -> None:
    weights = runs / TINY.name / "weights"
    shutil.copy(weights / "epoch-00000.safetensors", weights / "epoch-00001.safetensors")
    readings_of(train(TINY, options_at(runs)), options_at(runs))
    assert measured == [1]


def test_a_training_without_its_weights_is_not_trained_over(runs: Path) -> None:
    path = runs / TINY.name
    shutil.rmtree(path / "checkpoints")
    kept = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(RunError, match="is of a training without its weights"):
        train(TINY, options_at(runs))
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == kept


def test_without_weights_readings_stand_for_themselves(
    first: tuple[Path, Trained, list[Kept]], runs: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No data is read, nothing is built up to be trained; but what is not of this case is no reading of it."""
    options = options_at(runs)
    assert readings_alone(TINY, options) is None  # there is a training, which is asked first
    shutil.rmtree(runs / TINY.name / "checkpoints")
    with monkeypatch.context() as patch:
        patch.setattr(theory, "train", None)
        found = theory.take(TINY, options)
    made = [one.reading for one in first[2]]
    assert repr(found.readings) == repr(made)
    assert (found.title, len(found.places)) == ("digits (scikit-learn)", 2)
    for change in ({"images": 5}, {"dense": 2}, {"epochs": (0, 1, 2)}, {"precision": "bf16"}):
        with pytest.raises(RunError, match="is of a training without its weights"):
            theory.take(replace(TINY, **change), options)
    with monkeypatch.context() as patch:
        patch.setattr(theory_perturb, "ASCENTS", 6)  # another way of measuring
        assert readings_alone(TINY, options) is None
    (folder(runs) / FILES[0]).unlink()
    with pytest.raises(RunError, match="is of a training without its weights"):
        theory.take(TINY, options)
    assert measured == []


def test_a_reading_whose_weights_alone_are_gone_is_taken_up(runs: Path, measured: list[int]) -> None:
    options = options_at(runs)
    (runs / TINY.name / "weights" / "epoch-00001.safetensors").unlink()
    assert [one.epoch for one in theory.take(TINY, options).readings] == [0, 1]
    assert [one.epoch for one in theory.take(replace(TINY, dense=2), options).readings] == [0]
    assert measured == []


def test_readings_alone_need_no_data(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, study = replace(options_at(runs), data_dir=runs), replace(theory.STUDY, trainings=lambda _: [JOB])
    (runs / JOB.name / "readings").mkdir(parents=True)
    with pytest.raises(data.DataError, match="mnist was not found"):
        check_data([study], options)
    (runs / JOB.name / "readings" / FILES[0]).touch()
    check_data([study], options)
    (runs / JOB.name / "checkpoints" / "epoch-00001-step-0000000").mkdir(parents=True)  # will be gone on from
    with pytest.raises(data.DataError, match="mnist was not found"):
        check_data([study], options)


def test_cifar10_is_trained_on_augmented_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in theory.CASES["full"] if case.data == "cifar10")
    job, given = case.job(), dict[str, Any]()
    assert (job.settings.augment, job.settings.precision) == ("paper", "bf16")
    assert job.augment is not None

    def spied(*_: Any, **options: Any) -> Any:
        given.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(theory_cases.data, "load", lambda *_: None)
    monkeypatch.setattr(theory_cases, "fit", spied)
    with pytest.raises(KeyboardInterrupt):
        train(case, options_at(tmp_path))
    assert given["augment"] == job.augment


def test_other_images_are_measured_anew(runs: Path, measured: list[int]) -> None:
    """As many, of the same weights: SVHN is there in two forms."""
    trained = train(TINY, options_at(runs))
    few = data.load("digits", "train").subset(4)
    others = [
        replace(few, labels=few.labels + 1),
        replace(few, pixels=few.pixels.flip(0)),
        replace(few, mean=(0.0,)),
    ]
    assert trained.pixels == theory_cases._digest(few)
    assert len({trained.pixels, *map(theory_cases._digest, others)}) == 4
    readings_of(replace(trained, pixels=theory_cases._digest(others[0])), options_at(runs))
    assert measured == [0, 1]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (theory_measure, "TIGHT"),
        (theory_dense, "LIMIT"),
        (theory_dense, "OTHERS"),
        (theory_perturb, "DISTANCES"),
        (theory_perturb, "DIRECTIONS"),
        (theory_perturb, "ASCENTS"),
        (theory_perturb, "STEPS"),
    ],
)
def test_other_settings_of_measuring_are_measured_anew(
    module: Any, name: str, runs: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train(TINY, options_at(runs))
    monkeypatch.setattr(module, name, "another")
    readings_of(trained, options_at(runs))
    assert measured == [0, 1]


def test_another_tolerance_is_measured_anew(runs: Path, measured: list[int]) -> None:
    trained = train(TINY, options_at(runs))
    trained.moments[1].net.tolerance = replace(trained.moments[1].net.tolerance, atol=1e-3)
    readings_of(trained, options_at(runs))
    assert measured == [1]


def without(content: Any, *keys: str) -> Any:
    """A file as an older version would have written it."""
    at = content
    for key in keys[:-1]:
        at = at[key]
    del at[keys[-1]]
    return content


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "\x00",
        lambda text: json.dumps(without(json.loads(text), "job")),
        lambda text: json.dumps(without(json.loads(text), "marks", "source")),
        lambda text: json.dumps(without(json.loads(text), "marks", "reading", "training_rate")),
        lambda text: json.dumps(without(json.loads(text), "marks", "reading", "batch", "ratio")),
        lambda text: text.replace('"epochs": 1,', '"epochs": 2,', 1),  # of another job
        lambda text: text.replace('"warned": []', '"warned": 3'),
    ],
)
def test_a_file_that_does_not_fit_is_written_anew(
    broken: Callable[[str], str], runs: Path, measured: list[int]
) -> None:
    path = folder(runs) / FILES[0]
    text = path.read_text()
    assert broken(text) != text
    path.write_text(broken(text))
    trained = train(TINY, options_at(runs))
    readings_of(trained, options_at(runs))
    assert measured == [0]
    readings_of(trained, options_at(runs))
    assert measured == [0]


def test_readings_come_back_with_nan_and_infinities(
    first: tuple[Path, Trained, list[Kept]], tmp_path: Path
) -> None:
    """A real one, with images looked at closely, and what a diverging network has."""
    real = first[2][1].reading
    one = real.locals[0]
    lost = replace(
        real,
        sigma=(math.nan, math.inf, -math.inf, -0.0),
        batch=Batch(math.nan, math.nan, math.nan, 0.5),
        warned=("nan",),
        locals=(
            replace(one, conditioning=replace(one.conditioning, kappa=math.inf)),
            replace(one, theorem=None, identity=None),
        ),
    )
    for made in (real, lost):
        path = write_json(tmp_path / "reading.json", asdict(made))
        assert repr(rebuild(Reading, json.loads(path.read_text()))) == repr(made)
    assert real.locals[0].theorem is not None


def test_there_is_a_part_for_every_case() -> None:
    options = Options()
    parts = theory.STUDY.parts(options)
    assert [part.args[0] for part in parts] == list(theory.CASES["full"])  # type: ignore[attr-defined]
    names = [part.args[0].name for part in parts]  # type: ignore[attr-defined]
    assert len(set(names)) == len(parts) == 4  # no two write in one folder
    assert [job.name for job in theory.STUDY.trainings(options)] == names


def test_what_parts_leave_is_what_the_study_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own a case is trained and measured; here nothing is."""
    monkeypatch.setitem(theory.CASES, "quick", (replace(TINY, dense_epochs=()),))
    monkeypatch.setitem(theory.RANDOM, "quick", 5)
    said: list[str] = []
    options = options_at(tmp_path / "runs", said.append, at_once=2)
    carry_out_together(theory.STUDY.parts(options), options)

    def fails(*_: Any) -> Any:
        raise AssertionError("it is kept")

    monkeypatch.setattr(theory_readings, "measure", fails)
    found = theory.STUDY.run(options)
    assert [reading["epoch"] for reading in found.details["digits"]] == [0, 1]
    assert len(said) == 2
    assert all("was measured before" in line for line in said)  # and no training begins
    (place,) = [note for note in found.notes if note.startswith("measured on ")]
    assert place.startswith("measured on cpu: ")
    assert place.endswith(" (2)")
    assert ", torch " in place
