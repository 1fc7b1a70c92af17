"""A convolutional network that several machines train in shared passes over one data set, each image once in a pass.

First one:   python examples/vision.py
Second one:  python examples/vision.py ADDRESS      (the address that the first one prints)

They train until you stop them with Ctrl-C. Needs scikit-learn for the data. In the folder of this
source: pip install '.[examples]'
"""

import argparse
import sys
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import shoal

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"{error}. In the folder of shoal's source: pip install '.[examples]'")

torch.set_num_threads(1)  # the model is small, and the peers may share one machine

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
training = TensorDataset(images[:1500], labels[:1500])  # the rest is for testing


def convolution(inputs, outputs):
    layer = torch.nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return torch.nn.Sequential(layer, torch.nn.BatchNorm2d(outputs), torch.nn.ReLU())


model = torch.nn.Sequential(
    convolution(1, 16),
    convolution(16, 32),
    torch.nn.MaxPool2d(2),
    convolution(32, 64),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(64, 10),
)


def augment(batch):
    """Move all images of a batch by up to a pixel."""
    right, down = torch.randint(-1, 2, (2,)).tolist()
    return batch.roll((down, right), dims=(2, 3))


@torch.no_grad()
def accuracy():
    found = model.eval()(images[1500:]).argmax(dim=1)
    model.train()
    return (found == labels[1500:]).float().mean()


def train(optimizer, shared, passes):
    began, joined = time.monotonic(), False
    while shared.number < passes:
        number, pass_began, before = shared.number, time.monotonic(), optimizer.local_epoch
        for batch, truth in shared.loader():  # ends when all peers together have passed over everything
            optimizer.zero_grad()
            loss = cross_entropy(model(augment(batch)), truth)
            loss.backward()
            optimizer.step(batch_size=len(batch))
            optimizer.report(loss=loss)  # for `shoal monitor ADDRESS --run vision`
            if not joined and optimizer.tracker.is_introduced and optimizer.is_synchronized_with_peers():
                joined, before = True, optimizer.local_epoch
                print(f"training from epoch {before} on, peers: {optimizer.tracker.expected_group_size}", flush=True)
        if joined:  # else the others made this pass before this peer came
            seconds, steps = time.monotonic() - pass_began, optimizer.local_epoch - before
            told = f"pass {number} is over, epoch {optimizer.local_epoch}, test accuracy {accuracy():.1%}"
            peers, rate = optimizer.tracker.expected_group_size, steps * optimizer.target_batch_size / seconds
            print(
                f"{time.monotonic() - began:.0f} s: {told}, peers: {peers}, together {rate:,.0f} samples/s", flush=True
            )


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("initial_peers", nargs="*", metavar="ADDRESS")
parser.add_argument("--passes", type=int, default=10**9, help="passes over the data (default: until it is stopped)")
arguments = parser.parse_args()

try:
    with shoal.DHT(initial_peers=arguments.initial_peers, start=True) as dht:
        print("Others join with: python examples/vision.py", dht.address, flush=True)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        with (
            shoal.data.SharedPass(training, dht, "vision", batch_size=32, chunk=96) as shared,
            shoal.Optimizer(
                dht=dht,
                run_id="vision",  # peers with the same name train together
                target_batch_size=256,  # samples that all peers together gather for one step: an epoch
                optimizer=adam,
                scheduler=torch.optim.lr_scheduler.ExponentialLR(adam, gamma=0.99),  # counts epochs
                model=model,  # so that the statistics of the batch norms are averaged, too
                matchmaking_time=2.0,  # seconds to wait for peers that are late
                grad_compression=shoal.Float16Compression(),  # half the bytes
            ) as optimizer,
        ):
            train(optimizer, shared, arguments.passes)
except KeyboardInterrupt:
    print("Stopped. The others carry on.")  # the end of each block has told them
