"""One fragment at one peer: its message, whether that counts, and how the result gets into the model.

::

    begin ─► judge, in each group that is found ─► land ─► an entry of the journal, and the model
                                               └─► give_up: this peer's work counts next time
    make_up: updates of others that this peer has missed, in the order of their versions
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shoal.averaging import RoundResult, StepControl
from shoal.averaging.finite import all_finite
from shoal.compression.base import bytes_of, copies_of
from shoal.errors import AllreduceException
from shoal.optim.diloco.fragments import Fragment, OuterState, shift
from shoal.optim.diloco.messages import (
    PARAMETERS,
    Contribution,
    Effort,
    OuterStatement,
    discount,
    has_counted,
    has_other_bits,
    packed,
    unpacked,
    who_counted,
)
from shoal.optim.diloco.settings import OuterSettings
from shoal.optim.history.fork_choice import choose_version
from shoal.optim.history.journal import MOST, Entry, Journal, Update, hash_of, parse_entries
from shoal.optim.history.window import Relation
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupFinding:
    """What a peer concludes from the statements of all members when a group is complete."""

    standing: Relation = Relation.WITH
    """How its outer parameters compare with those of the group."""
    base: Entry | None = None
    """The version that the round updates; ``None``: there is no update."""
    counting: tuple[int, ...] = ()
    """The positions of the members whose messages can count by their statements; the same at all members."""
    samples: int = 0
    """Samples of all members."""
    done: tuple[int, ...] = ()
    """What each member claims to have done in the slot."""
    has_other_bits: bool = False
    """Its outer parameters differ from those of most members, although they are made of the same updates."""

    def has_most(self, weights: Sequence[float]) -> bool:
        """Whether the messages of most members have counted; in a tie, those of the half with the first member.

        A round may be split, so that each side takes the other for dead. Only one of them may make an update. If
        parameters are averaged, each peer has its own, and no majority is needed.
        """
        counted = [n for n in self.counting if weights[n]]
        return not self.counting or 2 * len(counted) + (tuple(counted[:1]) == self.counting[:1]) > len(self.counting)


def look_at_group(
    statements: Sequence[OuterStatement | None],
    own: int,
    clients: Collection[int],
    before: Relation,
    heard_of: Entry | None,
) -> GroupFinding:
    """Compare this peer's outer parameters with those of its group. Not used if parameters are averaged.

    Args:
        statements: of all members; ``None``: that member does not count.
        own: position of this peer.
        clients: positions of members from which nobody can download anything.
        before: how this peer stood before.
        heard_of: the newest version that it lacks, as far as it has heard in groups.
    """
    said = {n: each for n, each in enumerate(statements) if each is not None}
    told = {n: each.entries for n, each in said.items()}
    heard = {n: each.known for n, each in said.items() if each.known is not None}
    choice = choose_version(told, heard, clients)
    assert choice is not None, "this peer has said what it has"
    base, behind = choice.base, choice.behind.get(own)
    counting = tuple(n for n, each in said.items() if each.samples > 0 and each.entries[-1] == base)
    others_bits = behind == 0 and has_other_bits(statements, own, clients)
    if behind is None or others_bits:
        standing = Relation.ELSEWHERE
    elif behind:
        standing = Relation.BEHIND
    elif heard_of is not None and base.version < heard_of.version:
        # All members lack a version that others have: their update would be a second one of the same base. Or this peer
        # has got that version since it made its statement.
        return GroupFinding(Relation.BEHIND if before is Relation.WITH else before, None, counting)
    else:
        standing = Relation.WITH
    return GroupFinding(standing, base, counting, has_other_bits=others_bits)


@dataclass
class Outgoing:
    """The message of this peer in a round."""

    effort: Effort
    """The work behind it."""
    weight: float
    is_finite: bool = True
    sent: torch.Tensor | None = None
    """The model's values when the message was made; ``None``: they are not needed."""
    left_out: torch.Tensor | None = None
    """See :attr:`~shoal.optim.diloco.messages.Contribution.error`."""


