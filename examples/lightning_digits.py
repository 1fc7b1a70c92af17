"""A digit classifier with Lightning that two terminals, or two machines, train together.

First terminal:   python examples/lightning_digits.py
Second terminal:  the line with PL_INITIAL_PEERS=... that the first one prints

A LightningModule needs no change: only the Trainer gets a strategy. Start the second one while the first trains: it
takes over the first one's state, and from then on both do half of the work. Needs Lightning, and scikit-learn for the
data: pip install 'shoal[lightning,examples]'
"""

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from shoal.lightning import HivemindStrategy

torch.set_num_threads(1)  # the model is tiny, and the peers may share one machine


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)]


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
training, validation = random_split(
    TensorDataset(images, torch.tensor(digits.target)), [1500, 297], torch.Generator().manual_seed(0)
)

strategy = HivemindStrategy(
    run_id="lightning_digits",  # peers with the same name train together
    target_batch_size=2048,  # samples that all peers together gather for one step, which moves the learning rate, too
    matchmaking_time=2.0,  # seconds to wait for peers that are late
)
logger = CSVLogger(".")  # writes lightning_logs/version_0/metrics.csv
trainer = lightning.Trainer(strategy=strategy, logger=logger, max_epochs=100, accelerator="cpu", devices=1)
trainer.fit(
    Classifier(),
    DataLoader(training, batch_size=32, shuffle=True),  # every peer shuffles in its own way
    DataLoader(validation, batch_size=297),
)
