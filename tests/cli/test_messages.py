"""Lines between the runner and its peers."""

from __future__ import annotations

import msgspec
import pytest

from shoal.cli.demo import messages
from shoal.cli.demo.messages import command_from, event_from, to_line

COMMANDS = [
    messages.JoinSwarm(["/ip4/127.0.0.1/tcp/1/p2p/12D3KooW"]),
    messages.Train(),
    messages.StopAfter(7),
    messages.Write("def ", 10),
    messages.Leave(),
]
EVENTS = [
    messages.TextReady(3, 3.1, 2.4),
    messages.SwarmJoined("12D3KooW", []),
    messages.CaughtUp(3),
    messages.Progress(1, 2, 3.0, 4.0, 5, 6, 7),
    messages.EpochDone(1, 0.5, 4),
    messages.Measured(1, 2.0),
    messages.Finished(1, 2, 3.0, "ab"),
    messages.Wrote("line\nbreak \N{GREEK SMALL LETTER ALPHA} \ufffd"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_survive(command: messages.AnyCommand) -> None:
    line = to_line(command)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert command_from(line) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive(event: messages.AnyEvent) -> None:
    line = to_line(event)
    assert line.count(b"\n") == 1
    assert event_from(line) == event


def test_a_command_is_not_an_event() -> None:
    with pytest.raises(msgspec.ValidationError):
        event_from(to_line(messages.Train()))