@dataclass
class Flight:
    """A round of a fragment in flight: the message, what is known of the group, and when the result is applied."""

    slot: int
    message: Outgoing
    left: int | None
    """Inner steps until the result is applied; ``None``: as soon as it is there."""
    steps_since: int = 0
    """Inner steps since the message was made."""
    control: StepControl | None = None
    """``None``: nobody else is there."""
    expected: Collection[PeerID] = ()
    """The peers that were expected when it began."""
    group: GroupFinding = GroupFinding()
    """What the statements of the latest group showed."""
    attempts: set[bytes] = field(default_factory=set)
    """The ids of the groups in which the message may have counted."""
    known: Entry | None = None
    """The newest version that this peer lacks, as far as it has heard in groups; ``None``: it lacks none."""
    before: Relation = Relation.WITH
    """How this peer stood when the message was made."""
    began_at: float = field(default_factory=time.monotonic)
    saved: tuple[RoundResult | None, PeerID] | None = None
    """From a checkpoint: the result, and the id that this peer had in the round."""

    @property
    def standing(self) -> Relation:
        """How this peer's outer parameters compare with those of its group."""
        return self.group.standing

    @property
    def weight(self) -> float:
        """The weight of this peer's message."""
        return self.message.weight

    @property
    def result(self) -> RoundResult | None:
        """The result of the round, if there is one; ``None``: nobody else is there."""
        if self.control is not None:
            return self.control.round
        return None if self.saved is None else self.saved[0]


@dataclass(frozen=True)
class OuterRound:
    """What a round has done, as this peer saw it."""

    slot: int
    fragment: int
    version: int
    """The version of the outer parameters after it."""
    peers: tuple[PeerID, ...]
    weights: tuple[float, ...]
    staleness: int
    """The age of this peer's contribution, in versions."""
    contributed: bool
    """Whether this peer's contribution counted."""
    share: float
    """The share of the vector that was averaged."""
    seconds: float
    norm: float
    """The norm of the mean pseudo-gradient."""
    bytes_sent: int = 0
    """Bytes of encoded values that this peer has sent to the others."""
    bytes_received: int = 0
    samples: int = 0
    """Samples of all members since the last round of this fragment."""


