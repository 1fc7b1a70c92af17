"""What counts of what other peers claim. A claim costs nothing; a round with others does.

Three questions are answered here, about samples, about epochs, and about whom to wait for:

* Who was in a round is believed to have up to twice the samples that it brought there, for as long as that round took,
  and a batch more. Who has not been in any has a batch.
* A run is at the epoch that most peers have reached, this one included; whoever has not trained yet does not count
  itself. Who was in rounds is also believed that an epoch is over, if half of it has passed. Who has been away
  believes whatever the run may have reached meanwhile at its usual pace.
* This peer waits for those who take part in rounds. For others it waits, too, but in vain for a small part of its time
  only.

Before this peer's first round with others nothing is known: claims count as they are, and everybody is waited for.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from shoal.logs import Seldom
from shoal.optim.epochs import EPOCHS_AHEAD
from shoal.optim.progress import Companion, LocalTrainingProgress
from shoal.p2p import PeerID
from shoal.p2p.transport import MOST

logger = logging.getLogger(__name__)
T = TypeVar("T")

# What a peer claims may be so many times what it has delivered.
_GENEROSITY = 2.0
# Who has not been in a round for as long as so many epochs take may have missed any number of them.
_EPOCHS_TO_BE_AWAY = 2
# So many epochs say how fast the run can be.
_EPOCHS_TIMED = 16
# A peer that was waited for and did not come so many times running is treated as one that never came.
_ROUNDS_TO_LOSE_TRUST = 3
# Which part of its time this peer may wait in vain for peers that have not proven themselves.
_SHARE_WASTED = 0.05
# Who says that the epoch is over when less of it has passed, by this peer's own estimate, is not believed.
_LEAST_SHARE_OF_EPOCH = 0.5
# Nothing is divided by less.
_LEAST_SECONDS = 1e-3
# Peers about which something is remembered.
_MAX_REMEMBERED = 4096


@dataclass
class _Deeds:
    """What a peer has brought to rounds."""

    weight: float
    """Samples, in the latest rounds."""
    seconds: float
    """How long the latest round took, with the training before it."""
    missed: int = 0
    """For how many rounds running it was waited for in vain."""


def _remember(known: dict[bytes, T], peer: bytes, what: T) -> None:
    """Keep something about a peer. If that is too much, what was kept first goes."""
    known[peer] = what
    if len(known) > _MAX_REMEMBERED:
        del known[next(iter(known))]


class Evidence:
    """What this peer has seen others do. Not thread-safe: whoever owns it has a lock.

    Args:
        own: this peer.
        host_of: peers for which this is the same have one vote together.
        now: DHT time.
    """

    def __init__(self, own: bytes, host_of: Callable[[bytes], Hashable], now: float) -> None:
        self._own, self._host_of = own, host_of
        self._deeds: dict[bytes, _Deeds] = {}
        # The end of the last round with others; before that, the beginning. When this peer came to its epoch.
        self._round_ended_at = self._epoch_began_at = now
        # The epoch at which this peer was last together with others, or was given a state; and when.
        self._contact: tuple[int, float] | None = None
        # How many seconds the latest epochs took, and how many of them were spent on training.
        self._epochs: deque[tuple[float, float]] = deque(maxlen=_EPOCHS_TIMED)
        self._trained_until = now
        self._counts_itself_until = -math.inf
        # Whom this peer has begun to wait for, when, and for how many seconds at most.
        self._awaited: tuple[frozenset[bytes], float, float] = (frozenset(), now, 0.0)
        self._waits_again_at = -math.inf
        # Peers about which the user has been told; strangers can be any number of peers.
        self._doubted: dict[bytes, None] = {}
        self._missed: dict[bytes, None] = {}
        self._warn_seldom = Seldom(logger.warning)

    # --- what has happened --------------------------------------------------------------------------------------------

    def begin_to_wait(self, peers: Collection[bytes], now: float, patience: float) -> None:
        """This peer is ready for a round, and expects these others.

        Args:
            patience: seconds after which it goes on without them.
        """
        self._awaited, self._trained_until = (frozenset(peers), now, patience), now

    def note_round(self, samples: Mapping[bytes, float], now: float) -> None:
        """A round is over.

        Args:
            samples: of its members, with this peer; infinite: they are not counted. Nobody, if it has failed.
        """
        members = samples.keys() - {self._own}
        self._note_who_is_missing(members, now)
        # Whoever has nothing that counts may have been there all the same: gradients can be infinite at the start.
        if members and any(samples.values()):
            seconds, self._round_ended_at = max(now - self._round_ended_at, _LEAST_SECONDS), now
            for peer in members:
                # Who brings less once may bring more again.
                known = self._deeds.pop(peer, _Deeds(0.0, seconds))
                _remember(self._deeds, peer, _Deeds(max(samples[peer], known.weight / _GENEROSITY), seconds))

    def _note_who_is_missing(self, members: Collection[bytes], now: float) -> None:
        (awaited, since, patience), self._awaited = self._awaited, (frozenset(), now, 0.0)
        strangers = [peer for peer in awaited if peer not in members and not self.is_proven(peer)]
        if strangers:
            self._waits_again_at = now + min(now - since, patience) / _SHARE_WASTED
        for peer in members:
            if peer in self._deeds:
                self._deeds[peer].missed = 0
        # If nobody came, it may be this peer's own line.
        known = [peer for peer in awaited if peer not in members and peer in self._deeds] if members else []
        for peer in known:
            self._deeds[peer].missed += 1
        for peer in [*strangers, *(peer for peer in known if not self.is_proven(peer))]:
            self._tell_once(
                self._missed,
                peer,
                "waited in vain for peer %s, which says that it takes part and was not in the round: it is seldom "
                "waited for from now on, until it comes. Is its line too slow, or its machine stuck?",
            )

    def _tell_once(self, told: dict[bytes, None], peer: bytes, kind: str, *values: object) -> None:
        if peer not in told:
            self._warn_seldom(kind, PeerID(peer), *values)
            _remember(told, peer, None)

    def note_epoch(self, before: int, epoch: int, now: float, *, with_others: bool) -> None:
        """This peer has gone from one epoch to another.

        Args:
            with_others: in a round. If it is not the next epoch, one of them has given this peer its state.
        """
        began_at, self._epoch_began_at = self._epoch_began_at, now
        is_next = epoch == before + 1
        if is_next and not with_others:
            return
        if is_next:
            self._epochs.append((now - began_at, max(self._trained_until - began_at, _LEAST_SECONDS)))
        self._contact = epoch, now

    def note_vain_attempt(self, now: float, seconds: float) -> None:
        """Nobody has given this peer the state of the epoch that others claim, and the attempt took so long."""
        self._counts_itself_until = now + seconds / _SHARE_WASTED

    # --- what follows -------------------------------------------------------------------------------------------------

    @property
    def knows_rounds(self) -> bool:
        """Whether this peer has been in a round with others."""
        return bool(self._deeds)

    def is_proven(self, peer: bytes) -> bool:
        """Whether a peer takes part in rounds, as far as this one can know."""
        deeds = self._deeds.get(peer)
        return not self.knows_rounds or (deeds is not None and deeds.missed < _ROUNDS_TO_LOSE_TRUST)

    def whom_to_wait_for(self, peers: set[bytes], now: float) -> set[bytes]:
        """Those of several peers that claim to come for whom it is worth to wait."""
        proven = {peer for peer in peers if self.is_proven(peer)}
        # Without anybody else, those that may come are better than nobody.
        return proven if proven and now < self._waits_again_at else peers

    def most_samples(self, peer: bytes, now: float, batch_size: int) -> float:
        """How many samples a peer can have made since the last round, as far as this one can know.

        Args:
            batch_size: of this peer.
        """
        if not self.knows_rounds:
            return MOST
        if peer not in self._deeds:
            return max(1, batch_size)
        deeds = self._deeds[peer]
        rounds = max(1.0, (now - self._round_ended_at) / deeds.seconds)
        return min(MOST, _GENEROSITY * deeds.weight * rounds + max(1, batch_size))

    def limited(self, record: LocalTrainingProgress, now: float, batch_size: int) -> LocalTrainingProgress:
        """What counts of a peer's progress; the arguments are those of :meth:`most_samples`."""
        if not self.knows_rounds:
            return record
        most, deeds = self.most_samples(record.peer_id, now, batch_size), self._deeds.get(record.peer_id)
        fastest = 0.0 if deeds is None else _GENEROSITY * deeds.weight / deeds.seconds
        if record.samples_accumulated <= most and record.samples_per_second <= fastest:
            return record
        return msgspec.structs.replace(
            record,
            samples_accumulated=int(min(record.samples_accumulated, most)),
            samples_per_second=min(record.samples_per_second, fastest),
        )

    def called_end(self, companions: Mapping[bytes, Companion], epoch: int, own_estimate: float, now: float) -> float:
        """The earliest end of this epoch that others have called; infinite if nobody has.

        Args:
            own_estimate: when it ends by this peer's own estimate.
        """
        calls = [
            companion.end
            for peer, companion in companions.items()
            if companion.end is not None
            and companion.record.epoch == epoch
            and companion.is_reachable(now)
            and self.is_proven(peer)
        ]
        return max(min(calls), self._earliest_end(own_estimate)) if calls else math.inf

    def _earliest_end(self, own_estimate: float) -> float:
        """The epoch does not end before this, whoever says so."""
        if not self.knows_rounds:
            return -math.inf
        return self._epoch_began_at + _LEAST_SHARE_OF_EPOCH * (own_estimate - self._epoch_began_at)

    def credible(
        self,
        companions: Mapping[bytes, Companion],
        own: int,
        now: float,
        own_estimate: Callable[[Mapping[bytes, Companion]], float],
    ) -> dict[bytes, Companion]:
        """Those of several peers that are not beyond any epoch that the run can have reached.

        Clients lead nobody to another epoch: what they claim does no harm.

        Args:
            own: this peer's epoch.
            own_estimate: when it ends by this peer's own estimate, if only some companions count.
        """
        leading = {peer: c for peer, c in companions.items() if not c.record.client_mode and c.record.epoch > own}
        if not leading:
            return dict(companions)
        voters = [c.record for c in companions.values() if not c.record.client_mode and c.is_reachable(now)]
        last = max(self._epoch_of_most(voters, own, now), self._epoch_within_reach(own, now))
        rest = {peer: c for peer, c in companions.items() if peer not in leading or c.record.epoch <= last}
        ahead = {peer: c for peer, c in leading.items() if peer not in rest}
        if not ahead:
            return rest
        # Who is done with this epoch says that it is over.
        done = {peer: c for peer, c in ahead.items() if c.record.epoch <= own + EPOCHS_AHEAD and self.is_proven(peer)}
        if done and now >= self._earliest_end(own_estimate(rest)):
            rest.update(done)
        for peer in [peer for peer in ahead if peer not in done]:
            self._tell_once(
                self._doubted,
                peer,
                "peer %s says that it is at epoch %d, this one is at %d, and the run cannot have come so far: it does "
                "not count unless most peers say the same",
                ahead[peer].record.epoch,
                own,
            )
        return rest

    def _epoch_of_most(self, claims: Collection[LocalTrainingProgress], own: int, now: float) -> int:
        """The last epoch that most of those have reached that can be called."""
        by_host: dict[Hashable, list[int]] = {}
        for record in claims:
            by_host.setdefault(self._host_of(record.peer_id), []).append(record.epoch)
        votes = sorted(sorted(epochs)[(len(epochs) - 1) // 2] for epochs in by_host.values())
        if votes and self._contact is None and now >= self._counts_itself_until:
            # A newcomer: half of them are enough, for there may be one that it can start from, and one that lies.
            return votes[len(votes) // 2]
        votes = sorted([*votes, own])
        return votes[(len(votes) - 1) // 2]

    def _epoch_within_reach(self, own: int, now: float) -> float:
        """Which epoch somebody may have reached who went on when this peer was last with others."""
        if not self.knows_rounds:
            return own + EPOCHS_AHEAD
        if self._contact is None or not self._epochs:
            return own
        epoch, since = self._contact
        away = now - since
        if away < _EPOCHS_TO_BE_AWAY * statistics.median(whole for whole, _ in self._epochs):
            return own
        return epoch + _GENEROSITY * away / min(training for _, training in self._epochs)
