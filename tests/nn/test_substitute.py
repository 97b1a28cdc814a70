"""substitute(): other tensors or layers in a module, everything else shared."""

from typing import Any

import torch
from torch import nn

from banach.nn import substitute


def test_everything_is_shared_but_what_is_replaced() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh())
    weight = nn.Parameter(torch.eye(2))
    tanh = nn.ReLU()
    made: Any = substitute(module, {module[0].weight: weight, module[2]: tanh})
    assert made is not module
    assert made[0].weight is weight
    assert made[0].bias is module[0].bias
    assert made[1].running_mean is module[1].running_mean
    assert made[2] is tanh
    assert isinstance(module[2], nn.Tanh)
    made[1].track_running_stats = False
    assert module[1].track_running_stats


def test_shared_layers_the_module_itself_and_a_function() -> None:
    layer, instead = nn.Linear(2, 2), nn.Identity()
    made: Any = substitute(nn.ModuleList([layer, nn.Sequential(layer)]), {layer: instead})
    assert made[0] is made[1][0] is instead
    assert substitute(layer, {layer: instead}) is instead
    assert substitute(torch.tanh) is torch.tanh
    layer.derived = 2 * layer.weight  # has a graph, so it cannot be copied
    assert substitute(layer).derived is layer.derived
