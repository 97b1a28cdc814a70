"""Run training jobs within a time budget: resume, measure, stop in time, pack; `train --help` has the rules."""

import gc
import time
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file

from banach.data import Images
from banach.provenance import write_json
from banach.train import Epoch, Run, RunError, fit
from reproduction import rundir
from reproduction.jobs import Job
from reproduction.measure import Measure
from reproduction.rundir import newest, pack, unpack
from reproduction.study import Options, write_lines

PACK_EVERY = 100.0  # seconds: what a killed process loses at most, besides the epoch in work
RESERVE = 9.0  # seconds for packing and for what cannot be foreseen
FINAL_SECONDS = 30.0  # for the evaluations after the last epoch
MONITOR_EVERY = 50  # epochs between two measurements of the contraction, besides the snapshots


class OutOfTime(Exception):
    """The next epoch would exceed the budget."""


def train(jobs: list[Job], options: Options) -> bool:
    """Run jobs one after the other while time is left; return True if all of them are finished.

    The first one always gets at least one epoch. A run directory, a tar or sources that do not fit are a RunError.
    """
    finished, needed = [], 0.0
    for job in jobs:
        if needed and options.left < needed:
            options.say(f"{job.name}: not started: it needs about {needed:.0f} s, {options.left:.0f} s are left")
            return False
        trainer = Trainer(job, options)
        finished.append(trainer.run())
        needed = max([needed, *trainer.epochs[:1]])
        del trainer
        gc.collect()  # captured graphs hold memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return all(finished)


class Trainer:
    """One job in this process."""

    def __init__(self, job: Job, options: Options) -> None:
        self.job, self.options, self.folder = job, options, options.runs / job.name
        self.settings = replace(job.settings, device=options.device)
        self.begun = self.last = self.packed_at = time.monotonic()
        self.epochs: list[float] = []  # seconds with all that goes with it, of the first also to start up
        self.said: list[warnings.WarningMessage] = []

    def run(self) -> bool:
        """Train until the end or until time is over; return True if the job is finished."""
        if self.options.unpack and (tar := self.options.unpack / f"{self.job.name}.tar").exists():
            unpack(tar, self.options.runs)
        if (self.folder / rundir.FINAL).exists():
            self.options.say(f"{self.job.name}: is finished")
            self._pack()
            return True
        self.net = self.job.build().to(self.settings.torch_device)
        self._take_weights()
        train, test = self._load("train"), self._load("test")
        run = self._open()
        self.measure = Measure(self.job, self.net, train, test)
        with warnings.catch_warnings(record=True) as self.said:
            warnings.simplefilter("always")
            stopped = self._fit(run, train)
        self._update(stopped=stopped)
        mine = self.segments[-1]
        for text, count in mine["warnings"].items():
            self.options.say(f"warning ({count} times): {text}")
        self._pack()
        self.options.say(f"{self.job.name}: {stopped} after epoch {mine['last_epoch']}, {mine['seconds']:.0f} s")
        return stopped == "finished"

    def _take_weights(self) -> None:
        """Start with the weights of the job that this one goes on from, which is trained first if need be."""
        before = self.job.after
        if before is None or newest(self.folder):
            return
        if not Trainer(before, self.options).run():
            raise RunError(f"{before.name}, whose weights {self.job.name} starts with, is not finished; resume it")
        path = rundir.snapshot(self.options.runs / before.name, before.settings.epochs)
        self.net.load_state_dict(load_file(path))

    def _load(self, split: str) -> Images:
        return self.settings.load(split, self.options.data_dir).to(self.settings.torch_device)

    def _open(self) -> Run:
        """Return the run, a new one if there is none, with its records cut at its newest checkpoint."""
        is_new = not (self.folder / "settings.json").exists()
        run = Run.create(self.folder, self.settings) if is_new else Run.open(self.folder)
        latest = run.latest()
        done = 0 if latest is None else int(latest.state["epoch"])
        self.segments = rundir.resume(self.folder, done, self.settings.torch_device)
        self._update()
        name = self.segments[-1]["device"]
        self.options.say(f"{self.job.name}: {done} of {self.settings.epochs} epochs are done; {name}")
        return run

    def _fit(self, run: Run, train: Images) -> str:
        """Train, and return why it stopped."""
        given = {"augment": self.settings.augmentation(), "run": run, "on_epoch": self._after}
        validation = None if self.settings.whole else self._load("validation")
        try:
            history = fit(self.net, train, validation, self.settings, **given)  # type: ignore[arg-type]
        except OutOfTime:
            return "out of time"
        if not history.finished:
            return f"signal {history.stopped_by}"
        write_json(self.folder / rundir.FINAL, self.measure.final(self.settings.epochs))
        return "finished"

    def _after(self, epoch: Epoch) -> None:
        """Measure, record and pack after an epoch; its checkpoint is written when this returns or raises."""
        number = epoch.epoch
        self._measure(epoch)
        now = time.monotonic()
        self.epochs.append(now - self.last)  # with its measurements, and the checkpoint and the tar before it
        self.last = now
        self._update(last_epoch=number)
        if number == self.settings.epochs:
            return
        warm = self.epochs[1:] or self.epochs  # the first one includes starting up
        final = FINAL_SECONDS if number + 1 == self.settings.epochs else 0.0
        if max(warm) + final + RESERVE > self.options.left:
            raise OutOfTime
        if now - self.packed_at > PACK_EVERY:
            self._pack()

    def _measure(self, epoch: Epoch) -> None:
        """Record what is due after the epoch."""
        job, number = self.job, epoch.epoch
        if snapshot := job.takes_snapshot(number):
            rundir.write_snapshot(self.folder, self.net, job.name, number)
        if job.evaluates(number):
            point = self.measure.both(number)
            write_lines(self.folder / rundir.TEST, [point], append=True)
            clean, released = (point[name]["accuracy"] for name in ("clean", "released"))
            shown = f"loss {epoch.loss:.4f}, depth {epoch.depth or 0:.1f}, {epoch.seconds:.2f} s"
            self.options.say(f"{job.name} {number}: {shown}; test clean {clean:.2%}, released {released:.2%}")
        if snapshot or number % MONITOR_EVERY == 0:
            write_lines(self.folder / rundir.CONTRACTION, self.measure.contraction(number), append=True)

    def _update(self, **changes: Any) -> None:
        """Write what this process has done until now."""
        report = getattr(getattr(self.net, "backward", None), "report", None)
        self.segments[-1] |= changes | {
            "seconds": round(time.monotonic() - self.begun, 3),
            "warnings": Counter(str(warning.message)[:300] for warning in self.said),
            "counts": dict(report) if isinstance(report, Counter) else {},  # how adjoint equations ended
        }
        write_lines(self.folder / rundir.SEGMENTS, self.segments)

    def _pack(self) -> None:
        if self.options.pack is None:
            return
        files = pack(self.folder, self.options.pack)
        self.packed_at = time.monotonic()
        self.options.say("packed " + ", ".join(f"{f.name} ({f.stat().st_size / 2**20:.1f} MiB)" for f in files))
