"""A small language model that several machines train over slow connections: they exchange little, and rarely.

First one:   python examples/language_model.py
Second one:  python examples/language_model.py ADDRESS      (the address that the first one prints)

The text is that of Python's help(), half a megabyte of English that every machine has. Each peer makes 50 steps of its
own between two exchanges, and what it then sends has 4 bits per parameter instead of 32 in each step. They train until
you stop them with Ctrl-C. Peers on one machine share its cores, so only peers on several machines are faster together.
"""

import argparse
import functools
import pydoc_data.topics
import time

import torch
from torch.nn.functional import cross_entropy

import shoal

WINDOW = 64  # bytes that the model sees at once

torch.set_num_threads(1)  # the model is small, and the peers may share one machine

text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())).encode()
text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
training, held_out = text[:-20_000], text[-20_000:]


class LanguageModel(torch.nn.Module):
    """Predicts each next byte from up to 64 before it."""

    def __init__(self, width=64, heads=4, layers=2):
        super().__init__()
        self.bytes = torch.nn.Embedding(256, width)
        self.places = torch.nn.Embedding(WINDOW, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = torch.nn.Linear(width, 256)

    def forward(self, x):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.bytes(x) + self.places(torch.arange(x.shape[1]))
        return self.out(self.layers(x, mask=mask, is_causal=True))


def loss_of(model, source, count):
    """The mean loss of windows at random places, in nats per byte."""
    windows = source[torch.randint(0, len(source) - WINDOW - 1, (count, 1)) + torch.arange(WINDOW + 1)]
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(model, optimizer, slots):
    began = last = time.monotonic()
    slot, joined = optimizer.local_epoch, False
    while slot < slots:
        loss = loss_of(model, training, 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # 50 steps are a slot; after each, all peers average how far they have come
        optimizer.report(loss=loss)  # for `shoal monitor ADDRESS --run language_model`
        peers, slots_made = optimizer.tracker.global_progress.num_peers, optimizer.local_epoch - slot
        if not joined and optimizer.tracker.is_introduced and optimizer.is_synchronized_with_peers():
            joined, slot, last = True, optimizer.local_epoch, time.monotonic()
            print(f"training from slot {slot} on, peers: {peers}", flush=True)
        elif joined and slots_made > 0:
            slot, now = optimizer.local_epoch, time.monotonic()
            with torch.no_grad(), optimizer.use_outer_parameters():  # those on which all peers agree
                held_out_loss = loss_of(model, held_out, 64)
            rate, last = slots_made * 50 * 16 * peers / (now - last), now
            told = f"slot {slot}, loss {held_out_loss:.3f} nats per byte on text held out, peers: {peers}"
            print(f"{now - began:.0f} s: {told}, together {rate:,.0f} samples/s", flush=True)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("initial_peers", nargs="*", metavar="ADDRESS")
parser.add_argument("--slots", type=int, default=10**9, help="times 50 steps (default: until it is stopped)")
arguments = parser.parse_args()

model = LanguageModel()
try:
    with shoal.DHT(initial_peers=arguments.initial_peers, start=True) as dht:
        print("Others join with: python examples/language_model.py", dht.address, flush=True)
        with shoal.DiLoCo(
            dht=dht,
            run_id="language_model",  # peers with the same name train together
            sync_every=50,  # steps of each peer between two exchanges
            batch_size_per_step=16,
            optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
            outer_optimizer=functools.partial(torch.optim.SGD, lr=0.9, momentum=0.5, nesterov=True),  # for a short run
            compression=shoal.Blockwise4BitQuantization(),
        ) as optimizer:
            train(model, optimizer, arguments.slots)
except KeyboardInterrupt:
    print("Stopped. The others carry on.")  # the end of each block has told them
