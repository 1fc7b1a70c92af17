"""Dials a peer: all of its known addresses, each a little later than the one before, direct ones first.

Then come relays; those through which connections have broken in the last minute come last.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar

from shoal.errors import (
    DialError,
    NoRelayError,
    NoReservationError,
    NotAMemberError,
    P2PDaemonError,
    kind_of_dial_errors,
)
from shoal.metrics import Metrics
from shoal.net.addresses import AddressBook, Judge
from shoal.net.transport import MAY_CONNECT, ON_ANSWER, Stream, Transport
from shoal.peers.book import PeerBook
from shoal.peers.identity import PeerID, is_circuit, relay_of
from shoal.peers.multiaddr import Multiaddr

# Seconds after which the next address of a peer is tried in parallel with the one that has not answered yet.
DIAL_STAGGER = 0.25
# The same after a machine has answered there: the handshake of two busy machines takes long, and two take longer.
HANDSHAKE_STAGGER = 2.0
# The same for the next relay of a peer, because each needs a few round trips.
CIRCUIT_STAGGER = 1.5
CIRCUIT_SECONDS = 10.0
"""How long the way through one relay may take."""

BROKEN_RELAY_SECONDS = 60.0  # a relay that has fallen silent, or ended a connection, is tried last

DIRECT_ONLY: ContextVar[bool] = ContextVar("DIRECT_ONLY", default=False)
"""A relay itself is being dialled, so that no other relay may come into it."""


class Dialler:
    """Dials peers at their known addresses; :meth:`close` gives up all dials at once.

    Args:
        transport: opens the streams.
        addresses: where peers can be dialled.
        book: remembers which relays have fallen silent.
        metrics: counts the dials.
        dial_circuit: dials through a relay; ``None``: relays are not used.
    """

    def __init__(
        self,
        transport: Transport,
        addresses: AddressBook,
        book: PeerBook,
        metrics: Metrics,
        dial_circuit: Callable[[Multiaddr, PeerID], Awaitable[Stream]] | None = None,
    ) -> None:
        self._transport = transport
        self._addresses = addresses
        self._book = book
        self._metrics = metrics
        self.dial_circuit = dial_circuit
        self.tasks: dict[asyncio.Task[Stream], None] = {}
        """Dials in progress."""
        self._closed = False

    async def dial(self, peer: PeerID) -> Stream:
        """Dial the addresses of a peer, each a little later than the one before; the first success wins.

        Raises:
            DialError: no address is known, or none answers as that peer.
            RefusedDialError: nothing listens at any of them.
            P2PDaemonError: this peer is shut down.
        """
        addresses = [*self.direct_addresses(peer), *self.circuits(peer)]
        if not addresses and (doubtful := set(self._addresses.get(peer)) - set(self._addresses.to_dial(peer))):
            told = ", ".join(sorted(map(str, doubtful)))
            raise DialError(
                f"no address of peer {peer} is known: it says that it is at {told}, and is seen elsewhere. A private "
                "address counts only if it is seen in a private network; let it announce a public one (announce_maddrs)"
            )
        if not addresses:
            raise DialError(f"no address of peer {peer} is known: it may be in client mode, or it has left")
        return await self._dial_first(peer, addresses)

    def direct_addresses(self, peer: PeerID) -> list[Multiaddr]:
        """Where a peer itself may be, in the order to try."""
        direct = [each for each in self._addresses.to_dial(peer) if not is_circuit(each)]
        return self._transport.worth_dialling(direct, have_others=bool(self.circuits(peer)))

    def circuits(self, peer: PeerID) -> list[Multiaddr]:
        """Its addresses at relays that this peer can dial, in the order to try."""
        if self.dial_circuit is None or DIRECT_ONLY.get():
            return []
        since = asyncio.get_running_loop().time() - BROKEN_RELAY_SECONDS

        def broken_at(address: Multiaddr) -> float:
            relay = relay_of(address)
            return since if relay is None else max(since, self._book.find(relay[1]).silent_at)

        return sorted(filter(self.supports_circuit, self._addresses.to_dial(peer)), key=broken_at)

    def note_broken(self, relay: PeerID) -> None:
        """A connection through a relay has broken, or the one to itself: others are dialled first for a while."""
        self._book[relay].silent_at = asyncio.get_running_loop().time()

    def supports_circuit(self, address: Multiaddr) -> bool:
        """Whether an address leads through a relay that this peer can dial."""
        relay = relay_of(address)
        return relay is not None and self._transport.supports(relay[0])

    async def dial_address(self, peer: PeerID, address: Multiaddr, judge: Judge | None = None) -> Stream:
        """Dial one address of a peer; raises what :meth:`dial` raises.

        Args:
            judge: whether an IP address may be connected to.
        """
        return await self._dial_first(peer, [address], judge)

    async def meet(self, address: Multiaddr) -> Stream:
        """Dial an address whose peer is not known; the stream says which one has proven to be there.

        Raises:
            DialError: no peer answers there.
            P2PDaemonError: this peer is shut down.
        """
        dial = self._start(None, address, set())
        try:
            await asyncio.wait([dial])
        except asyncio.CancelledError:
            dial.add_done_callback(_abort_late)
            dial.cancel()
            raise
        if dial.cancelled():
            raise P2PDaemonError("this peer is shut down")
        return dial.result()

    async def _dial_first(self, peer: PeerID, addresses: Sequence[Multiaddr], judge: Judge | None = None) -> Stream:
        dials: dict[asyncio.Task[Stream], Multiaddr] = {}
        errors: list[BaseException] = []
        waiting, answered = list(addresses), set[Multiaddr]()
        try:
            while waiting or dials:
                if waiting:
                    address = waiting.pop(0)
                    dials[self._start(peer, address, answered, judge)] = address
                stagger = CIRCUIT_STAGGER if is_circuit(address) else DIAL_STAGGER
                await asyncio.wait(dials, timeout=stagger if waiting else None, return_when=asyncio.FIRST_COMPLETED)
                if waiting and address in answered and not any(task.done() for task in dials):
                    await asyncio.wait(dials, timeout=HANDSHAKE_STAGGER - stagger, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in dials if task.done()]:
                    address = dials.pop(task)
                    error = asyncio.CancelledError() if task.cancelled() else task.exception()
                    if error is None:
                        self._addresses.prefer(peer, address)
                        self._metrics.dials_direct += not is_circuit(address)
                        return task.result()
                    errors.append(self._addresses.judged(peer, address, error))
                    if isinstance(error, NoReservationError):
                        self._addresses.forget(peer, address)
        finally:
            for task in dials:
                task.add_done_callback(_abort_late)
                task.cancel()
        if self._closed:
            raise P2PDaemonError("this peer is shut down")
        refusal = next((error for error in errors if isinstance(error, NotAMemberError)), errors[0])
        if all(isinstance(error, NoRelayError) for error in errors):
            raise NoRelayError(
                f"only relayed addresses of peer {peer} are known, and no relay answers: "
                f"{'; '.join(map(str, errors))}. Wait, because it will choose others; or restart that peer"
            )
        if len(errors) == 1 or isinstance(refusal, NotAMemberError):
            raise refusal
        raise kind_of_dial_errors(errors)(f"cannot reach peer {peer}: " + "; ".join(map(str, errors)))

    def _start(
        self, peer: PeerID | None, address: Multiaddr, answered: set[Multiaddr], judge: Judge | None = None
    ) -> asyncio.Task[Stream]:
        if self._closed:
            raise P2PDaemonError("this peer is shut down")
        if peer is not None and is_circuit(address) and self.dial_circuit is not None:
            task = asyncio.ensure_future(self.dial_circuit(address, peer))
        else:
            if judge is None and peer is not None:
                judge = self._addresses.judge_of(peer, address)
            task = asyncio.ensure_future(self._dial_directly(peer, address, answered, judge))
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)
        return task

    async def _dial_directly(
        self, peer: PeerID | None, address: Multiaddr, answered: set[Multiaddr], judge: Judge | None
    ) -> Stream:
        MAY_CONNECT.set(judge)
        ON_ANSWER.set(functools.partial(answered.add, address))
        return await self._transport.dial(address, peer)

    async def close(self) -> None:
        """Give up every dial in progress."""
        self._closed = True
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _abort_late(task: asyncio.Task[Stream]) -> None:
    """Abort a late success: another address was faster, or nobody waits any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()