class FragmentUpdates:
    """A fragment, its outer parameters, and this peer's work for their next update.

    The training thread calls its methods, except for :meth:`judge`.

    Args:
        number: of the fragment.
        fragment: the parameters of the model.
        state: the outer parameters.
        settings: how messages count and results are applied; the same in all peers, except the delay and the merge.
        lock: held while outer parameters change, so that newcomers get whole states.
        own: id of this peer.
    """

    def __init__(
        self,
        number: int,
        fragment: Fragment,
        state: OuterState,
        settings: OuterSettings,
        lock: threading.RLock,
        own: PeerID,
    ) -> None:
        self.number, self.fragment, self.state, self.settings = number, fragment, state, settings
        self._lock, self.own = lock, own
        self.contribution = Contribution(settings.messages, settings.error_feedback)
        """This peer's work since its last message that counted."""
        self.journal = Journal.begin(state.values, settings.max_staleness + 1)
        """Its newest entry is the version of the outer parameters."""
        self.vector = fragment.new_vector()
        """The message of this peer, which becomes the mean of all. Between two rounds it belongs to the training
        thread."""
        self.flight: Flight | None = None
        self.standing = Relation.WITH
        """How this peer stood in the last round. Never ``AHEAD``, because the others follow."""
        self.may_lack_updates = False
        """Whether a round has failed here since others were asked for updates. It may have succeeded for them."""
        # The newest version that this peer lacked, as far as it has heard in groups. Counts while it is behind.
        self._known: Entry | None = None
        # A round that has failed here. Its message may have counted: the others' update will show it.
        self._unsure: Flight | None = None

    @property
    def _each_has_its_own(self) -> bool:
        """Whether each peer has outer parameters of its own, because parameters are averaged."""
        return self.settings.average == PARAMETERS

    def count(self, samples: int) -> None:
        """An inner step has been made with this many samples; 0: it has not moved the model."""
        self.contribution.count(samples)
        if self.flight is not None:
            self.flight.steps_since += 1
            if self.flight.left:
                self.flight.left -= 1

    # --- sending ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, slot: int, least_steps: int = 0) -> Flight:
        """Write the message of this peer into the vector. The round may begin.

        Args:
            least_steps: the message does not count if it has fewer inner steps behind it.
        """
        assert self.flight is None, "a fragment has at most one round at a time"
        own, settings, vector = self.contribution, self.settings, self.vector
        if own.age > settings.max_staleness:
            logger.warning(
                "fragment %d: %d inner steps of this peer have not counted for %d updates of the others, and are lost. "
                "It continues from the outer parameters",
                self.number,
                own.effort.steps,
                own.age,
            )
            self.reset_model()
        local, left_out = self.fragment.read(), None
        if self._each_has_its_own:
            vector.copy_(local)
        else:
            vector.copy_(self.fragment.rounded(self.state.values)).sub_(local)
        is_finite = all_finite(vector)
        if is_finite and not self._each_has_its_own:
            left_out = own.write(vector, discount(settings.staleness, own.age))
        weight = own.effort.weight(settings.weighting) if is_finite and own.effort.steps >= least_steps else 0.0
        delay = settings.fragment_sync_delay
        sent = local if settings.merge.is_rebase and delay != 0 else None
        self.flight = Flight(
            slot,
            Outgoing(own.effort, weight, is_finite, sent, left_out),
            delay,
            known=self.heard_of,
            before=self.standing,
        )
        return self.flight

    def statement(self, expected: int, done: int = 0) -> OuterStatement:
        """What this peer states in its group.

        Args:
            expected: how many members it expects.
            done: what it has done in the slot.
        """
        newest, every = self.journal.newest, self.settings.check_every
        is_compared = newest.version and newest.version % every == 0 and not self._each_has_its_own
        digest = hash_of(bytes_of(self.state.values)) if is_compared else b""
        # Without samples, this message does not count, and is not missed in the majority.
        effort = self.contribution.effort if self.flight is None or self.flight.weight else Effort()
        entries = self.journal.entries
        return OuterStatement(entries, effort.steps, effort.samples, expected, digest, done, self.heard_of)

    def judge(
        self,
        statements: Sequence[OuterStatement | None],
        own: int,
        group_id: bytes = b"",
        clients: Collection[int] = (),
    ) -> bool:
        """Decide whether this peer's message counts. Called in the event loop when the group is complete, so it changes
        nothing but the flight.

        Args:
            statements: of all members.
            own: position of this peer.
            group_id: of the group.
            clients: positions of members from which nobody can download anything.

        Raises:
            AllreduceException: too few members have come for an update that most of the run will have.
        """
        flight = self.flight
        if flight is None or statements[own] is None:
            raise AllreduceException("this peer has given up the round")
        told = [statement for statement in statements if statement is not None]
        samples = min(MOST, sum(each.samples for each in told))
        done = tuple(0 if each is None else each.done for each in statements)
        if self._each_has_its_own:
            flight.group = GroupFinding(samples=samples, done=done)
            return True
        expected = sorted(statement.expected for statement in told)[len(told) // 2]
        if 2 * len(told) <= expected:
            raise AllreduceException(f"only {len(told)} of {expected} members have come, which is no majority")
        found = look_at_group(statements, own, clients, flight.before, flight.known)
        flight.group = replace(found, samples=samples, done=done)
        if found.standing is Relation.BEHIND and found.base is not None:
            flight.known = max(found.base, flight.known or found.base)
        elif found.standing is Relation.ELSEWHERE and found.base is not None:
            flight.known = found.base  # the version that it had heard of is on a branch that has lost
        if found.standing is not Relation.WITH:
            return False
        flight.attempts.add(group_id)
        return True

    @property
    def heard_of(self) -> Entry | None:
        """The newest version that this peer lacks, as far as it has heard in groups; ``None``: it lacks none."""
        flight, standing = self.flight, self.standing
        known = flight.known if flight is not None else None if standing is Relation.WITH else self._known
        standing = standing if flight is None or flight.standing is Relation.WITH else flight.standing
        is_here = known is not None and known.version <= self.state.version and standing is not Relation.ELSEWHERE
        return None if is_here else known

    # --- the result ---------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """The round has failed. Nothing changes, and this peer's work counts next time."""
        flight, self.flight = self.flight, None
        self.may_lack_updates = not self._each_has_its_own
        if flight is not None and flight.standing is not Relation.WITH:
            self._known, self.standing = flight.known, flight.standing
        elif flight is not None and flight.attempts and flight.weight:
            self._unsure = flight
            flight.message.sent = flight.message.sent if flight.steps_since else self.fragment.read()

    @torch.no_grad()
    def land(self, result: RoundResult | None) -> OuterRound | None:
        """Make the outer update, and bring it into the model.

        Args:
            result: of the round, whose mean is in the vector. ``None``: this peer is alone, and the vector is its own
                message.

        Returns:
            ``None`` if there is no result that all members have: then nothing has changed.
        """
        flight, vector = self.flight, self.vector
        assert flight is not None, "there is no round whose result could be applied"
        own = self.own if flight.saved is None else flight.saved[1]
        message, weights = flight.message, () if result is None else result.weights
        has_most = result is None or flight.group.has_most(weights)
        is_whole = result is None or (result.share_averaged == 1 and any(weights) and has_most)
        if flight.group.has_other_bits:
            logger.warning(
                "fragment %d is not that of most others after the same updates: this peer takes theirs. Machines "
                "round differently; outer SGD does not",
                self.number,
            )
        if not has_most:
            logger.warning(
                "the messages of most members of a round did not count, so it may have been split: no update is made, "
                "and what this peer has done counts next time"
            )
        if flight.standing is not Relation.WITH or not is_whole or not all_finite(vector):
            self.give_up()
            if flight.standing is Relation.BEHIND and flight.group.base is not None:
                self._keep_for_later(flight.group, vector if is_whole and all_finite(vector) else None, result)
                self.make_up()  # the updates that it lacked may have arrived
            return None
        mean = self.state.values - vector if self._each_has_its_own else vector
        norm = float(torch.linalg.vector_norm(mean))
        if result is None:
            # With the norm, because a peer that continues from an older checkpoint comes to this slot again, but makes
            # another update.
            round_id = own.to_bytes() + flight.slot.to_bytes(8) + struct.pack("d", norm)
            samples, names, contributed = message.effort.samples, b"", flight.weight > 0
            members, share, traffic = {own: flight.weight}, 1.0, (0, 0)
        else:
            round_id, samples, names = result.group_id, flight.group.samples, who_counted(result)
            members = dict(zip(result.peers, weights, strict=True))
            contributed = members[own] > 0 and not result.late
            share, traffic = result.share_averaged, (result.bytes_sent, result.bytes_received)
            members = {peer: weight for peer, weight in members.items() if peer not in result.auxiliaries}
        with self._lock:
            if contributed:
                self.contribution.error = None if result is None else message.left_out
            before = None if contributed else self.fragment.rounded(self.state.values)
            self._step(mean, round_id, samples, names)
            told_age = self.contribution.age
            if before is None:
                self._merge(message, flight.steps_since)
            else:
                shift(self.fragment, self.fragment.rounded(self.state.values), before)
                self.contribution.miss(1)
        self.flight = None
        return OuterRound(
            flight.slot,
            self.number,
            self.state.version,
            tuple(members),
            tuple(members.values()),
            told_age,
            contributed,
            share,
            time.monotonic() - flight.began_at,
            norm,
            *traffic,
            samples,
        )

    def _step(self, mean: torch.Tensor, round_id: bytes, samples: int, names: bytes) -> None:
        self._unsure, last = None, self.journal.newest
        update, left_alone = None, list[slice]()
        if not self._each_has_its_own:  # peers' own parameters may differ even in a layer that nobody trains
            update = Update(last.version + 1, last.hash, round_id, samples, packed(mean), names)
            left_alone = self.fragment.unchanged(mean)
        with torch.enable_grad():
            self.state.step(mean, left_alone)
        self.journal.append(last.followed_by(round_id + names, samples), update)

    def _merge(self, message: Outgoing, steps_since: int) -> None:
        self.settings.merge.apply(self.fragment, self.state.values, message.sent if steps_since else None)
        # Work since the message was made is part of the next one, if the model has kept it as it is.
        left = self.contribution.effort - message.effort
        self.contribution.effort, self.contribution.age = left if self.settings.merge.is_rebase else Effort(), 0

    def reset_model(self) -> None:
        """Put the outer parameters into the model; this peer's work since is lost."""
        self.fragment.write(self.state.values)
        self.contribution.forget()
        self._unsure = None

    @torch.no_grad()
    def begin_run(self) -> None:
        """The run begins with the parameters that the model has now."""
        values = self.fragment.read()
        if not torch.equal(values, self.state.values):
            with self._lock:
                self.state.values.copy_(values)
                self.journal.adopt(Journal.begin(values, 1).entries)

    # --- for newcomers, and for peers that were away ------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Outer parameters and what belongs to them, as plain values and tensors. The tensors are not copied."""
        metadata, tensors = self.state.dump()
        return {**metadata, "chain": self.journal.dump()}, tensors

    def check(self, metadata: Any, tensors: list[torch.Tensor]) -> None:
        """Check a state from :meth:`dump` of another peer.

        Raises:
            ValueError: it does not fit.
        """
        self.state.check(metadata, tensors)
        if parse_entries(metadata.get("chain"))[-1].version != metadata["version"]:
            raise ValueError("the chain of a fragment ends at another version")

    def take_over(self, metadata: Mapping[str, Any], tensors: list[torch.Tensor], *, is_new: bool) -> int:
        """Take over a state that :meth:`check` has passed, unless this peer's own one is as new.

        A peer that only lacks updates keeps its work, which counts in the next round. A peer of another branch starts
        over.

        Args:
            is_new: this peer has done nothing yet.

        Returns:
            How many of its own versions it has given up.
        """
        theirs, own = parse_entries(metadata["chain"]), self.journal.entries
        has_lost, self.standing = self.standing is Relation.ELSEWHERE, Relation.WITH
        has_other_bits = has_lost and theirs[-1] == own[-1]
        if not is_new and not has_other_bits and (self._each_has_its_own or theirs[-1] in own):
            return 0
        follows = not is_new and own[-1] in theirs
        given_up = 0 if is_new or follows else self.state.version
        with self._lock:
            before = self.fragment.rounded(self.state.values)
            self.state.load(metadata, tensors)
            self.journal.adopt(theirs, keep_inbox=follows)
            if follows:
                shift(self.fragment, self.fragment.rounded(self.state.values), before)
                self.contribution.miss(theirs[-1].version - own[-1].version)
                self._unsure = None
            else:
                self.reset_model()
                self.contribution.is_fresh = True
        return given_up

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present state, including the model, but not the kept updates."""
        local, (metadata, tensors) = self.fragment.read(), self.state.dump()
        tensors, entries, contribution = copies_of(tensors), self.journal.entries, replace(self.contribution)
        lacks = self.standing, self._known, self._unsure

        def put_back() -> None:
            self.state.load(metadata, tensors)
            self.journal.adopt(entries)
            self.fragment.write(local)
            self.contribution = contribution
            self.standing, self._known, self._unsure = lacks

        return put_back

    @property
    def lacks_updates(self) -> bool:
        """Whether others have updates that this peer lacks. The peer learns that as soon as a group is complete."""
        flight = self.flight
        if flight is not None and flight.standing is Relation.BEHIND:
            return flight.group.base is not None and flight.group.base.version > self.state.version
        return self.standing is Relation.BEHIND

    @property
    def is_being_updated(self) -> bool:
        """Whether a round is in flight that updates what this peer has now."""
        flight = self.flight
        if flight is None or flight.standing is not Relation.WITH:
            return False
        return flight.control is None or flight.control.began_allreduce

    @torch.no_grad()
    def make_up(self, updates: Sequence[Update] = ()) -> int:
        """Make updates that this peer has missed. Its work since its last contribution counts next time.

        Args:
            updates: from others. Those that do not continue this peer's own version are left out.

        Returns:
            How many were made.

        Raises:
            ValueError: an update does not fit. Those before it have been made.
        """
        before, flight = self.state.version, self.flight
        if self.is_being_updated:
            self.may_lack_updates = True
            return 0
        if flight is not None and flight.control is not None and flight.standing is Relation.WITH:
            if not any(map(self.journal.continues, updates)):
                return 0
            flight.control.cancel()  # the others have moved on from the version that it would update
            self.give_up()
            self.may_lack_updates = False
        self.journal.receive(updates)
        while (each := self.journal.take_next()) is not None:
            mean = unpacked(each.tensors, self.fragment.length)
            with self._lock:
                self._follow(each, mean)
        if self.standing is Relation.BEHIND and (self._known is None or self.state.version >= self._known.version):
            self.standing = Relation.WITH
        return self.state.version - before

    def _follow(self, update: Update, mean: torch.Tensor) -> None:
        """Make an update of others."""
        own, unsure, outer = self.contribution, self._unsure, self.fragment.rounded(self.state.values)
        self._step(mean, update.round_id, update.samples, update.names)
        if unsure is not None and update.round_id in unsure.attempts and has_counted(update, self.own.to_bytes()):
            own.error = unsure.message.left_out
            if unsure.message.sent is None:
                self._merge(unsure.message, unsure.steps_since)
            else:  # the model has moved on since, under any merge policy
                shift(self.fragment, self.fragment.rounded(self.state.values), unsure.message.sent)
                own.effort, own.age = own.effort - unsure.message.effort, 0
        elif own.effort.steps:
            shift(self.fragment, self.fragment.rounded(self.state.values), outer)
            own.miss(1)
        else:
            self.fragment.write(self.state.values)

    def _keep_for_later(self, group: GroupFinding, mean: torch.Tensor | None, result: RoundResult | None) -> None:
        """Keep the result of a round whose base version this peer lacks, until it has that version."""
        known = group.base
        assert known is not None
        if mean is not None and result is not None:
            names, after = who_counted(result), known.hash
            known = known.followed_by(result.group_id + names, group.samples)
            update = Update(known.version, after, result.group_id, group.samples, packed(mean), names)
            self.journal.receive([update], self.settings.max_staleness + 1)
        self._known = max(known, self._known or known)

    def restore(self, metadata: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Continue from a state that :meth:`check` has passed. The model is not changed."""
        with self._lock:
            self.state.load(metadata, tensors)
            self.journal.adopt(parse_entries(metadata["chain"]))
        self.flight, self.standing, self._known, self._unsure = None, Relation.WITH, None, None
