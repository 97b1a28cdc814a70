"""A transformer block as R, with a padding mask and dropout: is the largest symbol of a sequence even?

Q returns two tensors: embeddings, and which places hold a symbol. R reads both at every step. Padding changes no
answer: the same sequence gives the same scores in a longer batch. `banach.nn.Dropout` keeps one mask per pass,
so that the iteration has a fixed point in training mode as well.

    python -m examples.cookbook.masked_transformer
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from examples.cookbook.recipe import BLUE, GREEN, main, train
from matplotlib.figure import Figure
from torch import Tensor, nn

from banach import Euclidean, ImplicitNetwork, Tolerance
from banach.nn import Dropout, Scaled, scaled_dot_product_attention

SYMBOLS, LENGTH, WIDTH, HEADS, PAD = 10, 12, 32, 4, 10
Pair = tuple[Tensor, Tensor]


class Embed(nn.Module):
    """Q: tokens -> (embeddings, mask of the places that hold a symbol)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS + 1, WIDTH, padding_idx=PAD)

    def forward(self, tokens: Tensor) -> Pair:
        return self.embedding(tokens), tokens != PAD


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.first, self.second, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Dropout(0.05)

    def forward(self, u: Tensor, v: Pair) -> Tensor:
        data, real = v
        x = u + data
        q, k, w = self.qkv(x).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, w, attn_mask=real[:, None, None, :])
        x = self.first(x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))
        return self.second(x + self.mlp(x)) * real[:, :, None]


class Pool(nn.Module):
    """S: the sum over places, since padding holds zeros -> two scores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, u: Tensor) -> Tensor:
        return self.linear(u.sum(1) / LENGTH**0.5)


def sequences(count: int) -> Pair:
    """Return padded tokens of 3 to LENGTH symbols, and whether the largest one is even."""
    lengths = torch.randint(3, LENGTH + 1, (count, 1))
    tokens = torch.randint(SYMBOLS, (count, LENGTH))
    real = torch.arange(LENGTH) < lengths
    largest = tokens.where(real, torch.tensor(-1)).amax(1)
    return tokens.where(real, torch.tensor(PAD)), (largest % 2 == 0).long()


def run(quick: bool) -> tuple[dict[str, float], Figure]:
    tolerance = Tolerance(atol=2e-2, max_steps=100, norm=Euclidean())  # to which padding adds nothing
    net = ImplicitNetwork(
        Embed(), Scaled(Block(), 0.3), Pool(), tolerance=tolerance, start=lambda v: torch.zeros_like(v[0])
    )

    def loss() -> Tensor:
        tokens, even = sequences(128)
        return F.cross_entropy(net(tokens), even)

    losses = train(net.parameters(), loss, 3 if quick else 160, 3e-3)
    net.eval()
    tokens, even = sequences(500)
    net.tolerance = Tolerance(atol=2e-4, max_steps=200, norm=Euclidean())
    longer = F.pad(tokens, (0, 8), value=PAD)
    with torch.no_grad():
        scores, found = net(tokens, solution=True)
        change = (net(longer) - scores).abs().max().item()
    right = scores.argmax(1) == even
    lengths = (tokens != PAD).sum(1)

    figure, (left, second) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
    left.plot(losses, color=BLUE, linewidth=0.8)
    left.set(xlabel="training step", ylabel="loss", title=f"accuracy {right.double().mean():.1%}")
    places = range(3, LENGTH + 1)
    second.plot(places, [found.steps[lengths == n].double().mean() for n in places], "o-", color=GREEN)
    second.set(xlabel="length of the sequence", ylabel="mean evaluations of R", ylim=(0, None))
    numbers = {"accuracy": right.double().mean().item(), "change of scores by padding": change}
    return {**numbers, "mean steps": found.steps.double().mean().item()}, figure


if __name__ == "__main__":
    main(run)
