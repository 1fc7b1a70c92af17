"""Plain counters of what this process did, in one place, for whoever wants to watch it.

Every peer owns one :class:`Metrics`. The fields are plain numbers, written by the event loop alone and read from
anywhere. All but ``clock_offset`` only grow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Metrics:
    bytes_sent: int = 0
    """Bytes of messages written to other peers, before encryption."""
    bytes_sent_by_handler: Counter[str] = field(default_factory=Counter)
    """The same by the handler that is called, questions and answers alike; greetings go with the first call."""
    bytes_received: int = 0
    """Bytes of messages read from other peers, after decryption."""
    connections_dialled: int = 0
    """Connections that this peer opened and that were authenticated."""
    connections_accepted: int = 0
    """Connections that others opened to this peer and that were authenticated."""
    dials_failed: int = 0
    """Attempts to reach an address that came to nothing."""
    calls_made: int = 0
    calls_failed: int = 0
    calls_served: int = 0
    calls_refused: Counter[str] = field(default_factory=Counter)
    """Calls of others that this peer did not serve, by reason."""
    connections_dropped: Counter[str] = field(default_factory=Counter)
    """Connections that this peer refused or dropped, by reason."""
    hops_to_records: Counter[int] = field(default_factory=Counter)
    """Gets that found a record, by the number of answers in the chain that led there; 0 = this node had it itself."""
    clock_offset: float = 0.0
    """Seconds by which the clock of this machine is ahead of the swarm, for which shoal corrects; 0 if it is right."""
    rounds_succeeded: int = 0
    """Averaging rounds that brought a result, whole or in part."""
    rounds_failed: int = 0
    """Averaging rounds that brought none."""
    seconds_averaging: float = 0.0
    """Time spent in the all-reduce of successful rounds."""
    members_lost: int = 0
    """Group members that failed during an all-reduce, as sender or as reducer."""
