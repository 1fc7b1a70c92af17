"""docs/tutorial.md is true: its commands run in its order, in real processes, and print what it shows.

The laptops are behind a router, and the server is in another network, where these can be made. Elsewhere, all are one
computer.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.computers import Computer
from tests.documents.pages import ROOT, Block, blocks_of
from tests.nat.laboratory import NEEDS_LABORATORY, Laboratory
from tests.system.swarm import Peer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("commands"),
    pytest.mark.timeout(900),  # each wait has a limit of its own
    pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals"),
]
PAGE = ROOT / "docs" / "tutorial.md"
LIMIT_SECONDS = 120
"""For one line of output, on a machine that does other things, too."""
SHORT_ADDRESS = r"[\d.]+:\d+"
EPOCH = re.compile(r"epoch (\d+): accuracy")
# A peer without an invitation ends with an error; all else ends with Ctrl-C, and says nothing of it.
STRANGER = "a stranger"


class Story:
    """What the reader has done so far.

    Args:
        folder: where all of the reader's terminals are.
        computers: by the titles of terminals; empty: all are this one.
    """

    def __init__(self, folder: Path, computers: Mapping[str, Computer]) -> None:
        self.folder, self._computers = folder, computers
        self.words = {"ADDRESS": "", "INVITATION": "", "WATCHER": ""}
        self.terminals: list[tuple[str, Peer]] = []
        self._exported: dict[str, dict[str, str]] = {}
        self.told: list[str] = []

    def go_on(self, block: Block) -> None:
        """Do what the next block says."""
        if block.language == "python":
            (self.folder / block.title).write_text(block.code, encoding="utf-8")
        elif block.language == "sh":
            for line in block.code.splitlines():
                self._give(block.title, shlex.split(line))
        elif block.code == "Ctrl-C\n":
            if block.title == "the archive":
                self._stop_archive()
            else:
                self.stop()
        else:
            for line in block.code.splitlines():
                if line != "…":  # there is more, which the page does not show
                    self._expect(block.title, line)

    def _give(self, place: str, words: list[str]) -> None:
        words = [re.sub("|".join(self.words), lambda match: self.words[match[0]], word) for word in words]
        exported = self._exported.setdefault(place, {})
        program, *arguments = words
        if program == "pip":
            return  # what it installs is there; test_commands.py has looked at its words
        if program == "export":
            exported.update(word.split("=", 1) for word in arguments)
            return
        # "shoal" itself is a script that does no more than this file.
        script = str(ROOT / "src/shoal/cli/__main__.py") if program == "shoal" else str(self.folder / arguments.pop(0))
        environment = {"XDG_STATE_HOME": str(self.folder), **exported}
        if self._computers:
            peer = self._computers[place].start(script, *arguments, cwd=self.folder, environment=environment)
        else:
            peer = Peer(script, *arguments, cwd=self.folder, environment={**os.environ, **environment})
        self.terminals.append((place, peer))
        if arguments[:1] == ["token"]:
            assert peer.wait(LIMIT_SECONDS) == 0, peer.errors()
            if arguments[1] == "invite":
                self.words["WATCHER" if "monitor" in arguments else "INVITATION"] = peer.all("line")[0]["line"]

    def _expect(self, place: str, line: str) -> None:
        """See a line in the terminal that was opened last, there if a place is named."""
        peer = next(peer for title, peer in reversed(self.terminals) if place in ("", title))
        title = next(title for title, each in self.terminals if each is peer)
        if title == STRANGER:
            assert peer.wait(LIMIT_SECONDS) != 0
            assert line in peer.errors()
            return
        pattern = re.escape(line.strip())
        pattern = re.sub(r"(?<![\d.])\d+(?:\\\.\d+){3}:\d+$", lambda _: f"({SHORT_ADDRESS})$", pattern)
        # Any number will do, except of peers.
        pattern = re.sub(r"(?<![\w()])(?<!peers\\ )\d[\d:]*(?:\\\.\d+)?(?![\w+)]|\\ peers)", r"[\\d:.]+", pattern)
        match = peer.wait_for_line(pattern, LIMIT_SECONDS)
        self.told.append(match[0])
        if match.re.groups:
            self.words["ADDRESS"] = match[1]

    def _stop_archive(self) -> None:
        """Press Ctrl-C in the terminal of the archive, when the run has made steps since its latest one."""
        archive = self.terminals[-1][1]
        latest = int(archive.wait_for_line(r"archive of epoch (\d+)", LIMIT_SECONDS)[1])
        laptop = next(peer for title, peer in self.terminals[::-1] if title == "second laptop")
        # Some steps more, because the archive reads only now and then how far the run is.
        laptop.wait_for(
            "line",
            LIMIT_SECONDS,
            lambda event: (match := EPOCH.match(event["line"])) is not None and int(match[1]) >= latest + 5,
        )
        os.kill(archive.process.pid, signal.SIGINT)
        assert archive.wait(LIMIT_SECONDS) == 0, archive.errors()

    def stop(self) -> None:
        """Press Ctrl-C in all terminals."""
        for _, peer in self.terminals:
            with contextlib.suppress(ProcessLookupError):  # some have done their work
                os.kill(peer.process.pid, signal.SIGINT)
        for title, peer in self.terminals:
            status = peer.wait(LIMIT_SECONDS)
            assert "Traceback" not in peer.errors() or title == STRANGER, peer.errors()
            assert (status == 0) == (title != STRANGER), peer.errors()
            peer.close()
        self.terminals.clear()


@contextlib.contextmanager
def story_of(folder: Path, computers: Mapping[str, Computer]) -> Iterator[Story]:
    story = Story(folder, computers)
    try:
        yield story
    finally:
        for _, peer in story.terminals:
            with contextlib.suppress(ProcessLookupError):
                peer.close()


def follow(story: Story) -> None:
    """Do all that the page says."""
    for block in blocks_of(PAGE):
        story.go_on(block)
    story.stop()
    epochs = [int(match[1]) for line in story.told if (match := EPOCH.match(line))]
    first = next(int(match[1]) for line in story.told if (match := re.match(r"archive of epoch (\d+)", line)))
    archived = next(int(match[1]) for line in story.told if (match := re.match(r"archives/\S+: epoch (\d+)", line)))
    assert len(epochs) == 6
    assert archived > first, "the archive wrote a last one before it ended"
    # The first line may be of the archive's own epoch, before the first step after it.
    assert max(epochs[4:]) > archived >= epochs[3], "it went on from the archive"
    assert min(epochs[4:]) >= archived


def test_tutorial_s_accuracies_are_reached() -> None:
    """With any seed, give or take five points. Peers average their gradients, so one peer shows how fast they learn."""
    blocks = blocks_of(PAGE)
    program = next(block.code for block in blocks if block.title == "train.py")
    shown = [
        (int(epoch), float(percent))
        for block in blocks
        if block.language == "text"
        for epoch, percent in re.findall(r"^epoch (\d+): accuracy ([\d.]+)%", block.code, re.MULTILINE)
    ]
    assert len(shown) == 6
    rate = re.search(r"Adam\(.*lr=([\d.]+)\)", program)
    samples = re.search(r"target_batch_size=(\d+)", program)
    assert rate is not None
    assert samples is not None
    reached: dict[int, list[float]] = {epoch: [] for epoch, _ in shown}
    for seed in range(10):
        names: dict[str, Any] = {}
        torch.manual_seed(seed)
        exec(program[: program.index("def train(")], names)  # its imports, data and model
        model, images, labels = names["model"], names["images"], names["labels"]
        adam = torch.optim.Adam(model.parameters(), lr=float(rate[1]))
        for epoch in range(1, max(reached) + 1):
            batch = torch.randint(0, 1500, (int(samples[1]),))
            adam.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            adam.step()
            if epoch in reached:
                right = model(images[1500:]).argmax(dim=1) == labels[1500:]
                reached[epoch].append(100 * right.float().mean().item())
    for epoch, percent in shown:
        assert min(reached[epoch]) - 5 <= percent <= max(reached[epoch]) + 5, (epoch, percent, reached[epoch])


@pytest.mark.slow_drill
def test_the_tutorial_on_one_computer(tmp_path: Path) -> None:
    with story_of(tmp_path, {}) as story:
        follow(story)


@pytest.mark.slow_drill
@NEEDS_LABORATORY
def test_tutorial_behind_a_router(tmp_path: Path) -> None:
    """The server cannot connect to the laptops, so that they have to join it."""
    with Laboratory() as lab:
        router = lab.router("port-restricted")
        computers = {
            "first laptop": router.host(),
            "second laptop": router.host(),
            "server": lab.host("public"),
            "anywhere": lab.host("port-restricted"),
            "a stranger": lab.host("port-restricted"),
        }
        with story_of(tmp_path, computers) as story:
            follow(story)
