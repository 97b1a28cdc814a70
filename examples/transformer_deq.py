"""A deep equilibrium model for sequences: one transformer block, repeated until it settles, and S the identity.

The network reads symbols and repeats them in reverse order: at every later place it predicts the next symbol from
those before it. Its output is the fixed point itself; the loss compares it with the embeddings of the symbols.

What makes a transformer block fast as R:
- Attention by `scaled_dot_product_attention` with `is_causal`: under bf16 on a GPU this is flash attention. A mask
  tensor (`attn_mask=`), or dropout of the attention weights, works too, by slower kernels.
- Dropout by `banach.nn.Dropout`: one mask per pass, so that the iteration has a fixed point.
- On a GPU, `TrainStep(..., bf16=True, compile=True)` and `banach.compile(net, bf16=True, compile=True)`: weights
  are cast to bf16 once per step, R is compiled, and the loop is a while node of a CUDA graph.

python examples/transformer_deq.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import banach
from banach import JFB, Anderson, ImplicitNetwork, Tolerance
from banach.fast import TrainStep
from banach.nn import Dropout, Scaled, scaled_dot_product_attention

SYMBOLS, READ, WIDTH, HEADS = 8, 4, 32, 4
LENGTH = 2 * READ - 1  # what is read, and all of its reverse but the last symbol


class Embedding(nn.Module):
    """Q: symbols -> symbol embeddings plus position embeddings, (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.symbol(tokens) + self.position


class Block(nn.Module):
    """A transformer block of u + v, with layer norm last: the data v is added at every repetition."""

    def __init__(self, dropout: float = 0.05) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.drop_first, self.drop_second = Dropout(dropout), Dropout(dropout)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        x = u + v
        q, k, w = self.qkv(x).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, w, is_causal=True).transpose(1, 2).flatten(2)
        x = self.first(x + self.drop_first(self.out(attended)))
        return self.second(x + self.drop_second(self.down(F.gelu(self.up(x)))))


def transformer_deq() -> ImplicitNetwork:
    """Return the network. Layer norm fixes the size of the block's output; scaled by 0.35, v outweighs u."""
    return ImplicitNetwork(
        Embedding(),
        Scaled(Block(), 0.35),
        nn.Identity(),
        solver=Anderson(memory=5),
        tolerance=Tolerance(atol=1e-3, max_steps=40),
        backward=JFB(),
    )


def sequences(count: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return random symbols with their reverse, except the last symbol; and the symbols to predict."""
    symbols = torch.randint(SYMBOLS, (count, READ), device=device)
    both = torch.cat((symbols, symbols.flip(1)), 1)
    return both[:, :-1], both[:, READ:]


def scores(net: ImplicitNetwork, u: Tensor) -> Tensor:
    """Return how well the fixed point agrees with each symbol at the last READ places."""
    return u[:, READ - 1 :] @ net.Q.symbol.weight.T


def training_step(net: ImplicitNetwork) -> Callable[[Tensor, Tensor], Tensor]:
    """Return step(tokens, targets) -> loss: captured and compiled on a GPU, eager on a CPU."""

    def loss(u: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores(net, u).flatten(0, 1), targets.flatten())

    if next(net.parameters()).is_cuda:
        fast = torch.optim.Adam(net.parameters(), 3e-3, fused=True, capturable=True)
        return TrainStep(net, fast, loss, bf16=True, compile=True)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(net(tokens), targets)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def train(steps: int = 300, device: torch.device | str = "cpu") -> tuple[ImplicitNetwork, float]:
    """Return the trained network and the share of symbols that it gets right on new sequences."""
    torch.manual_seed(0)
    net = transformer_deq().to(device)
    step = training_step(net)
    for _ in range(steps):
        step(*sequences(64, device))
    tokens, targets = sequences(256, device)
    with torch.no_grad():
        right = scores(net, net.eval()(tokens)).argmax(2) == targets
    return net, float(right.double().mean())


def main() -> None:
    torch.set_num_threads(1)
    net, accuracy = train(device="cuda") if torch.cuda.is_available() else train()
    device = next(net.parameters()).device
    fast = banach.compile(net, bf16=device.type == "cuda", compile=device.type == "cuda")
    u, found = fast(sequences(256, device)[0], solution=True)
    print(fast.plan)
    print(f"symbols right: {accuracy:.1%}; the output is the fixed point, {tuple(u.shape)}")
    print(f"evaluations: mean {found.steps.double().mean():.1f}, converged {found.converged.double().mean():.0%}")


if __name__ == "__main__":
    main()
