"""A small GPT that is cut into three stages: each machine holds one of them, and none holds the whole model.

First one:   python examples/stages.py --stage 0
Others:      python examples/stages.py ADDRESS --stage 1      (the address that the first one prints; then --stage 2)
More:        python examples/stages.py ADDRESS                (takes the stage that needs it most)

The text is that of Python's help(), half a megabyte of English that every machine has. A peer sends microbatches of its
own through all stages, and computes its stage for all others. With --serve it does only the latter, and with --stage
none only the former. They train until you stop them with Ctrl-C.
"""

import argparse
import functools
import pydoc_data.topics
import time

import torch
from torch.nn.functional import cross_entropy

import shoal

WINDOW, WIDTH, HEADS = 64, 64, 4  # bytes that the model sees at once; size of a layer
TOGETHER = 128  # samples that all peers together bring through for one step

torch.set_num_threads(1)  # the model is small, and the peers may share one machine

text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())).encode()
text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
training, held_out = text[:-20_000], text[-20_000:]
random = torch.Generator()  # of the data alone: stages draw from torch's own, each for its microbatch
random.seed()


class Blocks(torch.nn.Module):
    """A layer of a transformer, or several. The second stage is nothing else."""

    def __init__(self, layers=1):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, mask=mask, is_causal=True)


class First(Blocks):
    """Its input is what a microbatch begins with: bytes."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = torch.nn.Embedding(256, WIDTH), torch.nn.Embedding(WINDOW, WIDTH)

    def forward(self, x):
        return super().forward(self.bytes(x) + self.places(torch.arange(x.shape[1])))


class Last(Blocks):
    """Takes the labels as well, and returns one loss for each sample: in nats per byte."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(WIDTH, 256)

    def forward(self, x, labels):
        logits = self.out(super().forward(x))
        return cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(dim=1)


STAGES = [First, Blocks, Last]  # a peer calls its own only
HELD = {"0": 0, "1": 1, "2": 2, "auto": "auto", "none": None}  # what a peer may hold, by its word in the command


def microbatches(source, count=10**9, size=16):
    """Windows at random places, each with the bytes that follow its own."""
    for _ in range(count):
        starts = torch.randint(0, len(source) - WINDOW - 1, (size, 1), generator=random)
        windows = source[starts + torch.arange(WINDOW + 1)]
        yield windows[:, :-1], windows[:, 1:]


def train(model):
    """Send microbatches through the stages, and tell how it goes every ten steps."""
    began, told, last = time.monotonic(), None, 0.0
    for losses in model.train(microbatches(training)):
        step, now = model.local_epoch, time.monotonic()
        if told is None or step >= told + 10:
            rate = f", together {(step - told) * TOGETHER / (now - last):,.0f} samples/s" if told is not None else ""
            told, last = step, now
            print(f"{now - began:.0f} s: step {step}, loss {losses.mean():.3f} nats per byte{rate}", flush=True)
            if step % 100 < 10:
                tested = torch.cat(list(model.evaluate(microbatches(held_out, count=4))))
                print(f"on text held out: loss {tested.mean():.3f} nats per byte", flush=True)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("initial_peers", nargs="*", metavar="ADDRESS")
parser.add_argument("--stage", choices=HELD, default="auto", help="which part to hold")
parser.add_argument("--serve", action="store_true", help="send no microbatches, only compute those of others")
options = parser.parse_args()

try:
    with shoal.DHT(initial_peers=options.initial_peers, start=True) as dht:
        print("Others join with: python examples/stages.py", dht.address, flush=True)
        with shoal.StagedModel(
            dht=dht,
            run_id="stages",  # peers with the same name train together
            stages=STAGES,
            stage=HELD[options.stage],
            optimizer=functools.partial(torch.optim.AdamW, lr=3e-3),
            target_batch_size=TOGETHER,
            clip_grad_norm=1.0,  # the norm of the gradients of all stages
            compression=shoal.Float16Compression(),  # of what stages send each other
        ) as model:
            model.serve() if options.serve else train(model)
except KeyboardInterrupt:
    pass
print("Stopped. The others carry on.")  # the end of each block has told them
