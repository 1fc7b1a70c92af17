"""What these tests share: a DHT of one peer, and nothing that looks for the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import accelerate
import pytest
import torch
import tqdm

import shoal
from tests.foreign import allow_for

FOREIGN = ("transformers", "accelerate", "peft", "huggingface_hub", "torch")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_for(FOREIGN, items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is asked of the hub, and one thread is enough for models of this size."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # All accelerators of a process share their settings: the first one's precision would be that of all.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # else its bars leave a thread behind
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def dht() -> Iterator[shoal.DHT]:
    with shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) as dht:
        yield dht
