"""Strangers behind routers train with the program of the README, and need a public machine only to find each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nat.laboratory import NEEDS_LABORATORY, Host, Laboratory
from tests.nat.rules import Kind
from tests.system.swarm import START_LIMIT_SECONDS, Event, Peer

pytestmark = [NEEDS_LABORATORY, pytest.mark.timeout(400)]

LIMIT = 150
"""Seconds, on a machine that does other things, too."""
README = Path(__file__).parents[2] / "README.md"
OBSERVE = """
import json, threading, time

def observe():
    while True:
        time.sleep(0.1)
        optimizer = globals().get("optimizer")
        if optimizer is not None:
            print(json.dumps({
                "epoch": optimizer.local_epoch,
                "peers": optimizer.tracker.global_progress.num_peers,
                "role": optimizer.grad_averager.mode.name,
                "rounds": dht.p2p.metrics.rounds_succeeded,
                "failed": dht.p2p.metrics.rounds_failed,
                "reachability": dht.p2p.metrics.reachability,
            }), flush=True)

threading.Thread(target=observe, daemon=True).start()
"""
"""Tells what the program does that comes after it."""


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    with Laboratory() as lab:
        yield lab


def program_of_the_readme(address: str) -> str:
    """As it is printed, with an address, an observer, and without an end."""
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    program = found[1]
    printed = "initial_peers=sys.argv[1:]"
    assert printed in program
    return OBSERVE + program.replace(printed, f"initial_peers=[{address!r}]")


def start_seed(host: Host) -> str:
    """``shoal dht`` on a public machine; returns the address that it prints."""
    seed = host.start("-m", "shoal.cli", "dht")
    return seed.wait_for_line("shoal dht --initial-peers (/ip4/.*)$", START_LIMIT_SECONDS)[1]


def state_when(peer: Peer, is_so: Callable[[Event], bool]) -> dict[str, Any]:
    return peer.wait_for("epoch", LIMIT, is_so)


def train_together(peers: list[Peer], epochs: int) -> None:
    """Wait until each has gone on for some epochs, with everybody; each epoch takes one round or two."""
    began = [state_when(peer, lambda event: True) and peer.all("epoch")[-1] for peer in peers]
    for peer, before in zip(peers, began, strict=True):
        state = state_when(
            peer,
            lambda event, before=before: (
                event["epoch"] >= before["epoch"] + epochs
                and event["rounds"] >= before["rounds"] + epochs
                and event["peers"] == len(peers)
            ),
        )
        assert state["role"] == "NODE", "everybody is called, and reduces"


def start_strangers(lab: Laboratory, kinds: list[Kind]) -> tuple[Host, list[Host], list[Peer]]:
    public, laptops = lab.host(Kind.PUBLIC), [lab.host(kind) for kind in kinds]
    program = program_of_the_readme(start_seed(public))
    return public, laptops, [laptop.start("-c", program) for laptop in laptops]


def test_two_laptops_find_each_other_and_go_on_without_the_public_machine(lab: Laboratory) -> None:
    public, [first, second], peers = start_strangers(lab, [Kind.PORT_RESTRICTED, Kind.CGNAT])
    for peer in peers:
        assert state_when(peer, lambda event: event["peers"] == 2)["reachability"] == "relayed"
    train_together(peers, 2)
    before = traffic(public, first, second)
    train_together(peers, 5)
    direct, relayed = (after - then for after, then in zip(traffic(public, first, second), before, strict=True))
    assert relayed < direct / 2, "the two have a connection of their own"
    public.line.cut()
    train_together(peers, 5)
    for peer in peers:
        assert peer.process.poll() is None


@pytest.mark.slow_drill
def test_two_symmetric_routers_need_the_relay(lab: Laboratory) -> None:
    public, [first, second], peers = start_strangers(lab, [Kind.SYMMETRIC, Kind.SYMMETRIC])
    train_together(peers, 2)
    before = traffic(public, first, second)
    train_together(peers, 5)
    direct, relayed = (after - then for after, then in zip(traffic(public, first, second), before, strict=True))
    assert direct < relayed / 10


def traffic(public: Host, first: Host, second: Host) -> tuple[int, int]:
    """Bytes so far between the two, and from them to the public machine."""
    direct = first.line.carried_to(second.line) + second.line.carried_to(first.line)
    return direct, first.line.carried_to(public.line) + second.line.carried_to(public.line)
