"""The authors' SVHN weights give the accuracy of their log in our network, by the clean protocol.

Weights with logs of test accuracies until the best epoch are in their repository (SOURCE). Copy them to the folder
jfb-weights of --data-dir. MNIST's are of another network, with one block in R; CIFAR-10's are not looked at.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from banach import data, models
from banach.diagnose import measure_contraction
from banach.train import Scorer, evaluate
from reproduction.measure import BATCH, WATCHED, released
from reproduction.study import Options, store, table

RECORDS = "authors.jsonl"
SOURCE = "commit b35a245 of github.com/Typal-Research/jacobian_free_backprop, folder trained_networks"
FILES = {"jfb": "SVHN_FPN_weights_94.12.pth", "twin": "SVHN_FPN_Explicit_weights_93.89.pth"}
NAMES = (  # of the authors' parameters -> ours
    (r"^latent_convs\.0\.0", "R.blocks.0.conv1"),
    (r"^latent_convs\.0\.3", "R.blocks.0.conv2"),
    (r"^lat_batch_norm\.0", "R.blocks.0.norm"),
    (r"^layer([123])\.0\.conv_d", lambda m: f"Q.blocks.{int(m[1]) - 1}.conv"),
    (r"^layer([123])\.0\.bn", lambda m: f"Q.blocks.{int(m[1]) - 1}.norm"),
    (r"^conv1", "Q.conv"),
    (r"^bn1", "Q.norm"),
    (r"^conv_y", "S.conv"),
    (r"^fc_y", "S.linear"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One file: its log, and what we measure. `sigma` and `rate` are of training images, empty for the twin."""

    kind: str
    file: str
    sha256: str
    log_epoch: int
    log_best: float
    images: int
    clean: float
    released: float
    depth: float | None
    sigma: tuple[float, ...]
    rate: tuple[float, ...]


def run(options: Options) -> list[Row]:
    """Test the weights on all test images; minutes on a CPU. There are none for digits."""
    if options.quick:
        return []
    folder = (options.data_dir or Path()) / "jfb-weights"
    rows = [_measure(kind, folder / name, options) for kind, name in FILES.items()]
    store(options.records / RECORDS, rows)
    return rows


def _measure(kind: str, path: Path, options: Options) -> Row:
    if not path.exists():
        raise ValueError(f"expected the authors' weights at {path}; copy them from {SOURCE}")
    state, log = load(path)
    net = models.build("svhn", explicit=kind == "twin")
    net.load_state_dict(state)
    test, few = data.load("svhn", "test", options.data_dir), data.load("svhn", "train", options.data_dir)
    scorer, few = Scorer(net.eval()), few.take(range(WATCHED))
    clean = evaluate(net, test, batch_size=BATCH, scorer=scorer)
    found = measure_contraction(net, few.normalise(few.pixels), rtol=1e-3, seed=0) if kind == "jfb" else None
    best, sha256 = max(log), hashlib.sha256(path.read_bytes()).hexdigest()
    return Row(
        kind=kind,
        file=path.name,
        sha256=sha256,
        log_epoch=1 + log.index(best),
        log_best=best,
        images=len(test),
        clean=100 * (clean.accuracy or 0.0),
        released=100 * (released(net, test, scorer).accuracy or 0.0),
        depth=clean.depth,
        sigma=tuple(found.sigma.tolist()) if found else (),
        rate=tuple(found.rate.tolist()) if found else (),
    )


def load(path: Path) -> tuple[dict[str, Any], list[float]]:
    """Return the weights of a file by our names, and the test accuracies of its log, in percent."""
    parts: list[Any] = [
        torch.optim.Adam,
        torch.optim.lr_scheduler.StepLR,
        dict,
        (lambda *_: {}, "collections.defaultdict"),
    ]
    with torch.serialization.safe_globals(parts):  # the scheduler is in the file
        kept = torch.load(path, map_location="cpu", weights_only=True)
    state = {}
    for name, value in kept["net_state_dict"].items():
        if not name.startswith("bn_"):  # two norms that are never called
            pattern, ours = next((p, new) for p, new in NAMES if re.match(p, name))
            state[re.sub(pattern, ours, name)] = value
    return state, kept["test_acc_hist"]


def values(rows: Sequence[Row]) -> dict[str, Any]:
    """Return accuracies by kind, their difference, how many images violate the contraction, and the table."""
    found: dict[str, Any] = {}
    lines = []
    for row in rows:
        sigma, rate = (f"{min(x):.2f} to {max(x):.2f}" if x else None for x in (row.sigma, row.rate))
        log = row.log_epoch, f"{row.log_best:.4f}"
        lines.append((row.file, *log, f"{row.clean:.4f}", f"{row.released:.2f}", row.depth, sigma, rate))
        found |= {f"{row.kind}.clean": row.clean, f"{row.kind}.epoch": row.log_epoch, f"{row.kind}.sigma": sigma}
        found[f"{row.kind}.violations"] = f"{sum(x >= 1 for x in row.sigma)} of {len(row.sigma)}"
    if rows:
        found["gain"] = found["jfb.clean"] - found["twin.clean"]
    columns = "weights|log: best epoch|log: best %|clean %|training mode, %|evaluations|sigma_max|observed rate"
    return found | {"table": table(lines, columns)}
