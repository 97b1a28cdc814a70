"""The fast path: whole steps as one program that asks the host for nothing."""

from banach.fast.depth import DepthControl, Ladder
from banach.fast.fixed import FixedDepth, Reached
from banach.fast.fuse import wrapped
from banach.fast.graph import Graphs, unchanged
from banach.fast.inference import CompiledNetwork, compile
from banach.fast.layout import channels_side_by_side, prefers_channels_last
from banach.fast.programs import Programs, align_state, reset_optimizer
from banach.fast.starts import LinearStart, Neighbours
from banach.fast.training import TrainStep, first_control

__all__ = [
    "CompiledNetwork",
    "DepthControl",
    "FixedDepth",
    "Graphs",
    "Ladder",
    "LinearStart",
    "Neighbours",
    "Programs",
    "Reached",
    "TrainStep",
    "align_state",
    "channels_side_by_side",
    "compile",
    "first_control",
    "prefers_channels_last",
    "reset_optimizer",
    "unchanged",
    "wrapped",
]
