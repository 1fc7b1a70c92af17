"""A digit classifier with Lightning that two terminals, or two machines, train together.

First terminal:   python examples/lightning_digits.py
Second terminal:  python examples/lightning_digits.py ADDRESS      (the address that the first one prints)

A LightningModule needs no change: only the Trainer gets a strategy. The second one takes over the state of the first,
and from then on both do half of the work, until you stop them with Ctrl-C. Needs Lightning, and scikit-learn for the
data. In the folder of this source: pip install '.[lightning,examples]'
"""

import contextlib
import sys
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

try:
    import lightning
    from lightning.pytorch.loggers import CSVLogger
    from sklearn.datasets import load_digits

    from shoal.lightning import HivemindStrategy
except ModuleNotFoundError as error:
    sys.exit(f"{error}. In the folder of shoal's source: pip install '.[lightning,examples]'")

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


class Tell(lightning.Callback):
    """Says how it goes, a line every two seconds."""

    began, last = time.monotonic(), None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now, progress = time.monotonic(), trainer.strategy.swarm_progress()
        if self.last is None or now > self.last + 2:
            self.last = now
            told = "step {global_epoch:.0f}, peers: {peers:.0f}, this one {samples/s:,.0f} samples/s"
            loss = float(outputs["loss"])
            print(f"{now - self.began:.0f} s: {told.format(**progress)}, loss {loss:.3f}", flush=True)


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
training, validation = random_split(
    TensorDataset(images, torch.tensor(digits.target)), [1500, 297], torch.Generator().manual_seed(0)
)

strategy = HivemindStrategy(
    run_id="lightning_digits",  # peers with the same name train together
    target_batch_size=2048,  # samples that all peers together gather for one step, which moves the learning rate, too
    matchmaking_time=2.0,  # seconds to wait for peers that are late
    initial_peers=sys.argv[1:],  # none: this peer begins the run
)
print("Others join with: python examples/lightning_digits.py", strategy.dht.address, flush=True)
logger = CSVLogger(".")  # writes lightning_logs/version_0/metrics.csv
trainer = lightning.Trainer(
    strategy=strategy,
    logger=logger,
    callbacks=[Tell()],
    max_epochs=-1,  # until it is stopped
    enable_progress_bar=False,
    enable_checkpointing=False,
    accelerator="cpu",
    devices=1,
)
with contextlib.suppress(KeyboardInterrupt, SystemExit):  # Ctrl-C; Lightning then ends the program
    trainer.fit(
        Classifier(),
        DataLoader(training, batch_size=32, shuffle=True),  # every peer shuffles in its own way
        DataLoader(validation, batch_size=297),
    )
print("Stopped. The others carry on.")  # the end of fit() has told them
