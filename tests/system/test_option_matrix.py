"""Every way of overlapping training with averaging, by two peers, a client and an auxiliary in processes of their own.

Each one must learn to read digits, and must show what distinguishes it from the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.swarm import START_LIMIT_SECONDS, Event, Peer

pytestmark = [pytest.mark.timeout(500), pytest.mark.leaves_something]  # processes that go on to the next test

EPOCHS, LEARNING_RATE = 12, 0.03
STALE_EPOCHS, STALE_LEARNING_RATE = 24, 0.02
"""Gradients of a model that lacks a step lead less far."""
LOCAL_EPOCHS, LOCAL_LEARNING_RATE = 10, 0.02
"""With local updates there are many steps in each."""
LEAST_ACCURACY = 0.85
"""Of 360 pictures; without training it is 0.1, and one process alone gets to 0.92 in as many steps. Which batches a
peer gets to depends on its pace."""


class Crew:
    """Four processes that train together, one task after another; started anew after a failure."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    def _start(self) -> None:
        self.peers.append(Peer("train_digits.py", "--seed", 0))
        address = self.peers[0].wait_for("address", START_LIMIT_SECONDS)["address"]
        for seed, role in enumerate(("peer", "client", "auxiliary"), start=1):
            self.peers.append(Peer("train_digits.py", "--seed", seed, "--role", role, "--initial-peers", address))

    def run(self, task: str, epochs: int, lr: float, **options: Any) -> tuple[list[Event], Event]:
        """What the three that train have seen, and what the auxiliary has."""
        try:
            if not self.peers:
                self._start()
            for peer in self.peers:
                peer.tell(json.dumps({"task": task, "epochs": epochs, "lr": lr, "options": options}))
            self._wait("ready", task, START_LIMIT_SECONDS)
            self._tell("go")
            self._wait("met", task, 120)
            self._tell("train")
            *trainers, auxiliary = self._wait("done", task, 240)
            self._tell("leave")
            self._wait("left", task, 120)
        except BaseException:
            self.close()
            raise
        for peer in self.peers:
            assert "Traceback" not in peer.errors(), peer.errors()
        return trainers, auxiliary

    def _wait(self, name: str, task: str, timeout: float) -> list[Event]:
        return [peer.wait_for(name, timeout, lambda event: event[name] == task) for peer in self.peers]

    def _tell(self, word: str) -> None:
        for peer in self.peers:
            peer.tell(word)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.peers.clear()


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


def check_everybody(trainers: list[Event], auxiliary: Event) -> None:
    for seen in trainers:
        assert seen["accuracy"] >= LEAST_ACCURACY, seen
        assert seen["helped_rounds"] > 0, "the auxiliary took part"
    assert auxiliary["unchanged"]
    assert auxiliary["steps"] == 0
    assert auxiliary["helped_rounds"] > 0


GRADIENT_OPTIONS = {
    "synchronous": {"delay_state_averaging": False, "from_function": False},
    "parameters are averaged in the background": {"delay_state_averaging": True, "from_function": False},
    "the optimizer steps in the background": {"delay_optimizer_step": True, "from_function": True},
    "gradients are averaged in the background": {"delay_grad_averaging": True, "from_function": True},
}


@pytest.mark.slow_drill
@pytest.mark.parametrize("name", GRADIENT_OPTIONS)
def test_peers_that_average_gradients_learn_to_read(crew: Crew, name: str) -> None:
    options = GRADIENT_OPTIONS[name]
    # every option with one way to accumulate; tests/optim/test_option_pairs.py has the others
    reuse_grad_buffers = list(GRADIENT_OPTIONS).index(name) % 2 == 1
    task = f"{name}, {'in place' if reuse_grad_buffers else 'accumulators'}"
    epochs, lr = (STALE_EPOCHS, STALE_LEARNING_RATE) if options["from_function"] else (EPOCHS, LEARNING_RATE)
    trainers, auxiliary = crew.run(task, epochs, lr, reuse_grad_buffers=reuse_grad_buffers, **options)
    check_everybody(trainers, auxiliary)
    delays_step = options["from_function"]
    delays_state = delays_step or options["delay_state_averaging"]
    delays_gradients = options.get("delay_grad_averaging", False)
    for seen in trainers:
        assert seen["staleness"] == [int(delays_step)] * epochs, seen["staleness"]
        assert (seen["gradients_under_way"] > 0) is delays_gradients
        if not delays_gradients:  # there little time is left for parameters before the next epoch ends
            assert (seen["overlapped"] > 0) is delays_state
    if not delays_state:
        assert len({seen["parameters"] for seen in trainers}) == 1


LOCAL_OPTIONS = {
    "local steps": {"delay_state_averaging": False, "from_function": False},
    "local steps go on during averaging": {"delay_state_averaging": True, "from_function": False},
    "local steps in the background": {
        "delay_state_averaging": True,
        "delay_optimizer_step": True,
        "offload_optimizer": True,
        "from_function": True,
    },
}


@pytest.mark.slow_drill
@pytest.mark.parametrize("name", LOCAL_OPTIONS)
def test_peers_that_step_locally_learn_to_read(crew: Crew, name: str) -> None:
    options = LOCAL_OPTIONS[name]
    trainers, auxiliary = crew.run(name, LOCAL_EPOCHS, LOCAL_LEARNING_RATE, use_local_updates=True, **options)
    check_everybody(trainers, auxiliary)
    for seen in trainers:
        assert seen["steps"] >= seen["batches"] - 1, "every batch makes a step, of which one may be under way"
        assert (seen["overlapped"] > 0) is options["delay_state_averaging"]
        if not options.get("delay_optimizer_step"):
            assert seen["changed_at_once"] == seen["batches_within_epochs"]
    if not options["delay_state_averaging"]:
        assert len({seen["parameters"] for seen in trainers}) == 1
