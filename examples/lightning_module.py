"""An implicit network in Lightning: regression, with the depth of the solves in the progress bar.

pip install lightning; python examples/lightning_module.py
"""

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from banach import ImplicitNetwork
from banach.nn import TwoStream


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        R = TwoStream.linear(32, gamma=0.5, layers=(1, 0, 1), activation=nn.Tanh)
        self.net = ImplicitNetwork(nn.Linear(1, 32), R, nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        output, found = self.net(x, solution=True)
        loss = F.mse_loss(output, y)
        self.log_dict({"loss": loss, "steps": found.steps.float().mean()}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def main() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 256)[:, None]
    data = DataLoader(TensorDataset(x, torch.sin(3 * x)), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(max_epochs=20, devices=1, logger=False, enable_checkpointing=False)
    trainer.fit(Regression(), data)
    print(f"loss: {trainer.callback_metrics['loss']:.5f}")


if __name__ == "__main__":
    main()
