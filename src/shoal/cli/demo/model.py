"""A small byte-level transformer in plain torch, and its text: the source of Python's standard library.

Every machine that can run the demo has that text. A hash of its path assigns each file to a shard, so all peers split
the text in the same way without communication. One file in twenty is held out for measuring.

The baselines are measured on the held-out text too. The *unigram entropy* is the loss of the best model that knows only
how frequent each byte is. The *bigram entropy* is the loss of the best model that also sees one byte back. Both come
from the counts of the held-out text itself, so no model of that kind can do better there, however it was fitted.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

# Possible values of a byte.
VOCABULARY = 256


@dataclass(frozen=True)
class ModelSize:
    """Size of the transformer; the defaults give about 375 thousand parameters. Chosen."""

    context: int = 64
    """Number of bytes it looks back."""
    nearest: int = 4
    """Number of preceding bytes that each position sees directly, without attention."""
    width: int = 96
    heads: int = 4
    layers: int = 2


class TransformerBlock(nn.Module):
    """Causal self-attention, then a two-layer network; each adds its output to its input."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attention_out = nn.Linear(size.width, size.width, bias=False)
        self.network_norm = nn.LayerNorm(size.width)
        self.network_in = nn.Linear(size.width, 4 * size.width)
        self.network_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.network_out(functional.gelu(self.network_in(self.network_norm(x))))
        return out


class ByteTransformer(nn.Module):
    """Predicts the next byte from the bytes before it."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, size.width) for _ in range(size.nearest))
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(TransformerBlock(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.out = nn.Linear(size.width, VOCABULARY)
        self.apply(_initialize)
        for name, weight in self.named_parameters():
            # The outputs of all blocks add up, so they start small.
            if name.endswith(("attention_out.weight", "network_out.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next byte at every position.

        Args:
            tokens: ``int64``, shape ``[batch, length]``, length at most the context.

        Returns:
            float, shape ``[batch, length, 256]``.
        """
        x = self.positions.weight[: tokens.shape[1]].expand(len(tokens), -1, -1)
        for back, table in enumerate(self.tables):
            x = x + functional.pad(table(tokens), (0, 0, back, 0))[:, : tokens.shape[1]]
        logits: torch.Tensor = self.out(self.norm(self.blocks(x)))
        return logits


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def parameter_groups(model: ByteTransformer) -> list[dict[str, Any]]:
    """Groups of parameters, each with a learning rate that suits it."""
    tables = [*model.tables.parameters(), *model.positions.parameters()]
    of_tables = {id(parameter) for parameter in tables}
    others = [parameter for parameter in model.parameters() if id(parameter) not in of_tables]
    # Each row of a table is used rarely, so it takes larger steps: that halves the time to pass the bigram entropy.
    return [{"params": others, "lr": 3e-3}, {"params": tables, "lr": 3e-2}]


def warm_up(epoch: int) -> float:
    """Factor for the learning rate in an epoch."""
    return min(1.0, (epoch + 1) / 5)


def loss_on(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats per byte.

    Args:
        windows: ``int64``, shape ``[batch, length + 1]``; each byte but the first is predicted from the ones before it.
    """
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def random_windows(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Pieces from random places of a text.

    Returns:
        ``int64``, shape ``[count, length]``.
    """
    starts = torch.randint(0, len(text) - length + 1, (count,), generator=generator)
    return _cut(text, starts, length)


def even_windows(text: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Pieces from evenly spaced places of a text, always the same.

    Returns:
        ``int64``, shape ``[count, length]``.
    """
    return _cut(text, torch.linspace(0, len(text) - length, count).long(), length)


def _cut(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length)].long()


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: torch.Tensor, batch_size: int = 64) -> float:
    """Mean loss over many windows, in nats per byte."""
    starts = range(0, len(windows), batch_size)
    losses = [loss_on(model, batch) * len(batch) for batch in (windows[i : i + batch_size] for i in starts)]
    return float(torch.stack(losses).sum() / len(windows))


@torch.no_grad()
def sample(model: ByteTransformer, prompt: str, length: int, seed: int, temperature: float = 0.8) -> str:
    """Text written by the model: the prompt and ``length`` bytes after it."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt.encode())
    for _ in range(length):
        logits = model(torch.tensor([text[-model.size.context :]]))[0, -1]
        chances = torch.softmax(logits / temperature, dim=-1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


HELD_OUT_ONE_IN = 20  # chosen
# Chosen: many times more than the demo needs; more would only slow down the start.
MAX_BYTES = 8_000_000

# Folders without readable source text: test data, installed packages, tables of code pages.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}


@dataclass(frozen=True)
class Corpus:
    """Text cut into shards, as bytes in ``uint8`` tensors."""

    shards: tuple[torch.Tensor, ...]
    held_out: torch.Tensor
    files: int
    unigram_entropy: float
    """Nats per byte of the held-out text when only the frequency of each byte is known."""
    bigram_entropy: float
    """Nats per byte of the held-out text when one byte back is known as well."""


def load_corpus(num_shards: int, root: Path | None = None) -> Corpus:
    """Read the standard library and cut it into shards.

    Args:
        num_shards: number of shards for the training text.
        root: read the Python files of this folder instead.

    Raises:
        ValueError: the folder has no text for every shard and for the held-out part.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    parts: list[list[bytes]] = [[] for _ in range(num_shards + 1)]
    total = files = 0
    for path in source_files(root):
        text = path.read_bytes()
        parts[_part_of(path.relative_to(root).as_posix(), num_shards)].append(text)
        total, files = total + len(text), files + 1
        if total >= MAX_BYTES:
            break
    *shards, held_out = (torch.frombuffer(bytearray(b"\n".join(part) or b"\n"), dtype=torch.uint8) for part in parts)
    if any(len(part) < 10_000 for part in (*shards, held_out)):
        raise ValueError(f"{root} has too little Python source text for {num_shards} shards: {total} bytes in all")
    unigram, bigram = entropies(held_out)
    return Corpus(tuple(shards), held_out, files, unigram, bigram)


def source_files(root: Path) -> Iterator[Path]:
    """Python files below a folder, ordered by the hash of their path so that the first few come from all over it."""
    found = []
    for folder, subfolders, names in os.walk(root):
        # Changed in place: os.walk then does not enter the skipped folders.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    yield from sorted(found, key=lambda path: _hash(path.relative_to(root).as_posix()))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _part_of(name: str, num_shards: int) -> int:
    """Index of the shard that a file belongs to; ``num_shards`` means held out."""
    number = _hash(f"part of {name}")
    return num_shards if number % HELD_OUT_ONE_IN == 0 else number // HELD_OUT_ONE_IN % num_shards


def entropies(text: torch.Tensor) -> tuple[float, float]:
    """Unigram and bigram entropy of a text, in nats per byte.

    Args:
        text: ``uint8``, shape ``[length]``.
    """
    values = text.numpy().astype(np.int64)
    pairs = np.bincount(values[:-1] * 256 + values[1:], minlength=65536).reshape(256, 256).astype(np.float64)
    following = pairs.sum(axis=0)
    return _cross_entropy(following, following / following.sum()), _cross_entropy(
        pairs, pairs / np.maximum(pairs.sum(axis=1, keepdims=True), 1.0)
    )


def _cross_entropy(counts: np.ndarray, probabilities: np.ndarray) -> float:
    seen = counts > 0
    return float(-(counts[seen] * np.log(probabilities[seen])).sum() / counts.sum())
