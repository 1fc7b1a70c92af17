"""The demo's output: a live table or plain lines while it runs, then a picture, JSON and ten lines of text.

The picture shows how the held-out loss of each peer fell, and what happened on the way. The JSON holds the same data.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from shoal.base.logs import counted
from shoal.cli.demo.messages import PeerActivity, PeerStory, Story

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table


# Colour-blind readers can tell these apart, too (the palette of Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY, LIGHT = "#555555", "#dddddd"

COLUMNS = ("peer", "state", "epoch", "samples", "samples/s", "loss", "held-out", "sent", "received")
STATE_COLOURS = {
    PeerActivity.TRAINING: "green",
    PeerActivity.FINISHED: "bold green",
    PeerActivity.DOWNLOADING: "cyan",
    PeerActivity.KILLED: "red",
    PeerActivity.FAILED: "bold red",
}


class Viewer(Protocol):
    """Shows a story while it happens."""

    def say(self, news: str) -> None:
        """Show a line of news."""

    def show(self, story: Story) -> None:
        """Show the current state; called several times per second."""

    def close(self) -> None:
        """End the view."""


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
    """One peer's cells, in the order of ``COLUMNS``."""
    progress, loss = peer.progress, peer.held_out_loss
    if progress is None:
        return (peer.name, peer.state.value, *("-" for _ in COLUMNS[2:]))
    rate = progress.samples_per_second if peer.state is PeerActivity.TRAINING else 0.0
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
    """Prints lines of text, for logs."""

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
    """A table that is updated in place; news scrolls above it."""

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


def draw(story: Story, path: Path) -> None:
    """Draw the run into a PNG file. Imports matplotlib only here, because other commands must work without it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, rounds = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for axes in (losses, rounds):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LIGHT)
        axes.tick_params(color=LIGHT, labelcolor=GREY)
        axes.grid(axis="y", color=LIGHT, linewidth=0.6)
        axes.set_axisbelow(True)
    _draw_losses(losses, story)
    _draw_rounds(rounds, story)
    _draw_events(losses, rounds, story)
    figure.savefig(path, dpi=130)


def _draw_losses(axes: Axes, story: Story) -> None:
    for peer, colour, marker in zip(story.peers.values(), COLOURS * 99, MARKERS * 99, strict=False):
        times, values = [time for time, _, _ in peer.curve], [loss for _, _, loss in peer.curve]
        axes.plot(times, values, color=colour, marker=marker, markersize=5, linewidth=1.4, alpha=0.85, label=peer.name)
    # Labels are placed away from the curve, which begins high above the lower line and ends far below the upper one.
    levels = [(story.unigram_entropy, "knows only how frequent each byte is (unigram entropy)", 1, -4, 4, "right")]
    levels += [(story.bigram_entropy, "best possible when one byte back is known (bigram entropy)", 0, 4, -12, "left")]
    for level, meaning, x, right, up, side in levels:
        axes.axhline(level, color=GREY, linewidth=0.9, linestyle="--")
        text, place = f"{level:.2f}  {meaning}", (x, level)
        coordinates = ("axes fraction", "data"), "offset points"
        axes.annotate(text, place, (right, up), *coordinates, color=GREY, fontsize=9, ha=side)
    axes.margins(y=0.08)
    axes.set_ylabel("held-out loss, nats per byte", color=GREY)
    title = f"{story.planned_peers} peers train one model; one is killed, a new one joins"
    axes.set_title(title, loc="left", fontweight="bold")
    if story.peers:
        axes.legend(loc="upper right", frameon=False, ncols=min(3, len(story.peers)), labelcolor=GREY)


def _draw_rounds(axes: Axes, story: Story) -> None:
    rounds, pauses = story.rounds().values(), story.pauses()
    axes.plot([time for time, _ in pauses], [s for _, s in pauses], ".-", color="#bbbbbb", label="from step to step")
    axes.plot([time for time, _ in rounds], [s for _, s in rounds], ".", color=COLOURS[0], label="averaging")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # with room for the legend
    axes.set_ylabel("seconds", color=GREY)
    axes.set_xlabel("seconds of training", color=GREY)
    axes.legend(loc="upper right", frameon=False, ncols=2, labelcolor=GREY)


def _draw_events(losses: Axes, rounds: Axes, story: Story) -> None:
    events = []
    if story.killed:
        events.append((story.killed[0], "#c00000", f"peer {story.killed[1]} killed"))
    if story.joined:
        number = story.joined[1]
        events.append((story.joined[0], "#007000", f"peer {number} starts from nothing"))
        caught_up = story.peers[number].caught_up
        if caught_up is not None:
            events.append((caught_up, "#007000", f"peer {number} has the swarm's state"))
    for line, (time, colour, label) in enumerate(events):
        for axes in (losses, rounds):
            axes.axvline(time, color=colour, linewidth=1, linestyle=":")
        place = (time, 0.74 - 0.07 * line)
        # A text that began near the right edge would leave the picture.
        side, right = ("right", -4) if time > 0.6 * losses.get_xlim()[1] else ("left", 4)
        losses.annotate(label, place, (right, 0), ("data", "axes fraction"), "offset points", color=colour, ha=side)


@dataclass(frozen=True)
class Findings:
    """The results of a run in numbers."""

    epochs: int
    median_round: float | None
    """Median seconds of averaging plus the optimizer's step, counted from the arrival of the last peer."""
    slowest_after_kill: float | None
    """Seconds of the slowest round in the 15 s after the kill."""
    slow_after_kill: int
    """Number of rounds in those 15 s that took more than three times the median."""
    median_pause: float | None
    """Median seconds from one step of the swarm to the next: gathering a batch, then averaging."""
    longest_pause_after_kill: float | None
    joiner_caught_up: float | None
    """Seconds from the start of the newcomer's process until it had the swarm's epoch."""
    joiner_samples: int
    final_loss: float | None
    """Loss on the held-out text, mean over the living peers, nats per byte."""
    below_bigram_at: float | None
    """When the held-out loss first fell below the bigram entropy, in seconds since training began."""
    identical: bool


