"""python tests/random_kills.py [--kills N] [--out FILE]: kill training runs at random moments and resume them."""

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from banach.provenance import provenance, source_commit, write_json
from banach.train import Run, fit
from train.parts_train import images, network, settings

MADE = settings(checkpoint_every=1, ema=0.9)
TIMES = {"seconds", "warm_up"}  # what two equal runs need not share


def train(path: Path) -> None:
    """Begin the run, or resume it if it has begun: two epochs with batch norm, dropout and averaged weights."""
    run = Run.open(path) if (path / "settings.json").exists() else Run.create(path, MADE)
    fit(network(), images(64), images(20, "validation"), MADE, run=run)


def digest(path: Path) -> str:
    """Return a digest of all tensors of the last checkpoint, and of the epochs."""
    run = Run.open(path)
    last = run.latest()
    found = hashlib.sha256()
    for name, tensor in sorted(last.tensors.items()) if last else ():
        found.update(name.encode() + tensor.numpy().tobytes())
    epochs = [[pair for pair in epoch.to_dict().items() if pair[0] not in TIMES] for epoch in run.metrics()]
    found.update(repr(epochs).encode())
    return found.hexdigest()


def in_child(path: Path) -> int:
    """Train in a forked process, which has imported everything; return its number."""
    child = os.fork()
    if child == 0:
        try:
            train(path)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    return child


def killed(child: int, seconds: float) -> bool:
    """Kill a process after so many seconds; return False if it ended before that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def kills_of(path: Path, draw: random.Random, length: float) -> int:
    """Train, kill the process at random moments and resume it, at most five times; return the number of kills."""
    for kills in range(5):
        if not killed(in_child(path), draw.uniform(0, length)):
            return kills
    os.waitpid(in_child(path), 0)
    return 5


def measure(folder: Path, wanted: int) -> dict[str, Any]:
    """Kill runs so many times in all, and compare the end of each with that of a run that was left alone."""
    draw, wrong, kills, runs = random.Random(0), [], 0, 0
    train(folder / "own")  # in this process: children inherit imports and data
    start = time.perf_counter()
    os.waitpid(in_child(folder / "alone"), 0)
    length, expected = time.perf_counter() - start, digest(folder / "own")
    assert digest(folder / "alone") == expected
    while kills < wanted:
        runs += 1
        kills += kills_of(folder / f"{runs}", draw, length)
        if digest(folder / f"{runs}") != expected:
            wrong.append(runs)
        print(f"{kills} kills, {runs} runs, wrong: {wrong}", flush=True)
    return {"kills": kills, "runs": runs, "equal": runs - len(wrong), "wrong": wrong, "run_seconds": length}


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
    write_json(chosen.out, {**found, **provenance(MADE)})
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
