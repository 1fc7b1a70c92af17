"""Bringing the records of one key to the nodes that should hold them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from shoal.dht.records import NewRecord
from shoal.dht.routing import DHTID

StoreAt = Callable[[DHTID, Sequence[NewRecord]], Awaitable["list[bool] | None"]]
"""Asks a node to keep records; ``None`` if it does not answer."""


class Publication:
    """The records of one key, on their way to ``num_replicas`` nodes.

    Args:
        key_id: the key.
        num_replicas: how many nodes should answer; those that do not are replaced by the next nearest ones.
    """

    def __init__(self, key_id: DHTID, num_replicas: int) -> None:
        self.key_id = key_id
        self.records: list[NewRecord] = []
        self.answers: list[list[bool]] = []
        """What each replica said about each record, in the order of arrival."""
        self.has_answer = asyncio.Event()
        """One replica has answered, or none will."""
        self.is_finished = asyncio.Event()
        self._num_replicas = num_replicas

    def add(self, record: NewRecord) -> int:
        """Take one more record along; returns its position."""
        self.records.append(record)
        return len(self.records) - 1

    async def run(self, nodes: Iterable[DHTID], store_at: StoreAt) -> None:
        """Store at nodes in the given order, with no more attempts in flight than replicas are missing."""
        waiting = deque(nodes)
        in_flight: dict[asyncio.Task[list[bool] | None], None] = {}
        try:
            while True:
                while waiting and len(self.answers) + len(in_flight) < self._num_replicas:
                    attempt = asyncio.ensure_future(store_at(waiting.popleft(), self.records))
                    in_flight[attempt] = None
                if not in_flight:
                    return
                await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                for attempt in [attempt for attempt in in_flight if attempt.done()]:
                    del in_flight[attempt]
                    answer = attempt.result()
                    if answer is not None:
                        self.answers.append(answer)
                        self.has_answer.set()
        finally:
            for attempt in in_flight:
                attempt.cancel()
            self.has_answer.set()
            self.is_finished.set()

    def is_accepted(self, position: int) -> bool:
        """Whether most of the replicas that answered keep this record.

        A few may disagree without harm: one that has just joined and accepts what is outdated, or a dishonest one.
        """
        votes = [answer[position] for answer in self.answers]
        return sum(votes) * 2 > len(votes)
