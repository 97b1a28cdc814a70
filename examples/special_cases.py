"""The architectures that the paper's formulation N(d) = S(u*), u* = R(u*, Q(d)) contains, each in a few lines.

python examples/special_cases.py
"""

import torch
from torch import Tensor, nn

from banach import Implicit, ImplicitNetwork, Tolerance


class Layer(nn.Module):
    """R(u, v) = tanh(W u + v), W scaled to spectral norm .8, so that R contracts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.randn(width, width)
        self.weight = nn.Parameter(0.8 * weight / torch.linalg.matrix_norm(weight, 2))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(u @ self.weight.T + v)


def main() -> None:
    torch.manual_seed(0)
    d = torch.randn(4, 8)
    Q, R, S = nn.Linear(8, 16), Layer(16), nn.Linear(16, 3, bias=False)
    tight = Tolerance(atol=1e-6, max_steps=200)

    deq = ImplicitNetwork(Q, R, nn.Identity(), tolerance=tight, backward=Implicit())
    print("DEQ (S is the identity): the output is the fixed point,", end=" ")
    u = deq(d)
    print(f"|u - R(u, Q(d))| = {(u - R(u, Q(d))).norm():.1e}")

    linear = ImplicitNetwork(Q, R, S, tolerance=tight)
    y, found = linear(d, solution=True)
    print(f"implicit model with linear S: output {tuple(y.shape)} after {found.steps.tolist()} steps per sample")

    twin = ImplicitNetwork(Q, R, S, tolerance=Tolerance(max_steps=0))
    v = Q(d)
    same = torch.equal(twin(d), S(R(torch.zeros_like(v), v)))
    print(f"explicit twin (max_steps=0) equals S(R(0, Q(d))): {same}")

    feedforward = ImplicitNetwork(Q, lambda u, v: v, S)
    print(f"R(u, v) = v gives the feedforward network S(Q(d)): {torch.equal(feedforward(d), S(Q(d)))}")


if __name__ == "__main__":
    main()
