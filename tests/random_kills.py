"""python tests/random_kills.py [--kills N] [--out FILE]: kill training runs at random moments and resume them."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from banach.cli.app import main as banach
from banach.provenance import provenance, source_commit, write_json
from banach.train import Run

COMMAND = ["train", "--subset", "64", "--batch-size", "8", "--epochs", "2", "--checkpoint-every", "3"]
COMMAND += ["--ema", "0.9", "--device", "cpu", "--no-tensorboard", "--no-monitor"]
TIMES = {"seconds", "warm_up"}  # what two equal runs need not share


def train(path: Path) -> int:
    """Begin the run, or resume it if it has begun, in a forked process; return the process."""
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        begun = (path / "settings.json").exists()
        os._exit(banach(["train", "--resume", str(path)] if begun else [*COMMAND, "--out", str(path)]))
    return child


def digest(path: Path) -> str:
    """Return a digest of all tensors of the last checkpoint, of the epochs and of the test."""
    run = Run.open(path)
    last, test = run.latest(), run.test()
    if last is None or test is None:
        return "not finished"
    found = hashlib.sha256()
    for name in sorted(last.tensors):
        found.update(name.encode() + last.tensors[name].numpy().tobytes())
    epochs = [[pair for pair in epoch.to_dict().items() if pair[0] not in TIMES] for epoch in run.metrics()]
    found.update(repr((epochs, test["totals"])).encode())
    return found.hexdigest()


def ended(child: int) -> int:
    """Wait for a process and return its status."""
    return os.waitpid(child, 0)[1]


def kill_one(path: Path, seconds: float) -> bool:
    """Train, kill after so many seconds, and resume; return True if the run had not ended before the kill."""
    child = train(path)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    met = ended(child) == signal.SIGKILL
    ended(train(path))
    return met


def measure(folder: Path, kills: int) -> dict[str, Any]:
    """Kill so many runs at random moments of a whole run's time, and compare their ends with that of the whole."""
    draw, wrong, killed, runs = random.Random(0), [], 0, 0
    banach([*COMMAND, "--out", str(folder / "own")])  # in this process: children inherit what it has imported
    start = time.perf_counter()
    ended(train(folder / "whole"))
    length, expected = time.perf_counter() - start, digest(folder / "whole")
    assert expected == digest(folder / "own")
    while killed < kills:
        runs += 1
        moment, path = draw.uniform(0, length), folder / f"run-{runs}"
        killed += kill_one(path, moment)
        if digest(path) != expected:
            wrong.append({"run": runs, "seconds": moment})
        print(f"{killed} kills, {len(wrong)} wrong", end="\r", flush=True)
    return {"kills": killed, "runs": runs, "equal": runs - len(wrong), "wrong": wrong, "run_seconds": length}


def main() -> int:
    """Measure, write a JSON file, and return 1 if a run ended differently."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("results/kills.json"))
    chosen = parser.parse_args()
    source_commit()  # before anything is written, which would make the tree dirty
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), chosen.kills)
    print(found)
    write_json(chosen.out, {**found, **provenance({"command": COMMAND})})
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
