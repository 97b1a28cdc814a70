"""What each of two processes does in the test of DistributedDataParallel; a module, so that it can be spawned."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from banach.fast import plan
from banach.fast.network import run_network
from networks import conv_network, images


def train_in_a_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),  # a process that waits for one that died ends, and says so
    )
    net = torch.nn.parallel.DistributedDataParallel(conv_network(dropout=0.0))
    half = images(6)[3 * rank : 3 * rank + 3]
    output, found = run_network(net, (half,))
    assert found is not None
    assert found.converged.all()
    assert plan(net, "cuda").graph.why.startswith("DistributedDataParallel exchanges tensors between devices")
    output.square().mean().backward()
    if rank == 0:
        torch.save([p.grad for p in net.module.parameters()], f"{folder}/gradients.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # no threads of the group are joined: that has been seen to hang
