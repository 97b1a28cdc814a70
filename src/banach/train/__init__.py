"""Training: fit(), its settings, run directories and checkpoints."""

from banach.models import OneCycle
from banach.train.checkpoint import Checkpoint, CheckpointError, Position, read_checkpoint
from banach.train.evaluate import Scorer, evaluate
from banach.train.fit import fit
from banach.train.metrics import Epoch, History, Totals
from banach.train.run import DivergenceError, Run, RunError
from banach.train.settings import Settings
from banach.train.state import Average

__all__ = [
    "Average", "Checkpoint", "CheckpointError", "DivergenceError", "Epoch", "History", "OneCycle", "Position",
    "Run", "RunError", "Scorer", "Settings", "Totals", "evaluate", "fit", "read_checkpoint",
]  # fmt: skip
