"""One fragment at one peer: what it sends, how that counts, and how the result gets into the model."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from shoal.averaging import RoundResult
from shoal.averaging.finite import all_finite
from shoal.base.logs import Seldom
from shoal.compression.base import bytes_of
from shoal.errors import AllreduceException
from shoal.optim.diloco.compressor import Compressor
from shoal.optim.diloco.fragments import Fragment
from shoal.optim.diloco.in_flight import PARAMETERS, Flight, OuterRound, VersionRelation
from shoal.optim.diloco.merge_policy import MergePolicy, shift
from shoal.optim.diloco.outer_state import OuterState
from shoal.optim.diloco.update_log import KeptResults, LoggedUpdate, OuterParameters, packed, unpacked, who_counted
from shoal.optim.diloco.version_history import (
    OuterStatement,
    OuterVersion,
    VersionHistory,
    has_other_bits,
    hash_of,
    next_link,
    parse_links,
    settle,
    steps_between,
)
from shoal.optim.diloco.weights import Effort, Staleness, discount
from shoal.optim.recovery.state_holder import refusing_nonsense
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)


class FragmentUpdates:
    """A fragment, its outer parameters, and what this peer has done for its next update.

    The training thread calls its methods, except for :meth:`judge`.

    Args:
        number: of the fragment.
        fragment: the parameters of the model.
        state: the outer parameters.
        mixing: how results get into the model.
        average: one of :data:`~shoal.optim.diloco.in_flight.AVERAGES`.
        staleness: makes old contributions smaller.
        max_staleness: older ones do not count.
        lock: held while outer parameters change, so that newcomers get whole states.
        compressor: keeps what messages leave out; ``None``: that is lost.
        check_every: members compare the bits of their outer parameters after so many updates; 0: never.
        own: id of this peer.
    """

    def __init__(
        self,
        number: int,
        fragment: Fragment,
        state: OuterState,
        mixing: MergePolicy,
        average: str,
        staleness: Staleness,
        max_staleness: int,
        lock: threading.RLock,
        compressor: Compressor | None = None,
        check_every: int = 0,
        own: bytes = b"",
    ) -> None:
        self.number, self.fragment, self.state, self._mixing = number, fragment, state, mixing
        self._average, self._staleness, self._max_staleness = average, staleness, max_staleness
        self._lock, self._check_every = lock, check_every
        self.own, self.compressor = own, compressor
        self.chain = VersionHistory.begin(state.values, max_staleness + 1)
        self.effort = Effort()
        """Since the last contribution that counted."""
        self.age = 0
        """By how many versions the outer parameters have moved since then."""
        self.flight: Flight | None = None
        self.standing = VersionRelation.GOOD
        """As the last round has shown."""
        self.may_lack_updates = False
        """Whether a round has failed here since others were asked for updates: they may have had it all the same."""
        self._warn_seldom = Seldom(logger.warning)
        self.is_fresh = False
        """This peer has just joined, and has not been in a slot of this fragment from the beginning."""
        self.kept = KeptResults(fragment.length)
        """For peers that have missed them."""
        # By version: results of rounds to which this peer has come without what they update.
        self._later: dict[int, LoggedUpdate] = {}
        # The newest version that this peer lacked, by what its groups have told. Counts while it is behind.
        self._known: OuterVersion | None = None
        # A round that has failed here. Its message may have counted all the same: the others' update tells that.
        self._unsure: Flight | None = None

    def count(self, samples: int) -> None:
        """An inner step has been made with so many samples; 0: it has not moved the model."""
        if samples:
            self.effort += Effort(1, samples)
        if self.flight is not None:
            self.flight.steps_since += 1
            if self.flight.left:
                self.flight.left -= 1

    # --- sending ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, slot: int, vector: torch.Tensor, delay: int | None, weighting: str, least_steps: int = 0) -> Flight:
        """Write the message of this peer into a vector. The round may begin.

        Args:
            delay: inner steps until the result is applied; ``None``: as many as the round takes.
            weighting: see :meth:`~shoal.optim.diloco.weights.Effort.weight`.
            least_steps: with fewer inner steps behind it the message does not count.
        """
        assert self.flight is None, "a fragment has at most one round at a time"
        if self.age > self._max_staleness:
            logger.warning(
                "fragment %d: %d inner steps of this peer have not counted for %d updates of the others, and are lost. "
                "It goes on from the outer parameters",
                self.number,
                self.effort.steps,
                self.age,
            )
            self.reset_model()
        local = self.fragment.read()
        if self._average == PARAMETERS:
            vector.copy_(local)
        else:
            vector.copy_(self.fragment.rounded(self.state.values)).sub_(local)
        is_finite = all_finite(vector)
        counts = is_finite and self.effort.steps >= least_steps
        weight = self.effort.weight(weighting) if counts else 0.0
        sent = local if self._mixing.is_rebase and delay != 0 else None
        outgoing = self.compressor.prepare(vector) if self.compressor is not None and is_finite else None
        self.flight = Flight(slot, self.effort, sent, delay, is_finite, weight, outgoing)
        return self.flight

    def statement(self, expected: int, done: int = 0) -> OuterStatement:
        """What this peer tells its group; it expects so many members, and has done so much in the slot."""
        newest, every = self.chain.newest, self._check_every
        is_compared = every and newest.version and newest.version % every == 0 and self._average != PARAMETERS
        digest = hash_of(bytes_of(self.state.values)) if is_compared else b""
        # No samples: this message will not count, and is not missed when it is asked whether most have counted.
        effort = self.effort if self.flight is None or self.flight.weight else Effort()
        return OuterStatement(self.chain.links, effort.steps, effort.samples, expected, digest, done, self.heard_of)

    def judge(
        self,
        statements: Sequence[OuterStatement | None],
        own: int,
        group_id: bytes = b"",
        clients: Collection[int] = (),
    ) -> tuple[bool, float]:
        """Decide how this peer's message counts. Called in the event loop when the group is complete.

        Args:
            statements: of all members.
            own: position of this peer.
            group_id: of the group.
            clients: positions of members from which nobody can download anything.

        Returns:
            Whether it counts, and the factor by which it is to be made smaller now.

        Raises:
            AllreduceException: too few members have come for an update that all will have.
        """
        flight, mine = self.flight, statements[own]
        if flight is None or mine is None:
            raise AllreduceException("this peer has given up the round")
        told = [statement for statement in statements if statement is not None]
        flight.hear(statements)
        if self._average == PARAMETERS:
            return True, 1.0
        expected = sorted(statement.expected for statement in told)[len(told) // 2]
        if 2 * len(told) <= expected:
            raise AllreduceException(f"only {len(told)} of {expected} members have come, which is no majority")
        verdict = settle(statements, clients)
        behind, base = verdict.behind.get(own), verdict.base
        assert base is not None, "this peer has said what it has"
        flight.begin_from(base, statements)
        flight.standing = (
            VersionRelation.LOST if behind is None else VersionRelation.BEHIND if behind else VersionRelation.GOOD
        )
        if behind == 0 and has_other_bits(statements, own, clients):
            self._warn_seldom(
                "fragment %d is not that of most others after the same updates: this peer takes theirs. Machines "
                "round differently; outer SGD does not",
                self.number,
                about="bits",
            )
            flight.standing = VersionRelation.LOST
        if flight.standing is VersionRelation.GOOD and (heard_of := self.heard_of) and base.version < heard_of.version:
            # All members lack what others have: an update of what they have would be a second one. Or this peer has it
            # by now, and its statement is older than that.
            flight.base = None
            flight.standing = VersionRelation.BEHIND if self.standing is VersionRelation.GOOD else self.standing
        elif flight.standing is VersionRelation.BEHIND:
            flight.known = max(base, flight.known or base)
        elif flight.standing is VersionRelation.LOST:  # what it has heard of before is not what goes on
            flight.known, self._known = base, None
        if flight.standing is not VersionRelation.GOOD:
            return False, 1.0
        flight.attempts.add(group_id)
        if flight.factor is not None:  # this is another attempt, with the same vector
            return True, 1.0
        flight.factor = discount(self._staleness, self.age)
        return True, flight.factor

    @property
    def heard_of(self) -> OuterVersion | None:
        """The newest version that this peer lacks, by what groups have told; ``None``: it lacks none."""
        earlier = None if self.standing is VersionRelation.GOOD else self._known
        now = None if self.flight is None else self.flight.known
        return max(filter(None, [earlier, now]), default=None)

    def reduce_message(self, vector: torch.Tensor, factor: float) -> None:
        """Make this peer's message smaller, because it is old. Called in a worker thread while a round begins."""
        flight = self.flight
        if flight is not None and flight.outgoing is not None and self.compressor is not None:
            flight.outgoing = self.compressor.reduced(flight.outgoing, factor)
        else:
            vector.mul_(factor)

    # --- the result ---------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """The round has failed: all is as it was, and what this peer has done counts next time."""
        flight, heard_of, self.flight = self.flight, self.heard_of, None
        self.may_lack_updates = self._average != PARAMETERS
        if flight is not None and flight.standing is not VersionRelation.GOOD:
            self._known, self.standing = heard_of, flight.standing
        elif flight is not None and flight.attempts and flight.weight:
            self._unsure = flight
            flight.sent = flight.sent if flight.steps_since else self.fragment.read()

    @torch.no_grad()
    def land(self, vector: torch.Tensor, result: RoundResult | None, own: PeerID) -> OuterRound | None:
        """Make the outer update, and bring it into the model.

        Args:
            vector: the mean, or this peer's own message if it is alone.
            result: of the round; ``None``: this peer is alone.

        Returns:
            ``None`` if there is nothing that all members have: then nothing has changed.
        """
        flight = self.flight
        assert flight is not None, "there is no round whose result could be applied"
        own = flight.own or own
        weights = () if result is None else result.weights
        has_most = result is None or flight.has_most(weights)
        is_whole = result is None or (result.share_averaged == 1 and any(weights) and has_most)
        if not has_most:
            self._warn_seldom(
                "the messages of most members of a round did not count, so it may have been split: no update is made, "
                "and what this peer has done counts next time"
            )
        if flight.standing is not VersionRelation.GOOD or not is_whole or not all_finite(vector):
            is_behind = flight.standing is VersionRelation.BEHIND and flight.base is not None
            self.give_up()
            if is_behind:
                self._keep_for_later(flight, vector if is_whole and all_finite(vector) else None, result)
                self.make_up()  # it may have what it lacked by now
            return None
        if result is None:
            samples, names, contributed = flight.effort.samples, b"", flight.weight > 0
        else:
            weight = dict(zip(result.peers, weights, strict=True))[own]
            round_id, samples, names = result.group_id, flight.samples, who_counted(result)
            contributed = weight > 0 and not result.late
        mean = self.state.values - vector if self._average == PARAMETERS else vector
        norm = float(torch.linalg.vector_norm(mean))
        if result is None:
            # With the norm: a peer that goes on from an older checkpoint comes to this slot again, with another update.
            round_id = own.to_bytes() + flight.slot.to_bytes(8) + struct.pack("d", norm)
        with self._lock:
            if contributed and self.compressor is not None and flight.outgoing is not None:
                note_sent = self.compressor.alone if result is None else self.compressor.counted
                note_sent(flight.outgoing)
            before = None if contributed else self.fragment.rounded(self.state.values)
            self._step(mean, round_id, samples, names)
            told_age = self.age
            if before is None:
                self._mix(flight)
            else:
                shift(self.fragment, self.fragment.rounded(self.state.values), before)
                self.age += 1
        self.flight = None
        members = {own: flight.weight} if result is None else dict(zip(result.peers, weights, strict=True))
        for helper in () if result is None else result.auxiliaries:
            del members[helper]
        seconds, share = time.monotonic() - flight.began_at, 1.0 if result is None else result.share_averaged
        return OuterRound(
            flight.slot,
            self.number,
            self.state.version,
            tuple(members),
            tuple(members.values()),
            told_age,
            contributed,
            share,
            seconds,
            norm,
            0 if result is None else result.bytes_sent,
            0 if result is None else result.bytes_received,
            samples,
        )

    def _step(self, mean: torch.Tensor, round_id: bytes, samples: int, names: bytes) -> None:
        self._unsure = None
        if self._average != PARAMETERS:
            version, after = self.state.version + 1, self.chain.newest.hash
            self.kept.add(LoggedUpdate(version, after, round_id, samples, packed(mean), names))
        # Where parameters are averaged, a layer that nobody trains may still differ between peers.
        left_alone = () if self._average == PARAMETERS else self.fragment.unchanged(mean)
        with torch.enable_grad():
            self.state.step(mean, left_alone)
        self.chain.extend(round_id + names, samples)

    def _mix(self, flight: Flight) -> None:
        self._mixing.apply(self.fragment, self.state.values, flight.sent if flight.steps_since else None)
        # What was done since the message was made is part of the next one, if the model has kept it as it is.
        self.effort = self.effort - flight.effort if self._mixing.is_rebase else Effort()
        self.age = 0

    def reset_model(self) -> None:
        """Put the outer parameters into the model; what this peer has done since is lost."""
        self.fragment.write(self.state.values)
        self.effort, self.age, self._unsure = Effort(), 0, None
        if self.compressor is not None:
            self.compressor.forget()

    @torch.no_grad()
    def begin_run(self) -> None:
        """The run begins with the parameters that the model has now."""
        values = self.fragment.read()
        if not torch.equal(values, self.state.values):
            with self._lock:
                self.state.values.copy_(values)
                self.chain = VersionHistory.begin(values, self._max_staleness + 1)

    # --- for newcomers, and for peers that were away ------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Outer parameters and what belongs to them, as plain values and tensors. The tensors are not copied."""
        metadata, tensors = self.state.dump()
        return {**metadata, "chain": self.chain.dump()}, tensors

    def check(self, metadata: Any, tensors: list[torch.Tensor]) -> None:
        """Check a state from :meth:`dump` of another peer.

        Raises:
            ValueError: it does not fit.
        """
        self.state.check(metadata, tensors)
        if parse_links(metadata.get("chain"))[-1].version != metadata["version"]:
            raise ValueError("the chain of a fragment ends at another version")

    def take_over(self, metadata: Mapping[str, Any], tensors: list[torch.Tensor], *, is_new: bool) -> int:
        """Take over a state that :meth:`check` has passed, unless this peer's own one is as new.

        A peer that only lacks updates keeps what it has done, and makes it up in the next round. One of another lineage
        begins anew.

        Args:
            is_new: this peer has done nothing yet.

        Returns:
            How many versions of its own it has given up.
        """
        links = parse_links(metadata["chain"])
        own, is_lost, self.standing = self.chain.links, self.standing is VersionRelation.LOST, VersionRelation.GOOD
        has_other_bits = is_lost and links[-1] == own[-1]
        if not is_new and not has_other_bits and (self._average == PARAMETERS or links[-1] in own):
            return 0
        missed = None if is_new else steps_between(own, links)
        given_up = 0 if is_new or missed is not None else self.state.version
        with self._lock:
            before = self.fragment.rounded(self.state.values)
            self.state.load(metadata, tensors)
            self.chain = VersionHistory(links, self._max_staleness + 1)
            self.kept.clear()
            if missed is None:
                self._later.clear()
                self.reset_model()
                self.is_fresh = True
            else:
                shift(self.fragment, self.fragment.rounded(self.state.values), before)
                self.age, self._unsure = self.age + missed, None
        return given_up

    @property
    def lacks_updates(self) -> bool:
        """Whether others have updates that this peer lacks. It is known as soon as a group is complete."""
        flight = self.flight
        if flight is not None and flight.standing is VersionRelation.BEHIND:
            return flight.base is not None and flight.base.version > self.state.version
        return self.standing is VersionRelation.BEHIND

    @property
    def is_being_updated(self) -> bool:
        """Whether a round is under way that updates what this peer has now."""
        flight = self.flight
        if flight is None or flight.standing is not VersionRelation.GOOD:
            return False
        return flight.control is None or flight.control.began_allreduce

    @torch.no_grad()
    def make_up(self, updates: Iterable[LoggedUpdate] = (), whole: OuterParameters | None = None) -> int:
        """Make updates that this peer has missed. What it has done since its last contribution counts next time.

        Args:
            updates: from others. Those that do not continue this peer's own ones are left out.
            whole: the outer parameters of another peer, see :meth:`dump`. They are taken over if they continue this
                peer's own ones, or if this peer has lost and they are those that go on.

        Returns:
            How many were made.

        Raises:
            ValueError: something does not fit. Updates before it have been made.
        """
        if whole is not None:
            with refusing_nonsense():
                self.check(*whole)
        links = () if whole is None else parse_links(whole[0]["chain"])
        if whole is not None and self.standing is VersionRelation.LOST and self.heard_of in links:
            self.take_over(*whole, is_new=False)
            return 1
        before, updates = self.state.version, list(updates)
        if self.is_being_updated:
            self.may_lack_updates = True
            return 0
        flight, newest = self.flight, self.chain.newest
        if flight is not None and flight.control is not None and flight.standing is VersionRelation.GOOD:
            if newest not in links[:-1] and not any(
                each.version == newest.version + 1 and each.after == newest.hash for each in updates
            ):
                return 0
            flight.control.cancel()  # it looks for a group to update what the others no longer have
            self.give_up()
            self.may_lack_updates = False
        if whole is not None and newest in links[:-1]:
            standing = self.standing
            self.take_over(*whole, is_new=False)
            self.standing = standing  # there may be newer updates
        self._later.update((each.version, each) for each in updates)
        while (each := self._later.pop(self.state.version + 1, None)) and each.after == self.chain.newest.hash:
            mean = unpacked(each.tensors, self.fragment.length)
            with self._lock:
                self._follow(each, mean)
        self._later = {version: each for version, each in self._later.items() if version > self.state.version}
        if self.standing is VersionRelation.BEHIND and (
            self._known is None or self.state.version >= self._known.version
        ):
            self.standing = VersionRelation.GOOD
        return self.state.version - before

    def _follow(self, update: LoggedUpdate, mean: torch.Tensor) -> None:
        """Make an update of others."""
        unsure, outer = self._unsure, self.fragment.rounded(self.state.values)
        self._step(mean, update.round_id, update.samples, update.names)
        if unsure is not None and update.round_id in unsure.attempts and update.counts(self.own):
            if self.compressor is not None and unsure.outgoing is not None:
                self.compressor.counted(unsure.outgoing)
            if unsure.sent is None:
                self._mix(unsure)
            else:  # the model has moved on since, whatever the mixing rule is
                shift(self.fragment, self.fragment.rounded(self.state.values), unsure.sent)
                self.effort, self.age = self.effort - unsure.effort, 0
        elif self.effort.steps:
            shift(self.fragment, self.fragment.rounded(self.state.values), outer)
            self.age += 1
        else:
            self.fragment.write(self.state.values)

    def _keep_for_later(self, flight: Flight, mean: torch.Tensor | None, result: RoundResult | None) -> None:
        """This peer has come to a round without what the round updates: keep the result until it has that."""
        assert flight.base is not None
        known = flight.base
        if mean is not None and result is not None:
            names = who_counted(result)
            known = next_link(flight.base, result.group_id + names, flight.samples)
            kept = LoggedUpdate(known.version, flight.base.hash, result.group_id, flight.samples, packed(mean), names)
            self._later[kept.version] = kept
            for version in sorted(self._later)[: -self._max_staleness - 1]:
                del self._later[version]
        self._known = max(known, self._known or known)

    def restore(
        self, metadata: Mapping[str, Any], tensors: list[torch.Tensor], effort: Effort, age: int, *, is_fresh: bool
    ) -> None:
        """Go on from a state that :meth:`check` has passed. The model is not changed.

        Args:
            effort, age, is_fresh: as they were then.
        """
        with self._lock:
            self.state.load(metadata, tensors)
            self.chain = VersionHistory(parse_links(metadata["chain"]), self._max_staleness + 1)
            self.kept.clear()
        self.effort, self.age, self.is_fresh = effort, age, is_fresh
        self.flight, self.standing, self._known, self._unsure = None, VersionRelation.GOOD, None, None
        self._later.clear()
