"""A run in the terminal: the swarm in a few lines, a table of peers, and the latest events."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.base.logs import counted, one_line, short_id, size
from shoal.monitor.run import Event, PeerState, PeerView, RunView, Summary
from shoal.monitor.stages import StageRow

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

COLUMNS = (
    "peer",
    "state",
    "epoch",
    "samples/s",
    "loss",
    "sent",
    "received",
    "step",
    "averaging",
    "failed",
    "link",
    "version",
)
# If there is no room for all columns, the first of these are shown.
BY_IMPORTANCE = (
    *("peer", "state", "epoch", "samples/s", "loss", "failed", "step", "link", "sent", "received"),
    *("averaging", "version"),
)
USUAL_WIDTH = 160  # chosen: all columns fit
STATE_COLOURS = {
    PeerState.TRAINING: "green",
    PeerState.BEHIND: "yellow",
    PeerState.SILENT: "yellow",
    PeerState.LOST: "red",
    PeerState.LEFT: "dim",
}
EVENT_COLOURS = {
    **{"lost": "red", "failed": "red", "trouble": "yellow"},
    **{"joined": "green", "returned": "green", "goal": "bold green"},
}
MOST_STAGES = 8
"""The most stages in the terminal; if there are more, those that do least are shown. Chosen."""
MOST_FIGURES = 6
"""The most figures in the line of the swarm; the page has them all. Chosen."""


def span(seconds: float) -> str:
    """A length of time in words."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def labels_of(peers: Sequence[PeerView]) -> list[str]:
    """A label for each peer: its name, or the end of its id if it has none or shares its name."""
    names = [peer.told_name for peer in peers]
    uses = Counter(names)
    return [
        name if name and uses[name] == 1 else short_id(str(peer.peer)) for name, peer in zip(names, peers, strict=True)
    ]


def cells(view: PeerView, label: str) -> tuple[str, ...]:
    """One peer's cells, in the order of ``COLUMNS``."""
    report, loss = view.report, view.loss
    told = label, view.state.value, str(view.epoch), f"{view.samples_per_second:,.1f}"
    if report is None:
        return (*told, *["–"] * 6, view.link, "–")
    return (
        *told,
        "–" if loss is None else f"{loss:.4g}",
        size(report.bytes_sent),
        size(report.bytes_received),
        f"{report.step_seconds:.1f} s" if report.step_seconds else "–",
        f"{report.averaging_seconds:.1f} s" if report.step_seconds else "–",
        str(report.rounds_failed),
        view.link,
        one_line(report.version),
    )


def headline(run: str, summary: Summary | None, *, has_stages: bool = False) -> str:
    """The swarm in one line, as far as known. If a run has stages, its peers are those that drive."""
    peer = "driver" if has_stages else "peer"
    if summary is None or not summary.states:
        was_there = summary is not None and summary.epoch > 0
        return f"{run}: all {peer}s are gone" if was_there else f"{run}: no {peer} has been seen yet"
    epoch = f"{run}: epoch {summary.epoch}" + (f" of {summary.goal}" if summary.goal else "")
    if not summary.peers:
        return f"{epoch}  |  all {peer}s are gone"
    parts = [epoch, counted(summary.peers, peer), f"{summary.throughput:,.1f} samples/s"]
    # Only some figures are shown: one peer alone could fill the screen with names.
    figures = sorted(summary.means.items(), key=is_not_loss)[:MOST_FIGURES]
    parts += [f"{name} {mean:.4g}" for name, mean in figures]
    if not math.isnan(summary.step):
        parts.append(
            f"{summary.step:.1f} s from step to step ({summary.computing:.1f} computing, "
            f"{summary.waiting:.1f} waiting, {summary.averaging:.1f} averaging)"
        )
        parts += [] if math.isnan(summary.sent) else [f"{size(summary.sent)}/s sent"]
    if not math.isnan(summary.batch):
        wanted = "" if math.isnan(summary.target) else f" of {summary.target:,.0f}"
        parts.append(f"{summary.batch:,.0f}{wanted} samples in the last step")
    parts += [] if math.isnan(summary.samples) else [f"{summary.samples:,.0f} samples so far"]
    parts += [] if math.isnan(summary.age) else [f"runs for {span(summary.age)}"]
    if summary.goal:
        parts += [] if math.isnan(summary.left) else [f"{span(summary.left)} to epoch {summary.goal}"]
    if len(summary.versions) > 1:
        parts.append("versions " + ", ".join(f"{name} ({count})" for name, count in summary.versions.items()))
    return "  |  ".join(parts)


def is_not_loss(figure: tuple[str, float]) -> bool:
    """Sorts the loss before all other figures."""
    return figure[0] != "loss"


def line_of(event: Event) -> str:
    """An event as a line of text."""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {event.text}"


def order_of(view: PeerView) -> tuple[Any, ...]:
    """Sort key: peers in trouble first, because they are few, and then the fastest."""
    trouble = (PeerState.SILENT, PeerState.LOST, PeerState.BEHIND, PeerState.TRAINING, PeerState.LEFT)
    return trouble.index(view.state), -view.samples_per_second, str(view.peer)


