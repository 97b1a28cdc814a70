"""The same network, faster: plan() decides how, TrainStep trains, compile() predicts."""

from banach.fast.capture import unchanged
from banach.fast.inference import CompiledNetwork, compile
from banach.fast.network import FastNetwork, align_state, channels_last
from banach.fast.plan import Choice, Plan, plan
from banach.fast.step import Extras, TrainStep

__all__ = [
    "Choice", "CompiledNetwork", "Extras", "FastNetwork", "Plan", "TrainStep", "align_state", "channels_last",
    "compile", "plan", "unchanged",
]  # fmt: skip
