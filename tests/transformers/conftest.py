"""What these tests share: a DHT of one peer, and nothing that looks for the hub."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shoal


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is asked of the hub, and one thread is enough for models of this size."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def dht() -> Iterator[shoal.DHT]:
    with shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) as dht:
        yield dht
