"""substitute(): other tensors or layers in a module, everything else shared."""

from typing import Any

import torch
from torch import nn

from banach.nn import substitute


def test_everything_is_shared_but_what_is_replaced() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh())
    module.again = module[2]
    module.derived = 2 * module[0].weight  # has a graph, so it cannot be copied
    weight, instead = nn.Parameter(torch.eye(2)), nn.ReLU()
    made: Any = substitute(module, {module[0].weight: weight, module[2]: instead})
    assert made[0].weight is weight
    assert made[0].bias is module[0].bias
    assert made[1].running_mean is module[1].running_mean
    assert made[2] is made.again is instead
    assert made.derived is module.derived
    made[1].track_running_stats = False
    assert module[1].track_running_stats
    assert isinstance(module[2], nn.Tanh)


def test_the_module_itself_and_a_function() -> None:
    layer, instead = nn.Linear(2, 2), nn.Identity()
    assert substitute(layer, {layer: instead}) is instead
    assert substitute(torch.tanh) is torch.tanh
