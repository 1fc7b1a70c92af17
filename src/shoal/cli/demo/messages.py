"""What the runner and its peer processes tell each other: one JSON object per line, over pipes.

The runner writes commands to a peer's standard input and reads events from its standard output. When the input ends,
whether the runner closed it or died, the peer goes away.
"""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, tag_field="command", tag=str.lower):
    """Base of what the runner says."""


class Connect(Command):
    """Join the swarm; an empty list starts a new one."""

    initial_peers: list[str]


class Train(Command):
    """Start training."""


class StopAfter(Command):
    """Train until this epoch is complete, then measure and report."""

    epoch: int


class Write(Command):
    """Show a piece of text written by the model."""

    prompt: str
    length: int


class Leave(Command):
    """Say goodbye and exit."""


class Event(msgspec.Struct, tag_field="event", tag=str.lower):
    """Base of what a peer says."""


class Ready(Event):
    """The program is loaded and has cut the text; it waits to be connected."""

    files: int
    unigram_entropy: float
    bigram_entropy: float


class Connected(Event):
    """The peer is in the swarm, under these addresses."""

    peer_id: str
    addresses: list[str]


class CaughtUp(Event):
    """The peer has the swarm's epoch and state."""

    epoch: int


class Progress(Event):
    """How far the peer is; sent several times per second."""

    epoch: int
    samples: int
    """In averages that this peer took part in, and in the one that it is gathering for."""
    samples_per_second: float
    loss: float
    """Mean training loss since the last epoch, nats per byte."""
    bytes_sent: int
    bytes_received: int
    peers_seen: int
    """How many peers this one knows to be training, itself included."""


class EpochDone(Event):
    """One step of the whole swarm."""

    epoch: int
    seconds: float
    """How long this peer waited in it: finding the group, averaging, the optimizer's step."""
    group_size: int
    """How many peers averaged together; 1 when this peer went on alone."""


class Measured(Event):
    """Loss on the held-out text, nats per byte."""

    epoch: int
    loss: float


class Finished(Event):
    """The last epoch is complete."""

    epoch: int
    samples: int
    """In averages that this peer took part in."""
    loss: float
    """On the held-out text, measured on many more windows than during training."""
    parameters_sha256: str


class Wrote(Event):
    text: str


AnyCommand = Connect | Train | StopAfter | Write | Leave
AnyEvent = Ready | Connected | CaughtUp | Progress | EpochDone | Measured | Finished | Wrote

_encoder = msgspec.json.Encoder()
_commands = msgspec.json.Decoder(AnyCommand)
_events = msgspec.json.Decoder(AnyEvent)


def to_line(message: Command | Event) -> bytes:
    """One message as a line of JSON."""
    return _encoder.encode(message) + b"\n"


def command_from(line: bytes) -> AnyCommand:
    """The command in a line; ``msgspec.DecodeError`` if there is none."""
    command: AnyCommand = _commands.decode(line)
    return command


def event_from(line: bytes) -> AnyEvent:
    """The event in a line; ``msgspec.DecodeError`` if there is none."""
    event: AnyEvent = _events.decode(line)
    return event
