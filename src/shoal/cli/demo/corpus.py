"""The demo's text: the source of Python's own standard library, which is on every machine that can run the demo.

Whole files are dealt out by a hash of their path, so that every peer cuts the same text in the same way without asking
anybody: one file in twenty is held out for measuring, the others go to one shard each.

What a peer must beat is measured on the held-out text too. The *unigram entropy* is the loss of the best model that
knows only how frequent each byte is; the *bigram entropy* that of the best model that also sees one byte back. Both are
taken from the counts of the held-out text itself, so no model of that kind, however it was fitted, can do better there.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

HELD_OUT_ONE_IN = 20
MAX_BYTES = 8_000_000
"""Enough for the demo many times over; more would only make starting slower."""

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
"""Not text that people wrote to be read: test data, installed packages, tables of code pages."""


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
    """Read the standard library and cut it up.

    Args:
        num_shards: how many parts to cut the training text into.
        root: folder of Python files to read instead.

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
    """Python files below a folder, ordered by the hash of their path, so that the first few come from all over."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]  # not even entered
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    yield from sorted(found, key=lambda path: _hash(path.relative_to(root).as_posix()))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _part_of(name: str, num_shards: int) -> int:
    """Index of the shard a file belongs to; ``num_shards`` itself means held out."""
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
