"""The same network, faster: plan() decides how, TrainStep trains, compile() predicts."""

from banach.fast.body import FastNetwork
from banach.fast.capture import unchanged
from banach.fast.inference import CompiledNetwork, compile
from banach.fast.plan import Choice, Plan, plan
from banach.fast.step import Extras, TrainStep
from banach.fast.weights import align_state, channels_last

__all__ = [
    "Choice",
    "CompiledNetwork",
    "Extras",
    "FastNetwork",
    "Plan",
    "TrainStep",
    "align_state",
    "channels_last",
    "compile",
    "plan",
    "unchanged",
]