def columns_that_fit(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The numbers of the columns that fit, in order."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    fitting, left = list[int](), width
    for index in map(COLUMNS.index, BY_IMPORTANCE):
        left -= min(widths[index], widest(COLUMNS[index])) + 3  # with the space between columns
        if left < 0:
            break
        fitting.append(index)
    return sorted(fitting)


def widest(column: str) -> int:
    """The most characters that a column takes."""
    return 20 if column == "peer" else 12


def table_of(view: RunView, rows: int, width: int = USUAL_WIDTH) -> Table:
    """The table of peers, at most ``rows`` of them."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True, box=box.SIMPLE_HEAD, pad_edge=False)
    peers = sorted(view.peers.values(), key=order_of)
    told = [cells(peer, label) for peer, label in zip(peers, labels_of(peers[:rows]), strict=False)]
    fitting = columns_that_fit(told, width)
    for name in (COLUMNS[index] for index in fitting):
        is_text = name in ("peer", "state", "link", "version")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True, max_width=widest(name))
    for peer, row in zip(peers, told, strict=False):
        # Texts of peers are shown literally, even if they look like markup.
        shown = [Text(row[index], STATE_COLOURS[peer.state] if COLUMNS[index] == "state" else "") for index in fitting]
        table.add_row(*shown)
    if len(peers) > rows:
        table.caption = f"and {len(peers) - rows} more"
    return table


def stages_line(rows: Sequence[StageRow]) -> str:
    """The stages in one line; empty if the model is not cut into stages."""
    if not rows:
        return ""
    known = [row.rate for row in rows if row.rate is not None]
    parts = [counted(len(rows), "stage"), f"{sum(row.serving for row in rows)} peers hold them"]
    parts += [f"up to {min(known):.3g} microbatches/s" if min(known) else "no microbatch can pass"] if known else []
    slow = [str(row.stage) for row in rows if row.is_bottleneck]
    if slow:
        parts.append(f"bottleneck: stage {', '.join(slow)}")
    return "  |  ".join(parts)


def table_of_stages(rows: Sequence[StageRow], most: int = MOST_STAGES) -> Table:
    """The table of stages, at most this many of them."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "peers", "microbatches/s", "queue", "epoch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    slowest = sorted(rows, key=lambda row: (math.inf if row.rate is None else row.rate, row.stage))[:most]
    for row in sorted(slowest, key=lambda row: row.stage):
        moving = [(row.joining, "joining"), (row.leaving, "leaving")]
        notes = [f"{count} {state}" for count, state in moving if count]
        notes = ["bottleneck" if row.serving else "no peer: microbatches wait", *notes] if row.is_bottleneck else notes
        table.add_row(
            str(row.stage),
            str(row.serving),
            "–" if row.rate is None else f"{row.rate:.3g}",
            str(row.queue),
            "–" if row.epoch is None else str(row.epoch),
            ", ".join(notes),
            style="red" if row.is_bottleneck and not row.serving else "yellow" if row.is_bottleneck else "",
        )
    if len(rows) > most:
        table.caption = f"and {len(rows) - most} more, which do more"
    return table


def render(view: RunView, height: int, footer: str = "", width: int = USUAL_WIDTH) -> RenderableType:
    """The content of the terminal.

    Args:
        height: number of lines.
        footer: one more line, such as the address of the page.
        width: characters of a line.
    """
    from rich.console import Group
    from rich.text import Text

    with view.lock:
        events, stages = view.events.rare[-8:], view.stages.rows
        lines = [Text(line_of(event), style=EVENT_COLOURS.get(event.kind, "")) for event in events]
        parts: list[RenderableType] = [Text(headline(view.run, view.summary, has_stages=bool(stages)), style="bold")]
        rows = height - 8 - len(events)  # eight lines are around the table
        if stages:
            shown = min(len(stages), MOST_STAGES, max(2, rows // 2))
            parts += [Text(stages_line(stages)), table_of_stages(stages, shown)]
            rows -= shown + 4 + (len(stages) > shown)
        if view.peers or not stages:
            parts.append(table_of(view, max(3, rows), width))
    return Group(*parts, *lines, Text(footer, style="dim"))


class Screen:
    """Shows a run in the terminal, in place. A context manager."""

    def __init__(self, footer: str = "") -> None:
        from rich.console import Console
        from rich.live import Live

        self._console, self._footer = Console(highlight=False), footer
        self._live = Live(console=self._console, auto_refresh=False, screen=True)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, view: RunView) -> None:
        """Show how the run is now."""
        self._live.update(render(view, self._console.height, self._footer, self._console.width), refresh=True)


class Lines:
    """Prints a run as lines of text, for logs: each event but epochs, and the state of the swarm now and then."""

    EVERY_SECONDS = 10.0

    def __init__(self) -> None:
        self._next = 0.0
        self._told = 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        """There is nothing to end."""

    def show(self, view: RunView) -> None:
        """Print what is new."""
        with view.lock:
            events, self._told = view.events.since(self._told), view.events.count
            stages = stages_line(view.stages.rows)
            line = headline(view.run, view.summary, has_stages=bool(stages))
        for event in events:
            if event.kind != "epoch":
                print(line_of(event), flush=True)
        if view.is_complete and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.EVERY_SECONDS
            print(line, *([stages] if stages else []), sep="  |  ", flush=True)
