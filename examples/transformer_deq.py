"""A deep equilibrium model for sequences: one transformer block, repeated until it settles, and S the identity.

The network learns to reverse a sequence of symbols. Its output is the fixed point itself; the loss compares it
with the embeddings of the symbols.

python examples/transformer_deq.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import JFB, Anderson, ImplicitNetwork, Tolerance
from banach.nn import Scaled, convert_dropout

SYMBOLS, LENGTH, WIDTH = 8, 6, 32


class Embedding(nn.Module):
    """Q: symbols -> symbol embeddings plus position embeddings, (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.symbol(tokens) + self.position


class Block(nn.Module):
    """A transformer block of u + v: the data v is added at every repetition."""

    def __init__(self, dropout: float = 0.05) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout, batch_first=True)
        self.layer = convert_dropout(layer)  # one mask per pass

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.layer(u + v)


def transformer_deq() -> ImplicitNetwork:
    """Return the network. Layer norm fixes the size of the block's output; scaled by 1/2, v outweighs u."""
    return ImplicitNetwork(
        Embedding(),
        Scaled(Block(), 0.5),
        nn.Identity(),
        solver=Anderson(memory=5),
        tolerance=Tolerance(atol=1e-3, max_steps=40),
        backward=JFB(),
    )


def scores(net: ImplicitNetwork, tokens: Tensor) -> Tensor:
    """Return how well the fixed point agrees with each symbol, (batch, length, symbols)."""
    return net(tokens) @ net.Q.symbol.weight.T


def train(steps: int = 300) -> tuple[ImplicitNetwork, float]:
    """Return the trained network and the share of symbols that it gets right on new sequences."""
    torch.manual_seed(0)
    net = transformer_deq()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(steps):
        tokens = torch.randint(SYMBOLS, (64, LENGTH))
        loss = F.cross_entropy(scores(net, tokens).flatten(0, 1), tokens.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokens = torch.randint(SYMBOLS, (256, LENGTH))
    with torch.no_grad():
        right = scores(net.eval(), tokens).argmax(2) == tokens.flip(1)
    return net, float(right.double().mean())


def main() -> None:
    torch.set_num_threads(1)
    net, accuracy = train()
    with torch.no_grad():
        u, found = net(torch.randint(SYMBOLS, (256, LENGTH)), solution=True)
    print(f"symbols right: {accuracy:.1%}; the output is the fixed point, {tuple(u.shape)}")
    print(f"evaluations: mean {found.steps.double().mean():.1f}, converged {found.converged.double().mean():.0%}")


if __name__ == "__main__":
    main()
