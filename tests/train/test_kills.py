"""A run that was killed at any of its file operations ends bit by bit as if it had not been.

As a script, `test_kills.py FOLDER FIRST STRIDE`, it kills a short run at every STRIDE-th file operation, resumes
it, compares, and prints JSON: how many operations there are, and after which one it went wrong.
"""

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from banach.train import Run, fit
from train.parts_train import figures, images, plain_network, settings, totals

ROOT = Path(__file__).resolve().parents[2]
MADE = settings(checkpoint_every=1, keep=1, ema=0.9)
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")


def train(path: Path) -> str:
    """Begin or resume the run, and return a digest of its weights and figures."""
    run = Run.open(path) if (path / "settings.json").exists() else Run.create(path, MADE)
    net = plain_network()
    history = fit(net, images(32), images(20, "validation"), MADE, run=run)
    if run.test() is None:
        run.write_test({"title": "", "count": 1, "totals": totals()})
    weights = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    return hashlib.sha256(weights + json.dumps([figures(history), run.test()]).encode()).hexdigest()


class Killer:
    """Counts the file operations of this process and kills it at number `last`."""

    def __init__(self, folder: Path, last: int) -> None:
        self.folder, self.last, self.count = str(folder), last, 0
        self.fsync = os.fsync
        os.fsync = self.sync  # type: ignore[assignment]
        sys.addaudithook(self.hook)

    def hook(self, event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and str(given[0]).startswith(self.folder) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in CHANGES:
            self.next()

    def sync(self, handle: int) -> None:
        """Half of a file is written when it is killed here."""
        found = os.fstat(handle)
        if self.count + 1 == self.last and stat.S_ISREG(found.st_mode):
            os.ftruncate(handle, found.st_size // 2)
        self.next()
        self.fsync(handle)

    def next(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(path: Path, last: int) -> tuple[int, str]:
    """Train in a forked process that is killed at an operation; return its status and the digest."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        killer = Killer(path, last)
        digest = train(path)
        os.write(writer, f"{digest} {killer.count}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    return os.waitpid(child, 0)[1], said


def main(folder: Path, first: int, stride: int) -> dict[str, Any]:
    digest = train(folder / "own")  # in this process: children inherit imports, data and the commit
    status, said = in_child(folder / "whole", -1)
    assert (status, said.split()[0]) == (0, digest)
    count, wrong = int(said.split()[1]), []
    for last in range(first, count + 1, stride):
        path = folder / f"killed-{last}"
        killed, _ = in_child(path, last)
        done, again = in_child(path, -1)
        left = [str(file) for file in path.rglob(".*") if file.name != ".lock"]
        if killed != signal.SIGKILL or done != 0 or again.split()[:1] != [digest] or left:
            wrong.append([last, killed, done, left])
    return {"operations": count, "wrong": wrong}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("first", "stride"), [(5, 17), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_a_kill_at_a_file_operation_loses_nothing(first: int, stride: int, tmp_path: Path) -> None:
    """The sample is every 17th operation; all of them are marked slow."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/train/test_kills.py"), str(tmp_path), str(first), str(stride)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["operations"] > 60


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
