"""Training: fit(), its settings, run directories and checkpoints."""

from banach.train.average import Average
from banach.train.checkpoint import Checkpoint, CheckpointError, Position, read_checkpoint
from banach.train.evaluate import Scorer, evaluate
from banach.train.fit import fit
from banach.train.history import Epoch, History
from banach.train.run import Run, RunError
from banach.train.schedule import OneCycle
from banach.train.settings import Settings
from banach.train.tally import Totals

__all__ = [
    "Average",
    "Checkpoint",
    "CheckpointError",
    "Epoch",
    "History",
    "OneCycle",
    "Position",
    "Run",
    "RunError",
    "Scorer",
    "Settings",
    "Totals",
    "evaluate",
    "fit",
    "read_checkpoint",
]
