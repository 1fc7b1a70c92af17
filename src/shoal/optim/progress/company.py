"""Which peers of a run have this peer's settings, and what this peer does if none of them has.

Peers that do not fit are told apart from those that do when they meet (:mod:`shoal.optim.progress.run_settings`). A
peer that trains with others that fit only warns of a stranger that does not. A peer without such company stops with
:class:`~shoal.errors.SettingsMismatch`, because otherwise it would train alone under the name of the run, or together
with others by other rules. One of two sides stops, and it must not be the healthy one:

- The side that stops has fewer hosts than another side. So one liar stops nobody.
- If no side has more hosts, the newcomer stops: the peer that found the other side there when it came. It has the least
  to lose. Two peers that start together may both stop: nothing tells which of them is wrong.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

from shoal.averaging.groups.settings import contradiction_of
from shoal.base.logs import Seldom, counted
from shoal.errors import SettingsMismatch
from shoal.optim.progress.run_settings import RunSettings
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)

# Seconds that a peer waits for others that fit, while only peers are there that do not.
PATIENCE = 60.0
# Seconds that it waits for the settings of peers that it has just heard of, before it says that nobody fits.
SETTLING = 10.0
# The least seconds between two looks, because each looks at all peers.
LOOK_EVERY = 1.0
MAX_PEERS = 2048
# In a log line. An error names all differences.
CHARACTERS_OF_DIFFERENCES, PEERS_SHOWN = 90, 3
RAISE, WARN = "raise", "warn"


def check_on_mismatch(on_mismatch: object) -> str:
    """Check the option, and return it.

    Raises:
        ValueError: it is neither ``"raise"`` nor ``"warn"``.
    """
    if on_mismatch not in (RAISE, WARN):
        raise ValueError(f"on_mismatch must be {RAISE!r} or {WARN!r}, got {on_mismatch!r}")
    return str(on_mismatch)


@dataclass(frozen=True)
class KnownSettings:
    """What this peer knows of the settings of another one."""

    digest: bytes
    differences: tuple[str, ...] | None = None
    """``None``: its settings have not arrived yet. Empty: it fits."""
    can_average: bool = True
    is_urgent: bool = False
    """To wait for peers that fit makes no sense."""
    was_first: bool = False
    """It was there before this peer took part."""
    refuses: bool = False
    """It has declared something else than this peer, so it refuses its state and says why."""


class Company:
    """The settings of other peers. The event loop hears them, and the training thread looks at them.

    Args:
        run_id: name of the run.
        settings: of this peer.
        on_mismatch: ``"raise"`` or ``"warn"``.
    """

    def __init__(self, run_id: str, settings: RunSettings, on_mismatch: str = RAISE) -> None:
        self.run_id, self.on_mismatch = run_id, on_mismatch
        self.own, self.digest = settings, settings.digest
        self.strangers: frozenset[bytes] = frozenset()
        """The peers with which this one cannot average."""
        self.foreign: frozenset[bytes] = frozenset()
        """Those, and the peers that have not told yet whether they can. Rounds say nothing about these: the two sides
        have not come apart, because they were never together."""
        self.refusing: frozenset[bytes] = frozenset()
        """The strangers that refuse their state, with a reason for the users of both sides."""
        self._known: dict[bytes, KnownSettings] = {}
        self._warned_of = set[bytes]()
        self._alone_since: float | None = None
        # While it is alone: whether the user knows that it waits.
        self._has_told_of_waiting = False
        self._next_look = -math.inf
        self._warn_seldom = Seldom(logger.warning, 3600.0)

    # --- what others tell ---------------------------------------------------------------------------------------------

    def knows(self, peer: bytes) -> bool:
        """Whether a peer has told a hash of its settings."""
        return peer in self._known

    def hear_digest(self, peer: bytes, digest: bytes, *, was_first: bool) -> None:
        """A peer tells a hash of its settings.

        Args:
            was_first: it was there before this peer took part.
        """
        known = self._known.get(peer)
        if known is None or known.digest != digest:
            self._note(peer, KnownSettings(digest, () if digest == self.digest else None, was_first=was_first))

    def change(self, settings: RunSettings) -> None:
        """This peer has learnt something about itself, such as the names of its parameters."""
        self.own, self.digest = settings, settings.digest

    def wants_settings_of(self, peer: bytes) -> bool:
        """Whether a peer has other settings than this one, and has not told them yet."""
        known = self._known.get(peer)
        return known is not None and known.differences is None

    def hear_settings(self, peer: bytes, settings: RunSettings, *, was_first: bool) -> None:
        """A peer tells its settings.

        Args:
            was_first: as above.
        """
        known = self._known.get(peer)
        if known is not None:  # part of the settings may be hidden, so that their hash is another one
            digest, was_first = known.digest, known.was_first
        else:
            digest = settings.digest
        can_average = self.own.can_average_with(settings)
        is_urgent = can_average or self.own.differs_in_options(settings)
        refuses = bool(contradiction_of(self.own.declared, settings.declared))
        told = tuple(self.own.differences(settings))
        self._note(peer, KnownSettings(digest, told, can_average, is_urgent, was_first, refuses))

    def _note(self, peer: bytes, known: KnownSettings) -> None:
        self._known.pop(peer, None)
        self._warned_of.discard(peer)
        while len(self._known) >= MAX_PEERS:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._warned_of.discard(oldest)
        self._known[peer] = known
        self.strangers = frozenset(p for p, each in self._known.items() if each.differences and not each.can_average)
        self.refusing = frozenset(peer for peer in self.strangers if self._known[peer].refuses)
        self.foreign = self.strangers | {p for p, each in self._known.items() if each.differences is None}

    # --- what follows -------------------------------------------------------------------------------------------------

    def look(
        self,
        present: Callable[[], Collection[bytes]],
        mates: Collection[bytes],
        now: float,
        host_of: Callable[[bytes], Hashable],
    ) -> None:
        """Warn of peers that do not fit, or stop this peer. Called by the training thread, often.

        Args:
            present: the other peers that take part and can be reached.
            mates: the members of this peer's last round. They fit, even if they cannot tell their settings.
            now: seconds of a clock that is never set.
            host_of: peers of one host have one vote.

        Raises:
            SettingsMismatch: this peer must stop.
        """
        known = dict(self._known)
        if now < self._next_look or not any(each.differences for each in known.values()):
            return
        self._next_look = now + LOOK_EVERY
        others = present()
        misfits = {peer: known[peer] for peer in others if peer in known and known[peer].differences}
        fitting = [
            peer
            for peer in others
            if (known[peer].differences == () if peer in known else peer in mates) and peer not in misfits
        ]
        if fitting or not misfits:
            self._alone_since, self._has_told_of_waiting = None, False
            self._warn_of_strangers(known)
            return
        if self._alone_since is None:
            self._alone_since = now
        is_settled = all(peer in known and known[peer].differences is not None for peer in others)
        # Of several sides the one with most hosts is most likely right.
        votes = dict.fromkeys((each.digest, host_of(peer)) for peer, each in misfits.items())
        sides = Counter(digest for digest, _ in votes)
        [(largest, hosts)] = sides.most_common(1)
        side = {peer: each for peer, each in misfits.items() if each.digest == largest}
        is_urgent = any(each.is_urgent for each in side.values())
        patience = PATIENCE if not is_urgent else 0.0 if is_settled else SETTLING
        if hosts < 2 and not any(each.was_first for each in misfits.values()):
            self._warn_of_strangers(known)
        elif now - self._alone_since >= patience:
            self._stop(side, now - self._alone_since)
        elif not is_urgent and (is_settled or now - self._alone_since >= SETTLING):
            self._tell_of_waiting(side)

    def _tell_of_waiting(self, side: dict[bytes, KnownSettings]) -> None:
        if self._has_told_of_waiting:
            return
        self._has_told_of_waiting = True
        peer, known = next(iter(side.items()))
        logger.warning(
            "waiting up to %.0f s for a peer that fits this one; peer %s does not: %s",
            PATIENCE,
            _name(peer),
            _joined(known.differences or ()),
        )

    def _warn_of_strangers(self, known: dict[bytes, KnownSettings]) -> None:
        """Also of those that have stopped by now, so that the users of both sides know."""
        for peer, each in known.items():
            if each.differences and peer not in self._warned_of:
                self._warned_of.add(peer)
                shown = _joined(each.differences)
                self._warn_seldom(
                    "peer %s does not fit this one in run %r: %s. Correct the wrong one and restart it",
                    _name(peer),
                    self.run_id,
                    shown,
                    about=shown,
                )

    def _stop(self, side: dict[bytes, KnownSettings], seconds: float) -> None:
        peers, differences = list(side), list(next(iter(side.values())).differences or ())
        names = [str(PeerID(peer)) for peer in peers]
        shown = ", ".join(map(_name, peers[:PEERS_SHOWN]))
        whom = shown if len(peers) <= PEERS_SHOWN else f"{shown} and {counted(len(peers) - PEERS_SHOWN, 'more peer')}"
        why = "nobody else with its settings is there" + (f" after {seconds:.0f} s" if seconds >= 1 else "")
        if self.on_mismatch == RAISE:
            raise SettingsMismatch(self.run_id, why, whom, differences, names)
        self._warn_seldom(
            "this peer does not fit run %r. It differs from %s: %s. It continues, because on_mismatch is 'warn'",
            self.run_id,
            whom,
            _joined(differences),
            about=tuple(differences),
        )


def _name(peer: bytes) -> str:
    return f"…{str(PeerID(peer))[-8:]}"


def _joined(differences: Collection[str]) -> str:
    """The first differences, as many as leave room for the rest of a log line, but at least one."""
    told = list(differences)
    shown = told[:1]
    for each in told[1:]:
        if len("; ".join([*shown, each])) > CHARACTERS_OF_DIFFERENCES:
            break
        shown.append(each)
    rest = len(told) - len(shown)
    return "; ".join(shown) + (f"; and {rest} more" if rest > 0 else "")
