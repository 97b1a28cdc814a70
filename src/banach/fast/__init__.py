"""The same network, faster: plan() decides how, TrainStep trains, compile() predicts."""

from banach.fast.body import FixedDepth, first_control
from banach.fast.capture import unchanged
from banach.fast.depth import DepthControl, Ladder
from banach.fast.inference import CompiledNetwork, compile
from banach.fast.plan import Choice, Plan, plan
from banach.fast.starts import LinearStart, Neighbours
from banach.fast.step import Extras, TrainStep
from banach.fast.weights import align_state, channels_last
from banach.solve import Solution

__all__ = [
    "Choice",
    "CompiledNetwork",
    "DepthControl",
    "Extras",
    "FixedDepth",
    "Ladder",
    "LinearStart",
    "Neighbours",
    "Plan",
    "TrainStep",
    "align_state",
    "channels_last",
    "compile",
    "first_control",
    "plan",
    "unchanged",
]

Reached = Solution  # TODO(merge): old name
channels_side_by_side = channels_last  # TODO(merge): old name


def prefers_channels_last(net, precision):  # type: ignore[no-untyped-def]  # TODO(merge): plan(...).channels_last
    return bool(plan(net, precision=precision).channels_last)
