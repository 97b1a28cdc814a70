"""Tests of `python -m reproduction train`: stop in time, resume, pack, records, errors. On digits, on the CPU."""

import itertools
import json
import os
import shutil
import signal
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from banach.train import Epoch, Run, RunError
from reproduction import jobs, rundir, study, train
from reproduction.__main__ import main
from reproduction.rundir import MOST, newest, pack
from reproduction.study import Options
from reproduction.train import Trainer
from reproduction.trainings import Training

NAME = "digits-jfb-seed0"
JOB = jobs.get(NAME)


def options(tmp_path: Path, **changes: object) -> Options:
    values = {"runs": tmp_path / "runs", "device": "cpu", "say": lambda line: None, **changes}
    return Options(**values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a training without interruption."""
    made = options(tmp_path_factory.mktemp("whole"))
    assert train.train([JOB], made)
    return made.runs / NAME


def packed(tars: Path) -> str:
    """The checkpoint in the tar of the run."""
    with tarfile.open(tars / f"{NAME}.tar") as tar:
        return max(Path(name).parts[2] for name in tar.getnames() if "/checkpoints/" in name)


def timeless(epochs: tuple[Epoch, ...]) -> list[dict[str, object]]:
    return [{**epoch.to_dict(), "seconds": 0.0, "warm_up": False} for epoch in epochs]


def assert_same_run(one: Path, other: Path) -> None:
    """Bit by bit, apart from times."""
    assert timeless(Run.open(one).metrics()) == timeless(Run.open(other).metrics())
    for name in (rundir.TEST, rundir.CONTRACTION, rundir.FINAL):
        assert (one / name).read_text() == (other / name).read_text(), name
    last = "snapshots/epoch-00004.safetensors"
    assert (one / last).read_bytes() == (other / last).read_bytes()


def test_a_job_that_travels_in_segments_is_the_same_bit_by_bit(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tars"
    for number in range(JOB.settings.epochs):
        runs = tmp_path / f"machine{number}"  # a new machine each time
        given = options(tmp_path, minutes=0, runs=runs, pack=folder, unpack=folder)
        assert train.train([JOB], given) is (number == JOB.settings.epochs - 1)
    assert_same_run(runs / NAME, whole)
    segments = study.read_lines(runs / NAME / rundir.SEGMENTS)
    assert [(s["first_epoch"], s["last_epoch"]) for s in segments] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [s["stopped"] for s in segments] == ["out of time"] * 3 + ["finished"]
    assert {s["sources"] for s in segments} == {rundir.source_hash()}


def test_what_is_recorded(whole: Path, tmp_path: Path) -> None:
    points = study.read_lines(whole / rundir.TEST)
    assert [point["epoch"] for point in points] == [1, 2, 3, 4]
    assert points[-1]["clean"]["accuracy"] > 0.95
    assert points[-1]["clean"]["residual"] < 1e-4
    final = json.loads((whole / rundir.FINAL).read_text())
    assert final["parts"] == {"Q": 3_720, "R": 10_416, "S": 3_850}
    assert final["clean"]["accuracy"] == points[-1]["clean"]["accuracy"]  # fp32 both
    contraction = study.read_lines(whole / rundir.CONTRACTION)
    assert [line["epoch"] for line in contraction] == [1, 3, 4]
    assert [len(contraction[0][mode]["sigma"]) for mode in ("eval", "train")] == [100, 1]
    assert contraction[0]["train"]["coupled"]
    assert all(0.5 < line["cosine"] < 1 for line in contraction)
    snapshots = sorted(path.name for path in (whole / rundir.SNAPSHOTS).iterdir())
    assert snapshots == [f"epoch-0000{number}.safetensors" for number in (1, 3, 4)]
    latest: Any = Run.open(whole).latest()
    weights, snapshot = latest.under("net"), load_file(whole / "snapshots/epoch-00004.safetensors")
    assert snapshot.keys() == weights.keys()
    assert all(torch.equal(snapshot[name], weights[name]) for name in weights)
    # A finished job is packed, and not trained again.
    before = (whole / "metrics.jsonl").stat().st_mtime_ns
    assert train.train([JOB], options(tmp_path, runs=whole.parent, pack=tmp_path))
    assert (whole / "metrics.jsonl").stat().st_mtime_ns == before
    assert packed(tmp_path) == "epoch-00004-step-0000000"


def test_a_signal_packs_and_a_kill_between_record_and_checkpoint_leaves_no_epoch_twice(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM after epoch 1; then a kill, with records that are one epoch ahead of the newest checkpoint."""
    made, after, save = options(tmp_path, pack=tmp_path / "tars"), Trainer._after, Run.save

    def after_then_signal(self: Trainer, epoch: Epoch) -> None:
        after(self, epoch)
        signal.raise_signal(signal.SIGTERM)

    def save_or_die(run: Run, position: object, *rest: object) -> None:
        if getattr(position, "epoch", 0) == 2:
            raise Killed
        save(run, position, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_after", after_then_signal)
    assert not train.train([JOB], made)
    assert packed(tmp_path / "tars") == "epoch-00001-step-0000000"
    monkeypatch.undo()
    monkeypatch.setattr(Run, "save", save_or_die)
    with pytest.raises(Killed):
        train.train([JOB], made)
    monkeypatch.undo()
    assert [point["epoch"] for point in study.read_lines(made.runs / NAME / rundir.TEST)] == [1, 2]
    assert train.train([JOB], made)
    assert_same_run(made.runs / NAME, whole)
    segments = study.read_lines(made.runs / NAME / rundir.SEGMENTS)
    assert [(s["last_epoch"], s["stopped"]) for s in segments] == [(1, "signal 15"), (1, None), (4, "finished")]


@pytest.mark.parametrize(("seconds", "epochs"), [(305, 2), (320, 3)])
def test_the_run_stops_before_an_epoch_that_does_not_fit(
    seconds: int, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that only epochs move, by 100 s each: a third one needs 300 s and some for packing."""
    now, real = [0.0], Trainer._after

    def after(self: Trainer, epoch: Epoch) -> None:
        now[0] += 100.0
        real(self, epoch)

    monkeypatch.setattr(Trainer, "_after", after)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(study, "STARTED", 0.0)
    made = options(tmp_path, minutes=seconds / 60)
    assert not train.train([JOB], made)
    assert len(Run.open(made.runs / NAME).metrics()) == epochs


def test_tars_stay_below_the_limit(whole: Path, tmp_path: Path) -> None:
    """JOB.tar holds the newest checkpoint only; snapshots that do not fit go to further tars."""
    with tarfile.open(pack(whole, tmp_path / "small")[0]) as tar:
        names = tar.getnames()
    assert sum(name.endswith("tensors.safetensors") for name in names) == 1
    assert not any("/." in name for name in names)
    run = tmp_path / "job"
    (run / "snapshots").mkdir(parents=True)
    (run / "settings.json").write_text("{}")
    for number in range(7):
        (run / "snapshots" / f"epoch-{number}.safetensors").write_bytes(bytes(3_400_000))
    files = pack(run, tmp_path / "tars")
    assert [file.name for file in files] == ["job.tar", "job.snapshots-1.tar"]
    assert all(file.stat().st_size <= MOST + 10240 for file in files)
    for file in files:
        with tarfile.open(file) as tar:
            tar.extractall(tmp_path / "back", filter="data")
    assert len(list((tmp_path / "back/job/snapshots").iterdir())) == 7


def test_other_sources_and_older_tars_are_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars, said = tmp_path / "tars", list[str]()
    monkeypatch.setattr(study, "STARTED", time.monotonic())
    assert not train.train([JOB, JOB], options(tmp_path, minutes=0, pack=tars, say=said.append))
    assert any("not started" in line for line in said), "later jobs start only while time is left"
    rundir.unpack(tars / f"{NAME}.tar", whole.parent)  # is behind
    assert newest(whole) == "epoch-00004-step-0000000"
    monkeypatch.setattr(rundir, "source_hash", lambda: "0" * 64)
    with pytest.raises(RunError, match="use those sources"):
        train.train([JOB], options(tmp_path, minutes=0))
    assert len(study.read_lines(tmp_path / "runs" / NAME / rundir.SEGMENTS)) == 1
    (tars / "other.tar").write_bytes((tars / f"{NAME}.tar").read_bytes())
    with pytest.raises(RunError, match="must hold the run other, got"):
        rundir.unpack(tars / "other.tar", tmp_path / "runs")
    (tars / f"{NAME}.tar").write_bytes(b"no tar")
    with pytest.raises(RunError, match="copy it again"):
        train.train([JOB], options(tmp_path, unpack=tars))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [NAME], "nothing half unpacked is left"


class Killed(BaseException):
    pass


def test_a_kill_while_a_tar_is_unpacked_loses_no_record(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint came with the records of an older one, and the tar was not ahead any more."""
    tar, replace = pack(whole, tmp_path)[0], os.replace
    wanted = sorted(path.relative_to(whole) for path in whole.glob("snapshots/*"))
    for after in itertools.count():
        runs, moves = tmp_path / f"runs{after}", iter(range(after))
        folder = runs / NAME
        (folder / "checkpoints" / "epoch-00001-step-0000000").mkdir(parents=True)
        (folder / rundir.TEST).write_text("stale")

        def replace_or_die(*paths: Path, left: Any = moves) -> None:
            if next(left, None) is None:
                raise Killed
            replace(*paths)

        monkeypatch.setattr(os, "replace", replace_or_die)
        try:
            rundir.unpack(tar, runs)
            killed = False
        except Killed:
            killed = True
        monkeypatch.undo()
        if newest(folder) == newest(whole):
            for name in (rundir.TEST, rundir.CONTRACTION, rundir.SEGMENTS, "metrics.jsonl"):
                assert (folder / name).read_bytes() == (whole / name).read_bytes()
            assert [folder / path for path in wanted] == sorted(folder.glob("snapshots/*"))
            assert Run.open(folder).latest() is not None
        else:
            assert not (folder / rundir.FINAL).exists(), "the run counts as finished"
            rundir.unpack(tar, runs)  # the tar is still ahead
            assert newest(folder) == newest(whole)
        if not killed:
            break
    assert after > 8
    assert (folder / rundir.FINAL).exists()
    assert [path.name for path in runs.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cifar10-jfb-sed0"], "did you mean 'cifar10-jfb-seed0'"),
        ([], "name at least one job"),
        ([NAME, "--minutes", "-1"], "--minutes must be"),
        ([NAME, "--minutes", "nan"], "--minutes must be"),
        ([NAME, "--device", "gpux"], "device must be"),
        (["mnist-jfb-seed0", "--data-dir", "no-such-folder"], "no-such-folder is not a folder"),
        ([NAME, "--pack", __file__], "expected a folder, got the file"),  # was found out after an epoch
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments, "--runs", str(tmp_path / "runs")]) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_the_jobs_have_the_released_settings() -> None:
    job = jobs.get("cifar10-jfb-seed2").settings
    assert (job.epochs, job.batch_size, job.lr, job.weight_decay, job.eps) == (1000, 100, 1e-3, 1e-3, 0.1)
    assert (job.precision, job.seed, job.whole, job.fast) == ("bf16", 2, True, True)
    printed = jobs.get("mnist-jfb-printed-seed4").settings
    assert (printed.epochs, printed.lr, printed.eps, printed.precision) == (100, 1e-4, 1e-4, "fp32")
    assert jobs.get("resnet56-seed0").settings.epochs == 182
    twin: Any = jobs.get("svhn-twin-seed0").build()
    assert twin.tolerance.max_steps == 0
    evaluated = [epoch for epoch in range(1, 1001) if jobs.get("cifar10-jfb-seed0").evaluates(epoch)]
    assert evaluated[:3] == [1, 5, 10]
    assert evaluated[-10:] == list(range(991, 1001))


def test_runs_become_one_line_each_and_no_other_run_replaces_them(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, work = tmp_path / "trainings.jsonl", tmp_path / "work"

    def collect(runs: Path) -> int:
        return main(["collect", str(runs), "--records", str(tmp_path)])

    shutil.copytree(whole, work / NAME)
    (work / NAME / rundir.FINAL).unlink()
    (tmp_path / "empty").mkdir()
    assert collect(work) == 0
    (row,) = study.read(Training, out)
    assert (row.final, row.reached) == (None, 4)
    assert [collect(runs) for runs in (whole.parent, tmp_path / "no-runs", tmp_path / "empty")] == [0, 2, 0]
    (line,), (row,) = study.read_lines(out), study.read(Training, out)
    assert line["final"] == json.loads((whole / rundir.FINAL).read_text())
    assert (row.job, row.group, row.seed, row.images) == (NAME, "digits-jfb", "0", 1437)
    assert row.clean == pytest.approx(100 * line["final"]["clean"]["accuracy"])
    assert row.released == pytest.approx(max(100 * point["released"]["accuracy"] for point in line["test"]))
    losses = [epoch.loss for epoch in Run.open(whole).metrics()]
    assert [epoch.loss for epoch in row.epochs] == pytest.approx(losses, rel=1e-5)
    line["segments"][0]["started"] = "another time"
    study.write_lines(out, [line])
    assert collect(whole.parent) == 2
    assert "has another run of the name" in capsys.readouterr().err
    study.write_lines(out, [line | {"final": None, "epochs": line["epochs"] * 2}])
    assert collect(work) == 2, "the run in work has not come as far"
    study.write_lines(out, [line | {"final": None}])
    assert collect(work) == 0, "the other one was never finished"
    (work / NAME / rundir.SEGMENTS).unlink()
    assert collect(work) == 2, "the report could not be made of such records"
    assert f"has no {rundir.SEGMENTS}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["trainings", "table2", "neumann"])
def test_the_committed_trainings_are_whole(name: str) -> None:
    """Every run was trained without a gap, from the sources of one commit; a finished one to its last epoch."""
    for row in study.read(Training, Path(__file__).parents[2] / f"results/reproduction/{name}.jsonl"):
        assert [epoch.epoch for epoch in row.epochs] == list(range(1, len(row.epochs) + 1))
        assert 0 <= row.segments[-1]["last_epoch"] - row.reached < 5  # every fifth epoch is tested
        assert row.final is None or row.reached == row.settings["epochs"]
        assert len({segment["sources"] for segment in row.segments}) == 1
