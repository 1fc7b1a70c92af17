"""Two terminals, or two machines, one model: a digit classifier that peers train together.

First one:   python examples/quickstart.py
Second one:  python examples/quickstart.py ADDRESS      (the address that the first one prints)

The second starts where the first one is, and from then on both do half of the work: twice the samples per second. Each
pauses after every batch, as a peer on another machine would compute; otherwise two peers on one machine would compete
for its cores. They train until you stop them with Ctrl-C; the others carry on. Needs scikit-learn for the data. In the
folder of this source: pip install '.[examples]'
"""

import sys
import time

import torch
from torch.nn.functional import cross_entropy

import shoal

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"{error}. In the folder of shoal's source: pip install '.[examples]'")

torch.set_num_threads(1)  # the model is tiny, and the peers may share one machine

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
training = 1500  # the rest is for testing

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def train(optimizer):
    began = last = time.monotonic()
    joined, epoch = False, 0
    while True:
        batch = torch.randint(0, training, (32,))
        loss = cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # a newcomer downloads the state; when all peers have enough samples together, they step
        time.sleep(0.02)  # your model has more to do
        if not joined and optimizer.tracker.is_introduced and optimizer.is_synchronized_with_peers():
            joined, epoch, last = True, optimizer.local_epoch, time.monotonic()
            print(f"training from epoch {epoch} on, peers: {count_peers(optimizer)}", flush=True)
        if joined and optimizer.local_epoch > epoch:
            now = time.monotonic()
            rate = (optimizer.local_epoch - epoch) * optimizer.target_batch_size / (now - last)
            accuracy = (model(images[training:]).argmax(dim=1) == labels[training:]).float().mean()
            epoch, last = optimizer.local_epoch, now
            print(
                f"{now - began:.0f} s: epoch {epoch}, loss {loss:.3f}, test accuracy {accuracy:.1%}, "
                f"peers: {count_peers(optimizer)}, together {rate:,.0f} samples/s",
                flush=True,
            )


def count_peers(optimizer):
    return optimizer.tracker.global_progress.num_peers


try:
    with shoal.DHT(initial_peers=sys.argv[1:], start=True) as dht:
        print("Others join with: python examples/quickstart.py", dht.address, flush=True)
        with shoal.Optimizer(
            dht=dht,
            run_id="digits",  # peers with the same name train together
            target_batch_size=4096,  # samples that all peers together gather for one step: an epoch
            batch_size_per_step=32,  # samples of this peer per call of step()
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
            matchmaking_time=2.0,  # seconds to wait for peers that are late
        ) as optimizer:
            train(optimizer)
except KeyboardInterrupt:
    print("Stopped. The others carry on.")  # the end of each block has told them
