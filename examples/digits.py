"""Train an implicit network on scikit-learn's digits: CPU, well under a minute, at least 98% on the test set.

    python examples/digits.py [--epochs 20] [--seed 0] [--out runs/digits]

Ends with a table and the path of a plot. The test set is read once, at the end.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from banach import JFB, ImplicitNetwork, Tolerance


class Q(nn.Module):
    """Data to latent: 1x8x8 grey images to 16x8x8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, d: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.conv(d)), 0.1)


class R(nn.Module):
    """Latent to latent: half a residual block of the sum of latent and data."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16, affine=False)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        x = u + v
        return 0.5 * self.norm(x + F.leaky_relu(self.conv(x), 0.1))


class S(nn.Sequential):
    """Latent to output: ten scores."""

    def __init__(self) -> None:
        super().__init__(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 16, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels: 1,437 to train on and 360 to test on, split the same way every time."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1 for x in split[:2])
    return train_x, torch.tensor(split[2]), test_x, torch.tensor(split[3])


def train(net: ImplicitNetwork, images: Tensor, labels: Tensor, epochs: int) -> list[dict[str, float]]:
    """Adam with a one-cycle rate; per epoch the mean loss, depth and residual."""
    batches = len(images) // 64
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=epochs * batches)
    history = []
    for epoch in range(1, epochs + 1):
        net.train()
        sums = torch.zeros(3)
        for index in torch.randperm(len(images))[: batches * 64].view(batches, 64):
            scores, found = net(images[index], solution=True)
            loss = F.cross_entropy(scores, labels[index], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            sums += torch.stack([loss.detach(), found.steps.float().mean(), found.residual.mean()])
        loss_, depth, residual = (sums / batches).tolist()
        history.append({"epoch": epoch, "loss": loss_, "depth": depth, "residual": residual})
        if epoch % 5 == 0 or epoch == epochs:
            print(
                f"epoch {epoch:3d}   loss {loss_:.3f}   depth {depth:4.1f}   residual {residual:.1e}", flush=True
            )
    return history


@torch.no_grad()
def evaluate(net: ImplicitNetwork, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy at the converged fixed point, with the depth and residual it took."""
    net.eval()
    scores, found = net(images, solution=True)
    return {
        "accuracy %": 100 * (scores.argmax(1) == labels).float().mean().item(),
        "mean depth": found.steps.float().mean().item(),
        "largest residual": found.residual.max().item(),
        "converged %": 100 * found.converged.float().mean().item(),
    }


def plot(history: list[dict[str, float]], path: Path) -> None:
    """Loss and depth against epochs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, key in zip(axes, ("loss", "depth"), strict=True):
        axis.plot([row["epoch"] for row in history], [row[key] for row in history])
        axis.set(xlabel="epoch", title=f"{key} while training")
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small: more threads cost more than they bring
    torch.manual_seed(options.seed)
    net = ImplicitNetwork(Q(), R(), S(), tolerance=Tolerance(atol=1e-3, max_steps=30), backward=JFB())
    count = sum(p.numel() for p in net.parameters())
    print(f"an implicit network of {count:,} parameters, trained by {net.backward} on 1,437 digits")
    train_x, train_y, test_x, test_y = digits()
    started = time.perf_counter()
    history = train(net, train_x, train_y, options.epochs)
    print(f"\ntrained in {time.perf_counter() - started:.0f} s; on 360 test images:")
    for name, value in evaluate(net, test_x, test_y).items():
        print(f"  {name:18s} {value:10.4g}")
    plot(history, options.out / "training.png")
    print(f"plot: {options.out / 'training.png'}")


if __name__ == "__main__":
    main()
