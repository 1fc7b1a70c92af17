"""The picture of a run: how the held-out loss of every peer fell, and what happened on the way."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shoal.cli.demo.story import Story

# Told apart by colour-blind readers too.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#555555"


def draw(story: Story, path: Path) -> None:
    """Draw the run into a PNG file."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    losses, rounds = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_losses(losses, story)
    _draw_rounds(rounds, story)
    _draw_events(losses, rounds, story)
    figure.savefig(path, dpi=120)


def _draw_losses(axes: Axes, story: Story) -> None:
    for peer, colour, marker in zip(story.peers.values(), COLOURS * 99, MARKERS * 99, strict=False):
        times, values = [time for time, _, _ in peer.curve], [loss for _, _, loss in peer.curve]
        axes.plot(times, values, color=colour, marker=marker, markersize=6, linewidth=1.2, alpha=0.85, label=peer.name)
    levels = [(story.unigram_entropy, "knows only how frequent each byte is (unigram entropy)")]
    levels += [(story.bigram_entropy, "best possible when one byte back is known (bigram entropy)")]
    for level, meaning in levels:
        axes.axhline(level, color=GREY, linewidth=1, linestyle="--")
        axes.annotate(
            f"{level:.2f}  {meaning}", (1, level), (-4, 3), ("axes fraction", "data"), "offset points", ha="right"
        )
    axes.set_ylabel("held-out loss, nats per byte")
    axes.set_title(f"{story.planned_peers} peers train one model; one is killed, a new one joins")
    if story.peers:
        axes.legend(loc="upper right", bbox_to_anchor=(1, 0.93))


def _draw_rounds(axes: Axes, story: Story) -> None:
    rounds, pauses = story.rounds().values(), story.pauses()
    axes.plot([time for time, _ in pauses], [s for _, s in pauses], ".-", color="#bbbbbb", label="from step to step")
    axes.plot([time for time, _ in rounds], [s for _, s in rounds], ".", color=COLOURS[0], label="averaging")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds")
    axes.set_xlabel("seconds of training")
    axes.legend(loc="upper right")


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
        place = (time, 0.72 - 0.07 * line)
        losses.annotate(label, place, (4, 0), ("data", "axes fraction"), "offset points", color=colour)
