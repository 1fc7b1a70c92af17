"""Four trainers, each a process of its own, meet one stranger after another, who is a process, too.

Those who do something to the machines; ``test_simulated.py`` has the others. All of them: ``benchmarks/hostile.py``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drills import mostly_drills
from tests.hostile.attacks import OF_MACHINES
from tests.hostile.scene import OPTIONS, Scene, check_undisturbed
from tests.system.swarm import START_LIMIT_SECONDS, Peer, Swarm

pytestmark = [
    pytest.mark.xdist_group("systems"),
    pytest.mark.timeout(500),
    pytest.mark.skipif(sys.platform == "win32", reason="sends a process to the end of the queue as POSIX does"),
]
PROGRAM = Path(__file__).parent / "program.py"
EPOCHS, EPOCHS_AFTER = 3, 1
"""Of which there is something to be said during an attack, and after it."""
LINES_PER_MINUTE = 20
MEMORY_FACTOR = 1.05


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Swarm("train.py", 4, *OPTIONS) as swarm:
        attacker = Peer(PROGRAM, "--initial-peers", swarm.address, "--run", "system_test")
        try:
            attacker.wait_for("ready", START_LIMIT_SECONDS)
            for peer in swarm.peers:
                peer.wait_for("epoch", 120, lambda event: len(event["group"]) == 4)
            yield Scene(swarm.peers, attacker)
        finally:
            attacker.close()


@pytest.mark.parametrize("name", mostly_drills(sorted(OF_MACHINES)))
def test_a_stranger_changes_nothing(scene: Scene, name: str) -> None:
    memory, lines, began = scene.memory(), scene.lines(), time.monotonic()
    scene.attacker.tell(name)
    scene.attacker.wait_for("struck", 120, lambda event: event["struck"] == name)
    cpu = scene.cpu_seconds()
    try:
        during = scene.epochs(EPOCHS)
        cpu = scene.cpu_seconds() - cpu
    finally:
        scene.attacker.tell("stop")
        scene.attacker.wait_for("gone", 120, lambda event: event["gone"] == name)
    after = scene.epochs(EPOCHS_AFTER)
    minutes = max(1.0, (time.monotonic() - began) / 60)
    grown = [now / then for now, then in zip(scene.memory(), memory, strict=True)]
    new_lines = [now[len(then) :] for now, then in zip(scene.lines(), lines, strict=True)]
    times = [sum(reports[0]["seconds"] for reports in epochs) / len(epochs) for epochs in (during, after)]
    print(f"{name}: epochs {times[0]:.2f}, then {times[1]:.2f} s; {cpu:.2f} s of CPU in {EPOCHS}; ", end="")
    print(f"memory {max(grown):.3f}; lines {max(map(len, new_lines))}")
    print(*dict.fromkeys(line[:200] for each in new_lines for line in each), sep="\n")
    check_undisturbed(during, scene.trainers)
    check_undisturbed(after, scene.trainers)
    assert max(grown) <= MEMORY_FACTOR, grown
    assert max(map(len, new_lines)) <= LINES_PER_MINUTE * minutes
