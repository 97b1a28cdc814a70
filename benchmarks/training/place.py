"""Where a training benchmark finds its data and keeps its runs, and how it calls the command line."""

from __future__ import annotations

import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from banach.cli.app import main
from banach.train import Run
from benchmarks.report import Row


@dataclass(frozen=True)
class Place:
    """`device` and folders of a benchmark."""

    data_dir: Path | None = None
    device: str = "auto"
    runs: Path = Path("runs/benchmarks")

    def train(self, name: str, *flags: str) -> Row:
        """`banach train` with these flags in a fresh run directory: its figures, and the command itself."""
        path = self.runs / name
        shutil.rmtree(path, ignore_errors=True)
        command = ["train", *flags, "--device", self.device, "--out", str(path)]
        if self.data_dir is not None:
            command += ["--data-dir", str(self.data_dir)]
        started = time.perf_counter()
        code = main(command)
        seconds = time.perf_counter() - started
        if code != 0:
            raise SystemExit(f"banach {' '.join(command)} ended with exit code {code}")
        return self.figures(path, shlex.join(["banach", *command]), seconds)

    def figures(self, path: Path, command: str, seconds: float) -> Row:
        run = Run.open(path)
        tested, epochs = run.test(), run.metrics()
        assert tested is not None
        return {
            "command": command,
            "data": tested["title"],
            "test": tested["totals"]["accuracy"],
            "validation": epochs[-1].validation_accuracy,
            "test residual": tested["totals"]["residual"],
            "test converged": tested["totals"]["converged"],
            "test depth": tested["totals"]["depth"],
            "seconds": seconds,
            "seconds per epoch": sum(epoch.seconds for epoch in epochs) / len(epochs),
            "epochs": [epoch.to_dict() for epoch in epochs],
            "settings": run.settings.to_dict(),
        }
