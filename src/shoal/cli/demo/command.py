"""The ``shoal demo`` command: starts the peers, kills one, adds one, stops them together, and records what happens."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from shoal.cli import port_of
from shoal.cli.demo.messages import (
    METHODS,
    RUN_ID,
    SYNCHRONOUS,
    AnyEvent,
    EpochDone,
    Finished,
    Heard,
    JoinSwarm,
    PeerActivity,
    PeerProcess,
    PeerStory,
    Progress,
    Story,
    SwarmJoined,
    TextReady,
    Train,
    end_all,
)
from shoal.cli.demo.report import Viewer, succeeded, ten_lines, viewer_for, write_report
from shoal.cli.monitor import check_page, start_page
from shoal.dht import DHT
from shoal.errors import ShoalError, end_at_once, torch_is_missing

# Signals that end the demo early.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class DemoConfig:
    """What to run."""

    peers: int = 4
    """Number of peers that start together; one of them is killed later."""
    seconds: float = 90.0
    """How long to train, counted from when all peers are ready."""
    folder: Path = Path("demo-report")
    """Folder for the report and the peers' logs."""
    method: str = SYNCHRONOUS
    """How the peers train together."""
    web: int | None = None
    """The port of a page that shows the run; 0 = any free one, ``None`` = no page."""

    def __post_init__(self) -> None:
        if self.peers < 2:
            raise ValueError(f"a swarm needs at least 2 peers, got {self.peers}")
        if not 10 <= self.seconds < math.inf:
            raise ValueError(f"the demo needs at least 10 seconds, got {self.seconds:g}")


class DemoError(ShoalError):
    """The run could not continue; the text says why."""


class Demo:
    """One run of the demo."""

    def __init__(self, config: DemoConfig, viewer: Viewer) -> None:
        self.config = config
        self.story = Story(config.peers, config.seconds, method=config.method)
        self._viewer = viewer
        self._processes: dict[int, PeerProcess] = {}
        self._heard: queue.Queue[Heard] = queue.Queue()
        self._addresses: list[str] = []
        self._zero = time.monotonic()
        self._watching = contextlib.ExitStack()

    def run(self) -> Story:
        """Carry out the whole run.

        Raises:
            DemoError: a peer failed that was not killed on purpose, or a phase timed out.
        """
        self.config.folder.mkdir(parents=True, exist_ok=True)
        grace = 1.0
        try:
            self._start()
            self._train()
            self._stop()
            grace = 10.0
        finally:
            try:
                self._watching.close()
            finally:
                end_all(self._processes.values(), grace)
        return self.story

    # The phases

    def _start(self) -> None:
        self._viewer.say(f"Starting {self.config.peers} peers, each a process of its own ...")
        for number in range(1, self.config.peers + 1):
            self._start_peer(number)
        self._wait(lambda: self._all_are(PeerActivity.READY), 120.0, "load torch and read the text")
        self._viewer.say("Peer 1 starts the swarm; the others are given its address and nothing else.")
        self._processes[1].tell(JoinSwarm([]))
        self._wait(lambda: bool(self._addresses), 30.0, "start the swarm")
        if self.config.web is not None:
            url = show_page(self._addresses, self.config.web, self._watching)
            self._viewer.say(f"An observer, which takes no part in training, shows the run at {url}")
        for number in range(2, self.config.peers + 1):
            self._processes[number].tell(JoinSwarm(self._addresses))
        self._wait(lambda: self._all_are(PeerActivity.DOWNLOADING), 30.0, "join the swarm")
        shift = time.monotonic() - self._zero
        self._zero += shift
        for peer in self.story.peers.values():
            peer.started -= shift
        for process in self._processes.values():
            process.tell(Train())
        self._viewer.say(f"All peers are in. Training for {self.config.seconds:g} seconds.")

    def _train(self) -> None:
        self._wait_until(self.config.seconds / 3)
        self._kill_one()
        self._wait_until(self.config.seconds / 2)
        self._add_one()
        self._wait_until(self.config.seconds)

    def _kill_one(self) -> None:
        victim = self.config.peers
        self.story.peers[victim].state = PeerActivity.KILLED
        self._processes[victim].kill()
        self.story.killed = (self._now(), victim)
        self._viewer.say(
            f"{self._clock()} Peer {victim} was killed with {end_at_once()}: no goodbye, its connections just end."
        )

    def _add_one(self) -> None:
        number = self.config.peers + 1
        self.story.joined = (self._now(), number)
        self._start_peer(number)
        self._processes[number].tell(JoinSwarm(self._addresses))
        self._processes[number].tell(Train())
        self._viewer.say(f"{self._clock()} Peer {number} starts from nothing: new process, new identity, one address.")

    def _stop(self) -> None:
        self.story.stopped = self._now()
        last = self.story.epoch + 2  # late enough for every peer to hear of it
        self._viewer.say(f"{self._clock()} Time is up: all peers stop after epoch {last} and compare parameters.")
        while True:
            for peer in self.story.living:
                peer.finished = None
                self._processes[peer.number].tell(Train(last))
            self._wait(lambda: all(peer.finished for peer in self.story.living), 90.0, "finish")
            if self.story.identical() or self.story.repeats == 3:
                return
            self.story.repeats += 1
            last = max(peer.finished.epoch for peer in self.story.living if peer.finished) + 1
            self._viewer.say("Parameters differ: the last averaging missed a peer. One more epoch.")

    # Listening

    def _start_peer(self, number: int) -> None:
        log = self.config.folder / f"peer-{number}.log"
        self.story.peers[number] = PeerStory(number, started=self._now())
        with _signals_held():
            self._processes[number] = PeerProcess(number, self.config.peers + 1, log, self._heard, self.config.method)

    def _all_are(self, state: PeerActivity) -> bool:
        return all(peer.state is state for peer in self.story.peers.values())

    def _now(self) -> float:
        return time.monotonic() - self._zero

    def _clock(self) -> str:
        return f"[{self._now():5.1f} s]"

    def _wait_until(self, moment: float) -> None:
        while (left := moment - self._now()) > 0:
            self._listen(left)

    def _wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        """Listen until ``done()``. Timeouts are many times longer than needed, so only a defect exceeds them."""
        deadline = time.monotonic() + timeout
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                states = ", ".join(f"{peer.name}: {peer.state.value}" for peer in self.story.peers.values())
                raise DemoError(f"the peers did not {what} within {timeout:g} seconds ({states})")
            self._listen(left)

    def _listen(self, timeout: float) -> None:
        """Handle the peers' events for a moment, and refresh the view."""
        try:
            number, event = self._heard.get(timeout=min(timeout, 0.2))
        except queue.Empty:
            pass
        else:
            self._note(number, event)
            while not self._heard.empty():
                self._note(*self._heard.get())
        self.story.now = self._now()
        self._viewer.show(self.story)

    def _note(self, number: int, event: AnyEvent | None) -> None:
        peer, now = self.story.peers[number], self._now()
        if event is None:
            self._note_silence(peer)
        elif isinstance(event, TextReady):
            peer.state = PeerActivity.READY
            self.story.files = event.files
            self.story.unigram_entropy, self.story.bigram_entropy = event.unigram_entropy, event.bigram_entropy
        elif isinstance(event, SwarmJoined):
            peer.state, peer.peer_id = PeerActivity.DOWNLOADING, event.peer_id
            if number == 1:
                self._addresses = event.addresses
        elif isinstance(event, Progress):
            peer.progress = event
            if event.held_out_loss is not None:
                peer.curve.append((now, event.epoch, event.held_out_loss))
            if peer.state is PeerActivity.DOWNLOADING and event.epoch >= event.swarm_epoch:
                self._note_catching_up(peer, event.epoch, now)
        elif isinstance(event, EpochDone):
            peer.epochs.append((now, event))
        elif isinstance(event, Finished):
            peer.state, peer.finished = PeerActivity.FINISHED, event
            peer.curve.append((now, event.epoch, event.loss))

    def _note_catching_up(self, peer: PeerStory, epoch: int, now: float) -> None:
        peer.state, peer.caught_up = PeerActivity.TRAINING, now
        if self.story.joined is not None and peer.number == self.story.joined[1]:
            took = now - peer.started
            self._viewer.say(
                f"{self._clock()} Peer {peer.number} has the swarm's state of epoch {epoch}, "
                f"{took:.1f} s after its process was started."
            )

    def _note_silence(self, peer: PeerStory) -> None:
        if peer.state is PeerActivity.KILLED:
            return
        peer.state = PeerActivity.FAILED
        words = self._processes[peer.number].last_words()
        raise DemoError(f"{peer.name} ended by itself; {self._processes[peer.number].log} ends with:\n{words}")


