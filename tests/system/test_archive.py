"""All peers of a run are killed, and the run goes on from its archive: with the commands that a user has."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from shoal.archive.store import Store
from tests.system.swarm import Peer

pytestmark = pytest.mark.timeout(400)
LIMIT_SECONDS = 120
"""For what comes at once, on a machine that does other things, too."""
TRAIN = ("train.py", "--epochs", 10_000, "--target-batch-size", 128, "--pause", 0.05)


def epoch_of(peer: Peer) -> int:
    return max((event["epoch"] for event in peer.all("epoch")), default=0)


def archived(archiver: Peer) -> list[int]:
    """The epochs of all archives so far."""
    found = (re.match(r"archive of epoch (\d+):", event["line"]) for event in archiver.all("line"))
    return [int(match[1]) for match in found if match]


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals to other processes")
def test_interrupted_archiver_writes_a_last_archive(tmp_path: Path) -> None:
    signals = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM}
    started = list[Peer]()
    try:
        started.append(trainer := Peer(*TRAIN))
        address = trainer.wait_for("address", LIMIT_SECONDS)["address"]
        trainer.wait_for("ready", LIMIT_SECONDS)
        trainer.tell("go")
        trainer.wait_for("epoch", LIMIT_SECONDS)
        how = ("-m", "shoal.cli", "archive", "--run", "system_test", "--every", "1h", address)
        archivers = {name: Peer(*how, tmp_path / name) for name in signals}
        started += archivers.values()
        for archiver in archivers.values():
            archiver.wait_for_line(r"^archive of epoch", LIMIT_SECONDS)
        first = {name: archived(archiver)[-1] for name, archiver in archivers.items()}
        later = max(first.values()) + 2
        trainer.wait_for("epoch", LIMIT_SECONDS, lambda event: event["epoch"] > later)
        for name, archiver in archivers.items():
            archiver.process.send_signal(signals[name])
            archiver.wait_for_line(rf"^One last archive, because epoch {first[name]} is the latest", LIMIT_SECONDS)
        for name, archiver in archivers.items():
            assert archiver.wait(LIMIT_SECONDS) == 0, archiver.errors()
            assert len(archived(archiver)) == 2
            assert Store.open(tmp_path / name).epoch == archived(archiver)[-1] >= later
            assert "Traceback" not in archiver.errors()
    finally:
        for peer in started:
            peer.close()


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals to other processes")
def test_killed_run_continues_from_its_archive(tmp_path: Path) -> None:
    folder, started = tmp_path / "kept", list[Peer]()

    def start(*arguments: object) -> Peer:
        started.append(Peer(*arguments))  # type: ignore[arg-type]
        return started[-1]

    try:
        first = start(*TRAIN)
        address = first.wait_for("address", LIMIT_SECONDS)["address"]
        second = start(*TRAIN, "--initial-peers", address, "--seed", 1)
        for peer in (first, second):
            peer.wait_for("ready", LIMIT_SECONDS)
        for peer in (first, second):
            peer.tell("go")
        for peer in (first, second):
            peer.wait_for("epoch", LIMIT_SECONDS, lambda event: len(event["group"]) == 2)
        archiver = start(
            "-m", "shoal.cli", "archive", "--run", "system_test", "--every", "1s", "--keep", "2", address, folder
        )
        archiver.wait_for_line(r"^archive of epoch", LIMIT_SECONDS)
        # What was trained before an archive began is in it. It begins at most a second after the one before.
        before = min(epoch_of(first), epoch_of(second))
        count = len(archived(archiver))
        archiver.wait_for("line", LIMIT_SECONDS, lambda _: len(archived(archiver)) > count)
        assert archived(archiver)[-1] >= before

        for peer in (first, second):
            peer.process.kill()
        for peer in (first, second):
            peer.process.wait()
        told = archiver.wait_for_line(r"^no archive: .*the last good archive is (\S+)", LIMIT_SECONDS)
        archiver.process.send_signal(signal.SIGINT)
        assert archiver.wait(LIMIT_SECONDS) == 0, archiver.errors()
        kept = Store.open(folder)
        assert (kept.epoch, kept.path.rpartition("/")[2]) == (archived(archiver)[-1], told[1])
        assert len(Store(folder).folders()) <= 2

        revival = start("-m", "shoal.cli", "revive", folder)
        address = revival.wait_for_line(r"initial-peers (\S+)$", LIMIT_SECONDS)[1]
        peers = [start(*TRAIN, "--initial-peers", address, "--seed", 2 + number) for number in range(2)]
        for peer in peers:
            peer.wait_for("ready", LIMIT_SECONDS)
        for peer in peers:
            peer.tell("go")
        for peer in peers:
            # The state of the archive counts as the first epoch that they reach.
            assert peer.wait_for("epoch", LIMIT_SECONDS)["epoch"] >= kept.epoch
        revival.wait_for_line(r"gives the state now", LIMIT_SECONDS)
        assert revival.wait(LIMIT_SECONDS) == 0, revival.errors()
        for peer in peers:
            later = peer.wait_for(
                "epoch", LIMIT_SECONDS, lambda event: event["epoch"] > kept.epoch + 1 and len(event["group"]) == 2
            )
            assert later["peers"] <= 2, "the donor counts as a peer that trains"
            assert later["loss"] < 1.9  # it would be 2.3 if the run had begun anew
            assert "Traceback" not in peer.errors(), peer.errors()
        assert min(peer.wait_for("epoch", 1)["epoch"] for peer in peers) == kept.epoch
    finally:
        for peer in started:
            peer.close()
