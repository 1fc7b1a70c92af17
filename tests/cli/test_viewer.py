"""What the demo shows."""

from __future__ import annotations

import io

from rich.console import Console

from shoal.cli.demo.report import PlainViewer, table_of, viewer_for
from tests.cli.synthetic_story import made_up_story


def test_no_table_without_a_terminal() -> None:
    assert isinstance(viewer_for(io.StringIO()), PlainViewer)


def test_plain_lines_come_now_and_then() -> None:
    story, stream = made_up_story(), io.StringIO()
    story.stopped, story.now = None, 40.0
    viewer = PlainViewer(stream)
    viewer.say("something happened")
    viewer.show(story)
    shown = stream.getvalue()
    assert shown.startswith("something happened\n[ 40.0 s] epoch 92")
    assert "peer 4  killed" in shown
    assert "150.0 MB" in shown
    story.now = 41.0
    viewer.show(story)
    assert stream.getvalue() == shown
    story.now = 46.0
    viewer.show(story)
    assert len(stream.getvalue()) > len(shown)


def test_table_has_a_row_for_each_peer() -> None:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(table_of(made_up_story()))
    shown = capture.get()
    for words in ("peer 1", "peer 5", "killed", "finished", "epoch 92", "4 peers seen", "held-out"):
        assert words in shown
