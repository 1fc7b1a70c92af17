"""What the demo shows while it runs: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, TextIO

from shoal.cli.demo.messages import PeerState, PeerStory, Story
from shoal.logs import counted

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("peer", "state", "epoch", "samples", "samples/s", "loss", "held-out", "sent", "received")
STATE_COLOURS = {
    PeerState.TRAINING: "green",
    PeerState.FINISHED: "bold green",
    PeerState.DOWNLOADING: "cyan",
    PeerState.KILLED: "red",
    PeerState.FAILED: "bold red",
}


class Viewer(Protocol):
    """Shows a story as it goes on."""

    def say(self, news: str) -> None:
        """Something worth a line happened."""

    def show(self, story: Story) -> None:
        """Called several times per second."""

    def close(self) -> None:
        """Nothing more is shown."""


def viewer_for(stream: TextIO) -> Viewer:
    """A live table if the stream is a terminal and rich is installed, else plain lines."""
    if not stream.isatty():
        return PlainViewer(stream)
    try:
        return TableViewer()
    except ImportError:
        print("For a live table: pip install 'shoal[demo]'", file=sys.stderr)
        return PlainViewer(stream)


def row(peer: PeerStory) -> tuple[str, ...]:
    """The cells of one peer, in the order of ``COLUMNS``."""
    progress, loss = peer.progress, peer.held_out_loss
    if progress is None:
        return (peer.name, peer.state.value, *("-" for _ in COLUMNS[2:]))
    rate = progress.samples_per_second if peer.state is PeerState.TRAINING else 0.0
    return (
        peer.name,
        peer.state.value,
        str(progress.epoch),
        f"{progress.samples:,}",
        f"{rate:,.0f}",
        f"{progress.loss:.3f}",
        "-" if loss is None else f"{loss:.3f}",
        megabytes(progress.bytes_sent),
        megabytes(progress.bytes_received),
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def summary(story: Story) -> str:
    """The whole swarm in one line."""
    last = story.last_round
    averaging = "no averaging yet"
    if last is not None:
        averaging = f"last averaging {last.seconds:.2f} s, {counted(last.group_size, 'peer')}"
    left = max(0.0, story.planned_seconds - story.now)
    return f"epoch {story.epoch}  |  {counted(story.peers_seen, 'peer')} seen  |  {averaging}  |  {left:.0f} s left"


class PlainViewer:
    """Lines of text, for logs."""

    EVERY_SECONDS = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = 0.0

    def say(self, news: str) -> None:
        print(news, file=self._stream, flush=True)

    def show(self, story: Story) -> None:
        if story.last_round is None or story.stopped is not None or story.now < self._next:
            return
        self._next = story.now + self.EVERY_SECONDS
        print(f"[{story.now:5.1f} s] {summary(story)}", file=self._stream)
        for peer in story.peers.values():
            name, state, *cells = row(peer)
            told = "  ".join(f"{column} {cell}" for column, cell in zip(COLUMNS[2:], cells, strict=True))
            print(f"          {name}  {state:<10}  {told}", file=self._stream)
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class TableViewer:
    """A table that changes in place; news scroll above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=5)
        self._live.start()

    def say(self, news: str) -> None:
        self._console.print(news, markup=False)

    def show(self, story: Story) -> None:
        self._live.update(table_of(story))

    def close(self) -> None:
        self._live.stop()


def table_of(story: Story) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(caption=summary(story), caption_justify="left", header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("peer", "state") else "right", no_wrap=True)
    for peer in story.peers.values():
        name, state, *cells = row(peer)
        table.add_row(name, Text(state, style=STATE_COLOURS.get(peer.state, "")), *cells)
    return table
