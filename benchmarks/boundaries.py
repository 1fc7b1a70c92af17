"""What small boundaries between stages cost: loss and bytes, with codecs and bottlenecks, in one process.

    python benchmarks/boundaries.py
    python benchmarks/boundaries.py --ways 8-bit 4-bit --steps 200

A byte-level transformer with a boundary after each of its layers but the last trains as it would in stages: each
activation that crosses a boundary is rounded by a codec, and so is its gradient on the way back. The loss is measured
on text that is not trained on. Bytes are those of all boundaries, there and back, for a microbatch.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import fmean
from typing import Any

import torch
from torch import nn

from shoal.cli.demo import model as demo_model
from shoal.compression import (
    BFloat16Compression,
    Blockwise4BitQuantization,
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    NoCompression,
    TensorRole,
)
from shoal.stages import LowRankBoundary

HELD_OUT_WINDOWS = 500
CODECS: dict[str, CompressionBase] = {
    "none": NoCompression(),
    "bfloat16": BFloat16Compression(),
    "8-bit": BlockwiseQuantization(),
    "4-bit": Blockwise4BitQuantization(),
}
WAYS: dict[str, tuple[str, int]] = {
    **{name: (name, 1) for name in CODECS},
    **{f"width / {part}, bfloat16": ("bfloat16", part) for part in (4, 8, 16)},
    "width / 4, 8-bit": ("8-bit", 4),
}
"""By name: the codec, and which part of the width crosses a boundary."""


class Crossing(nn.Module):
    """Rounds what goes forward, and the gradient that comes back, and counts the bytes of both."""

    def __init__(self, codec: CompressionBase) -> None:
        super().__init__()
        self.codec = codec
        self.bytes = 0

    def send(self, tensor: torch.Tensor, role: TensorRole) -> torch.Tensor:
        """What the receiver sees."""
        tensor = tensor.detach().contiguous()
        message, seen = self.codec.compress_and_decode(tensor, CompressionInfo.from_tensor(tensor, role=role))
        self.bytes += memoryview(message.buffer).nbytes
        return seen.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Sent.apply(x, self)  # type: ignore[no-untyped-call]
        return out


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, crossing: Crossing) -> torch.Tensor:
        ctx.crossing = crossing
        return crossing.send(x, TensorRole.ACTIVATION)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.crossing.send(gradient, TensorRole.GRADIENT), None


def with_boundaries(model: demo_model.ByteTransformer, codec: CompressionBase, part: int) -> list[Crossing]:
    """Put a boundary between any two layers of a model."""
    width = model.size.width
    crossings, layers = [], [model.blocks[0]]
    for block in list(model.blocks)[1:]:
        crossings.append(Crossing(codec))
        if part == 1:
            layers += [crossings[-1], block]
        else:
            boundary = LowRankBoundary(width, width // part)
            layers += [boundary.down, crossings[-1], boundary.up, block]
    model.blocks = nn.Sequential(*layers)
    return crossings


def train(way: str, seed: int, args: argparse.Namespace, corpus: demo_model.Corpus) -> dict[str, Any]:
    torch.manual_seed(seed)
    codec, part = WAYS[way]
    size = demo_model.ModelSize(context=args.context, width=args.width, layers=args.layers)
    model = demo_model.ByteTransformer(size)
    crossings = with_boundaries(model, CODECS[codec], part)
    optimizer = torch.optim.AdamW(demo_model.parameter_groups(model), betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, demo_model.warm_up)
    random = torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    for _ in range(args.steps):
        windows = demo_model.random_windows(corpus.shards[0], args.batch_size, args.context + 1, random)
        optimizer.zero_grad()
        demo_model.loss_on(model, windows).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # without it, some runs with a bottleneck learn nothing
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - began
    sent = sum(each.bytes for each in crossings) / args.steps
    held_out = demo_model.even_windows(corpus.held_out, HELD_OUT_WINDOWS, args.context + 1)
    return {"loss": demo_model.held_out_loss(model, held_out), "bytes": sent, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="windows of a microbatch")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    corpus = demo_model.load_corpus(1)
    results: dict[str, list[dict[str, Any]]] = {}
    print(
        f"{args.layers} layers {args.width} wide, {args.steps} steps of {args.batch_size} windows, seeds {args.seeds}"
    )
    for way in args.ways:
        results[way] = [train(way, seed, args, corpus) for seed in args.seeds]
        known = results.get("none", results[way])
        loss, sent = (fmean(each[what] for each in results[way]) for what in ("loss", "bytes"))
        rise = 100 * (loss / fmean(each["loss"] for each in known) - 1)
        fewer = fmean(each["bytes"] for each in known) / sent
        seconds = fmean(each["seconds"] for each in results[way])
        print(
            f"  {way:<20} loss {loss:.3f} ({rise:+5.1f} %)  {sent / 1e3:7.1f} kB per microbatch ({fewer:4.1f} x fewer)"
            f"  {seconds:4.0f} s",
            flush=True,
        )
    print(json.dumps({**vars(args), "results": results}))


if __name__ == "__main__":
    main()
