"""Several peers, each a process of its own, train together; some are killed or interrupted."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from shoal.optim.setup.training_setup import default_silence
from tests.drills import mostly_drills
from tests.system.smoke import smoke
from tests.system.swarm import Peer, Swarm

pytestmark = pytest.mark.timeout(400)
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals to other processes")
MANY_EPOCHS = 10_000
LIMIT_SECONDS = 120
"""For what comes at once, on a machine that does other things, too."""
INTERRUPT_LIMIT_SECONDS = 15.0  # takes 1 s; half of the shortest time that a peer here would wait for another


def epoch_of(peer: Peer) -> int:
    return max((event["epoch"] for event in peer.all("epoch")), default=0)


@pytest.mark.slow_drill
@pytest.mark.parametrize("delay_state_averaging", [False, True], ids=["synchronous", "delayed state averaging"])
def test_four_peers_make_five_global_steps(delay_state_averaging: bool) -> None:
    smoke(delay_state_averaging)


@needs_signals
def test_others_continue_when_one_is_killed() -> None:
    with Swarm("train.py", 4, "--epochs", MANY_EPOCHS, "--averaging-timeout", 10) as swarm:
        victim, *others = swarm.peers[1:] + swarm.peers[:1]
        for peer in swarm.peers:
            peer.wait_for("epoch", LIMIT_SECONDS, lambda event: len(event["group"]) == 4)
        victim_id = victim.wait_for("peer_id", 1)["peer_id"]
        victim.process.kill()
        at_death = max(epoch_of(peer) for peer in swarm.peers)
        for peer in others:
            later = peer.wait_for(
                "epoch",
                LIMIT_SECONDS,
                lambda event: event["epoch"] >= at_death + 3 and len(event["group"]) == 3,
            )
            assert victim_id not in later["group"]
            assert "Traceback" not in peer.errors(), peer.errors()


def interrupt(peer: Peer) -> int:
    """Press Ctrl-C and return the exit status; the script must be done in time and leave no process behind."""
    children = peer.children()
    pressed = time.monotonic()
    peer.process.send_signal(signal.SIGINT)
    # Longer than the limit below: torch takes up to seconds for unloading, on a busy machine.
    status = peer.wait(LIMIT_SECONDS)
    took = peer.wait_for("gone", 1)["gone"] - pressed - sum(e["looked_for_leaks"] for e in peer.all("left"))
    assert took < INTERRUPT_LIMIT_SECONDS, f"took {took:.1f} s\n{peer.errors()}"
    orphans = [child for child in children if child.is_running()]
    assert not orphans
    return status


@pytest.mark.slow_drill
@needs_signals
def test_ctrl_c_ends_a_script_that_catches_it() -> None:
    with Swarm("train.py", 2, "--epochs", MANY_EPOCHS, "--catch-interrupt") as swarm:
        for peer in swarm.peers:
            peer.wait_for("epoch", LIMIT_SECONDS, lambda event: len(event["group"]) == 2)
        for peer in swarm.peers:
            assert interrupt(peer) == 0
            assert peer.wait_for("left", 1)["left"] == []
            assert "Traceback" not in peer.errors(), peer.errors()


@needs_signals
def test_ctrl_c_ends_a_script_that_ignores_it() -> None:
    """Python itself then prints where the script was; nothing of shoal's threads or exit handlers may come on top."""
    with Swarm("train.py", 2, "--epochs", MANY_EPOCHS) as swarm:
        for peer in swarm.peers:
            peer.wait_for("epoch", LIMIT_SECONDS, lambda event: len(event["group"]) == 2)
        for peer in swarm.peers:
            assert interrupt(peer) == -signal.SIGINT
            errors = peer.errors()
            assert errors.count("Traceback") == 1, errors
            assert errors.rstrip().endswith("KeyboardInterrupt"), errors


@needs_signals
def test_ctrl_c_ends_a_waiting_script() -> None:
    """The other peer is stopped, so that this one waits in the middle of averaging when Ctrl-C comes."""
    patience = ["--matchmaking-time", 30, "--averaging-timeout", 40]
    with Swarm("train.py", 2, "--epochs", MANY_EPOCHS, "--catch-interrupt", "--report-steps", *patience) as swarm:
        stalled, waiting = swarm.peers
        for peer in swarm.peers:
            peer.wait_for("epoch", LIMIT_SECONDS, lambda event: len(event["group"]) == 2)
        stalled.process.send_signal(signal.SIGSTOP)
        waiting.wait_until_quiet("step", seconds=1.5, timeout=LIMIT_SECONDS)
        assert interrupt(waiting) == 0
        assert "Traceback" not in waiting.errors(), waiting.errors()


@needs_signals
@pytest.mark.parametrize("sleeping", mostly_drills([1, 0]))
def test_sleeping_laptop_delays_others_briefly(sleeping: int) -> None:
    """It sleeps until the other has gone on alone; then both go on together."""
    matchmaking_time, averaging_timeout = 2.0, 60.0
    options = ["--matchmaking-time", matchmaking_time, "--averaging-timeout", averaging_timeout]
    with Swarm("train.py", 2, "--epochs", MANY_EPOCHS, *options) as swarm:
        laptop, other = swarm.peers[sleeping], swarm.peers[1 - sleeping]
        for peer in swarm.peers:
            peer.wait_for("epoch", LIMIT_SECONDS, lambda event: event["epoch"] > 3 and len(event["group"]) == 2)
        usual = max(event["seconds"] for event in other.all("epoch"))
        laptop.process.send_signal(signal.SIGSTOP)
        asleep = epoch_of(other)
        other.wait_for("epoch", LIMIT_SECONDS, lambda event: event["epoch"] >= asleep + 4)
        laptop.process.send_signal(signal.SIGCONT)
        awake = epoch_of(other)
        for peer in swarm.peers:
            peer.wait_for(
                "epoch", LIMIT_SECONDS, lambda event: event["epoch"] >= awake + 3 and len(event["group"]) == 2
            )
        allowed = default_silence(matchmaking_time, averaging_timeout) + 4 * usual  # alone, it has twice the work
        worst = max(event["seconds"] for event in other.all("epoch") if event["epoch"] > asleep)
        assert worst < allowed