def findings(story: Story) -> Findings:
    """Compute the results of a run."""
    rounds, pauses = list(story.rounds().values()), story.pauses()
    usual = median(seconds for _, seconds in rounds) if rounds else None
    after_kill = story.soon_after_kill(rounds)
    joiner = story.peers[story.joined[1]] if story.joined else None
    caught_up = joiner.caught_up - joiner.started if joiner and joiner.caught_up is not None else None
    losses = [peer.finished.loss for peer in story.living if peer.finished]
    below = [time for peer in story.peers.values() for time, _, loss in peer.curve if loss < story.bigram_entropy]
    return Findings(
        epochs=max((peer.finished.epoch for peer in story.living if peer.finished), default=story.epoch),
        median_round=usual,
        slowest_after_kill=max(after_kill, default=None),
        slow_after_kill=sum(seconds > 3.0 * usual for seconds in after_kill) if usual else 0,
        median_pause=median(seconds for _, seconds in pauses) if pauses else None,
        longest_pause_after_kill=max(story.soon_after_kill(pauses), default=None),
        joiner_caught_up=caught_up,
        joiner_samples=joiner.finished.samples if joiner and joiner.finished else 0,
        final_loss=sum(losses) / len(losses) if losses else None,
        below_bigram_at=min(below, default=None),
        identical=story.identical(),
    )


def write_report(story: Story, folder: Path) -> list[Path]:
    """Write the JSON, and the picture if matplotlib is installed.

    Returns:
        The files written.
    """
    files = [folder / "report.json"]
    files[0].write_text(json.dumps(as_json(story), indent=2) + "\n")
    try:
        draw(story, folder / "report.png")
    except ImportError:
        return files
    return [*files, folder / "report.png"]


