"""The implicit model of El Ghaoui et al. (2021): x = relu(A x + B d), y = C x, well-posed since |A|_inf < 1.

After every step of the optimizer the rows of A are projected onto an l1 ball. So R contracts in the maximum norm,
whatever the data, and Picard's iteration needs about log(tolerance / r) / log(bound) steps at
most, r its first residual.

python examples/infinity_norm.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import JFB, ImplicitNetwork, Tolerance

BOUND = 0.95


@torch.no_grad()
def project_rows_(weight: Tensor, bound: float) -> Tensor:
    """Replace each row by the nearest one whose absolute values sum to at most `bound`; in place.

    Then |weight|_inf, the largest such sum, is at most `bound`. The nearest row has the old entries, moved towards
    zero by one threshold, which sorting finds. (Duchi et al. 2008.)
    """
    sizes = weight.abs()
    ordered = sizes.sort(1, descending=True).values
    count = torch.arange(1, weight.shape[1] + 1, dtype=weight.dtype, device=weight.device)
    thresholds = (ordered.cumsum(1) - bound) / count
    last = (ordered > thresholds).sum(1, keepdim=True) - 1
    shrunk = weight.sign() * (sizes - thresholds.gather(1, last)).clamp(min=0)
    return weight.copy_(torch.where(sizes.sum(1, keepdim=True) > bound, shrunk, weight))


class Layer(nn.Module):
    """R(x, v) = relu(A x + v)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.A = nn.Parameter(0.3 * torch.randn(width, width))
        project_rows_(self.A, BOUND)

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        return torch.relu(x @ self.A.T + v)


def implicit_model(inputs: int, width: int, outputs: int) -> ImplicitNetwork:
    """Return the model. S is linear."""
    return ImplicitNetwork(
        nn.Linear(inputs, width),
        Layer(width),
        nn.Linear(width, outputs, bias=False),
        tolerance=Tolerance(atol=1e-5, max_steps=400),
        backward=JFB(),
    )


def rings(count: int) -> tuple[Tensor, Tensor]:
    """Points in the plane, labelled by which of three rings they are in."""
    radius = 3 * torch.rand(count)
    angle = 6.2832 * torch.rand(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), radius.long()


def train(steps: int = 400) -> tuple[ImplicitNetwork, float]:
    """Return the trained model and its accuracy on new points."""
    torch.manual_seed(0)
    net = implicit_model(2, 40, 3)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        d, labels = rings(128)
        loss = F.cross_entropy(net(d), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        project_rows_(net.R.A, BOUND)
    d, labels = rings(2000)
    with torch.no_grad():
        right = net(d).argmax(1) == labels
    return net, float(right.double().mean())


def main() -> None:
    torch.set_num_threads(1)
    net, accuracy = train()
    with torch.no_grad():
        _, found = net(rings(2000)[0], solution=True)
        norm = float(net.R.A.abs().sum(1).max())
    print(f"accuracy {accuracy:.1%} with |A|_inf = {norm:.3f}")
    print(f"evaluations: at most {int(found.steps.max())}, converged {found.converged.double().mean():.0%}")


if __name__ == "__main__":
    main()