DESCRIPTION = """\
Trains a small language model with several peers on this machine, each a process of its own. The text is the source of
Python's standard library. On the way one peer is killed and a new one joins from nothing.
"""


def add_parser(subparsers: Any) -> None:
    """Add ``demo`` to the subcommands."""
    defaults = DemoConfig()
    parser = subparsers.add_parser(
        "demo", help="train a small language model with several peers on this machine", description=DESCRIPTION
    )
    parser.add_argument("--peers", type=int, default=defaults.peers, help="peers at the start (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=defaults.seconds, help="how long to train (default: %(default)g)"
    )
    parser.add_argument(
        "--folder", type=Path, default=defaults.folder, help="where the report goes (default: %(default)s)"
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default=defaults.method,
        help="average gradients for each step; or exchange progress rarely, in 4 bits per value (diloco) or only the "
        "largest values (sparse) (default: %(default)s)",
    )
    parser.add_argument(
        "--web",
        nargs="?",
        type=port_of,
        const=0,
        metavar="PORT",
        help="show the run as a page, too, at this port of this machine (default: any free one)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return the exit status: 0 if it showed what it is meant to show."""
    try:
        config = DemoConfig(arguments.peers, arguments.seconds, arguments.folder, arguments.method, arguments.web)
    except ValueError as error:
        print(f"shoal demo: {error}", file=sys.stderr)
        return 2
    if config.web is not None:
        check_page()
    # A shell makes its background jobs ignore SIGINT: undo that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _leave)
    if importlib.util.find_spec("torch") is None:  # otherwise each peer would say so
        raise torch_is_missing()
    with contextlib.closing(viewer_for(sys.stdout)) as viewer:
        story = Demo(config, viewer).run()
    files = write_report(story, config.folder)
    print()
    print(*ten_lines(story, files), sep="\n")
    return 0 if succeeded(story) else 1


def show_page(addresses: list[str], port: int, stack: contextlib.ExitStack) -> str:
    """Watch the demo as ``shoal monitor --web`` would, until the stack is closed.

    Args:
        addresses: of a peer.
        port: of the page; 0 = any free one.

    Returns:
        The address of the page.

    Raises:
        ModuleNotFoundError: packages are missing.
        OSError: the port is taken.
    """
    from shoal.monitor.observer import Monitor

    dht = stack.enter_context(DHT(addresses, start=True, client_mode=True, token=""))
    monitor = stack.enter_context(Monitor(dht, RUN_ID))
    page = stack.enter_context(contextlib.closing(start_page(monitor.view, port)))
    url: str = page.url
    return url


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Let SIGINT and SIGTERM take effect after this block. Inside it they could leave a process running."""
    came: list[int] = []
    handlers = {each: signal.signal(each, lambda number, _: came.append(number)) for each in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
