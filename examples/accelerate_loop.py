"""An implicit network in a training loop with accelerate: on one device or several, in any precision.

pip install accelerate; python examples/accelerate_loop.py, or accelerate launch examples/accelerate_loop.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from banach import ImplicitNetwork
from banach.nn import TwoStream


def main() -> None:
    torch.manual_seed(0)
    R = TwoStream.linear(32, gamma=0.5, layers=(1, 0, 1), activation=nn.Tanh)
    net = ImplicitNetwork(nn.Linear(1, 32), R, nn.Linear(32, 1))
    x = torch.linspace(-1, 1, 256)[:, None]
    data = DataLoader(TensorDataset(x, torch.sin(3 * x)), batch_size=32, shuffle=True)
    accelerator = Accelerator()
    net, optimizer, data = accelerator.prepare(net, torch.optim.Adam(net.parameters(), 1e-2), data)
    for _ in range(20):
        for x, y in data:
            output, found = net(x, solution=True)
            loss = F.mse_loss(output, y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    accelerator.print(f"loss: {loss.item():.5f}, {found.steps.float().mean():.1f} steps")


if __name__ == "__main__":
    main()
