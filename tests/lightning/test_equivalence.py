"""Two peers with the strategy, in real processes, make the very steps that one process makes without it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning.models import PACKAGE
from tests.lightning.train_shares import CLIPPING, STEPS, make_data, make_module, make_trainer, parameters
from tests.system.swarm import START_LIMIT_SECONDS, Peer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("groups")]

SCRIPT = str(Path(__file__).parent / "train_shares.py")
TRAINING_SECONDS = 300


def train_alone(pl: ModuleType, samples: int, clipping: float | None) -> list[float]:
    module = make_module(pl)
    data = [step[0] for step in make_data([samples])]
    make_trainer(pl, strategy="auto", devices=1, gradient_clip_val=clipping).fit(
        module, DataLoader(data, batch_size=None)
    )
    return parameters(module)


@pytest.mark.slow_drill
@pytest.mark.timeout(START_LIMIT_SECONDS + 2 * TRAINING_SECONDS)
@pytest.mark.parametrize(
    ("sizes", "devices", "steps_alone"),
    [
        ([8, 16], 1, False),
        ([4, 8, 12], 2, False),
        ([4, 8, 12], 2, True),
    ],
    ids=["one each", "two and one", "two and one that step alone"],
)
def test_processes_of_peers(pl: ModuleType, sizes: list[int], devices: int, steps_alone: bool) -> None:
    """If peers step alone, and average what comes of it, each clips gradients of its own: so nobody clips any."""
    arguments = ["--package", PACKAGE, "--sizes", *sizes, *(["--steps-alone"] if steps_alone else [])]
    peers = [Peer(SCRIPT, *arguments, "--first", 0, "--devices", devices)]
    try:
        address = peers[0].wait_for("address", START_LIMIT_SECONDS)["address"]
        peers.append(Peer(SCRIPT, *arguments, "--first", devices, "--initial-peers", address))
        expected = torch.tensor(train_alone(pl, sum(sizes), None if steps_alone else CLIPPING))
        for peer in peers:
            assert peer.wait(TRAINING_SECONDS) == 0, peer.errors()
        ends = [event for peer in peers for event in peer.all("parameters")]
    finally:
        for peer in peers:
            peer.close()
    assert sorted(event["rank"] for event in ends) == [0, *range(devices)]
    for event in ends:
        assert event["parameters"] == ends[0]["parameters"], "the same bits in all processes"
        assert (event["epoch"], event["peers"]) == (STEPS, 2)
        assert event["rate"] == pytest.approx(0.1 * 0.5**2)
    for peer, size in zip(peers, (devices, 1), strict=True):
        check_processes(peer.all("parameters"), size)
    difference = (torch.tensor(ends[0]["parameters"]) - expected).abs().max() / expected.abs().max()
    assert difference < 1e-5


def check_processes(ends: list[dict], size: int) -> None:
    """Each of them has a part of the peer's data, in an order that is only the peer's; one writes files."""
    samplers = [event["sampler"] for event in ends]
    assert sorted(sampler["rank"] for sampler in samplers) == list(range(size))
    assert {sampler["num_replicas"] for sampler in samplers} == {size}
    assert len({sampler["seed"] for sampler in samplers}) == 1
    assert [event["rank"] for event in ends if event["writes"]] == [0]