def as_json(story: Story) -> dict[str, Any]:
    """The whole run: results first, then the data behind them. Times are seconds since training began."""
    found = findings(story)
    return {
        "peers": story.planned_peers,
        "method": story.method,
        "bytes_sent": story.bytes_sent(),
        "bytes_sent_if_gradients_were_averaged": story.synchronous_bytes() or None,
        "seconds": story.planned_seconds,
        "text": {
            "files": story.files,
            "unigram_entropy_nats_per_byte": _or_none(story.unigram_entropy),
            "bigram_entropy_nats_per_byte": _or_none(story.bigram_entropy),
        },
        "epochs": found.epochs,
        "held_out_loss_nats_per_byte": found.final_loss,
        "below_bigram_entropy_at": found.below_bigram_at,
        "parameters_bit_identical": found.identical,
        "extra_epochs_to_agree": story.repeats,
        "round_seconds": {
            "median": found.median_round,
            "slowest_within_15_s_of_the_kill": found.slowest_after_kill,
            "slow_rounds_within_15_s_of_the_kill": found.slow_after_kill,
        },
        "seconds_from_step_to_step": {
            "median": found.median_pause,
            "longest_within_15_s_of_the_kill": found.longest_pause_after_kill,
        },
        "killed": {"at": story.killed[0], "peer": story.killed[1]} if story.killed else None,
        "joined": {
            "at": story.joined[0],
            "peer": story.joined[1],
            "seconds_until_it_had_the_swarms_epoch": found.joiner_caught_up,
            "samples_contributed": found.joiner_samples,
        }
        if story.joined
        else None,
        "written_by_the_model": story.text,
        "each_peer": [_peer_as_json(peer) for peer in story.peers.values()],
    }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _peer_as_json(peer: PeerStory) -> dict[str, Any]:
    return {
        "number": peer.number,
        "peer_id": peer.peer_id,
        "state": peer.state.value,
        "epoch": peer.finished.epoch if peer.finished else None,
        "samples": peer.finished.samples if peer.finished else peer.progress.samples if peer.progress else 0,
        "held_out_loss": peer.finished.loss if peer.finished else None,
        "parameters_sha256": peer.finished.parameters_sha256 if peer.finished else None,
        "bytes_sent": peer.progress.bytes_sent if peer.progress else 0,
        "bytes_received": peer.progress.bytes_received if peer.progress else 0,
        "held_out_curve": [
            {"time": round(time, 2), "epoch": epoch, "loss": round(loss, 4)} for time, epoch, loss in peer.curve
        ],
        "rounds": [
            {"time": round(time, 2), "epoch": done.epoch, "seconds": round(done.seconds, 4), "peers": done.group_size}
            for time, done in peer.epochs
        ],
    }


def ten_lines(story: Story, files: list[Path]) -> list[str]:
    """The run in ten lines, for a reader who knows nothing about it; one more if the peers exchange little."""
    found = findings(story)
    killed_at, victim = story.killed or (float("nan"), 0)
    joined_at, newcomer = story.joined or (float("nan"), 0)
    survivors = ", ".join(str(peer.number) for peer in story.living)
    fingerprints = {peer.finished.parameters_sha256[:16] for peer in story.living if peer.finished}
    return [
        f"{story.planned_peers} peers trained one model together for {story.planned_seconds:g} s: "
        f"{found.epochs} steps of the whole swarm.",
        f"Text: {story.files} files of Python's standard library; the loss is measured on files kept aside.",
        f"Held-out loss: {_number(found.final_loss)} nats per byte at the end.",
        f"To beat: {story.unigram_entropy:.3f} (byte frequencies alone), "
        f"{story.bigram_entropy:.3f} (best model that sees one byte back); {_when_below(found)}.",
        f"Usually {_number(found.median_round, 2)} s to find each other, average and step; "
        f"{_number(found.median_pause, 2)} s from one step of the swarm to the next.",
        f"At {killed_at:.0f} s peer {victim} was killed. The slowest averaging after it took "
        f"{_number(found.slowest_after_kill, 2)} s, the longest time from step to step was "
        f"{_number(found.longest_pause_after_kill, 2)} s.",
        f"At {joined_at:.0f} s peer {newcomer} started from nothing. It had the swarm's state after "
        f"{_number(found.joiner_caught_up, 1)} s and contributed {found.joiner_samples:,} samples.",
        f"Parameters of the living peers ({survivors}) are "
        + ("identical bit for bit: sha256 " if found.identical else "NOT identical: sha256 ")
        + ", ".join(sorted(fingerprints)),
        f"The model writes: {_one_line(story.text)}",
        *_saved_bytes(story),
        "Report: " + ", ".join(str(path) for path in files),
    ]


def _saved_bytes(story: Story) -> list[str]:
    sent, synchronous = story.bytes_sent(), story.synchronous_bytes()
    if not synchronous or not sent:
        return []
    return [
        f"The living peers sent {megabytes(sent)} in all. For the same samples, averaging gradients would have taken "
        f"{megabytes(synchronous)}, {synchronous / sent:.0f} times as much."
    ]


def _number(value: float | None, digits: int = 3) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"


def _when_below(found: Findings) -> str:
    if found.below_bigram_at is None:
        return "not reached"
    return f"below both after {found.below_bigram_at:.0f} s"


def _one_line(text: str, length: int = 240) -> str:
    return repr(text[:length])


def succeeded(story: Story) -> bool:
    """Whether the run showed what it is meant to show."""
    found = findings(story)
    return (
        found.identical
        and found.final_loss is not None
        and found.final_loss < story.bigram_entropy
        and found.joiner_samples > 0
        and all(peer.state is PeerActivity.FINISHED for peer in story.living)
    )
