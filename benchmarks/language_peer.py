"""What the peers of all benchmarks on the demo's language model have in common."""

from __future__ import annotations

import functools
from typing import Any

import torch

import shoal
from shoal.cli.demo import model as demo_model

load_corpus = functools.cache(demo_model.load_corpus)


class LanguagePeer:
    """A model, this peer's share of the text, and a table that it shares with the others.

    Args:
        index: number of this peer.
        peers: how many there are.
        seed: of the parameters, with which all peers begin.
        batches: seed of the batches, another one for each peer.
        batch_size: windows in a batch.
        held_out: windows of text on which nobody trains.
        shards: into how many the text is cut; one for each peer by default.
        size: of the model.
    """

    version = shoal.__version__

    def __init__(
        self,
        index: int,
        peers: int,
        *,
        seed: int,
        batches: int,
        batch_size: int,
        held_out: int,
        shards: int | None = None,
        size: demo_model.ModelSize | None = None,
    ) -> None:
        self.index, self.peers, self.batch_size = index, peers, batch_size
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        corpus = load_corpus(shards or peers)
        self.model = demo_model.ByteTransformer(size or demo_model.ModelSize())
        self.text = corpus.shards[index]
        self._window = self.model.size.context + 1
        self._held_out = demo_model.even_windows(corpus.held_out, held_out, self._window)
        self._random = torch.Generator().manual_seed(batches)
        self.dht_options: dict[str, Any] = {}
        self.optimizer: Any = None

    @property
    def values(self) -> int:
        """How many parameters the model has."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def open(self) -> list[str]:
        """Start the table of the first peer; returns its addresses."""
        self.dht = shoal.DHT(start=True, **self.dht_options)
        return [str(address) for address in self.dht.get_visible_maddrs()]

    def join(self, addresses: list[str]) -> None:
        """Join the first peer, and get ready to train."""
        if self.index != 0:
            self.dht = shoal.DHT(addresses, start=True, **self.dht_options)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> Any:
        raise NotImplementedError

    def compute_gradients(self) -> float:
        """On the next batch; returns the loss."""
        windows = demo_model.random_windows(self.text, self.batch_size, self._window, self._random)
        loss = demo_model.loss_on(self.model, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def held_out_loss(self) -> float:
        """Nats per byte of text that nobody has trained on."""
        return demo_model.held_out_loss(self.model, self._held_out)

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.shutdown()
        self.dht.shutdown()
