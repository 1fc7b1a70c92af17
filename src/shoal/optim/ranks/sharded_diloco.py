"""DiLoCo for a model whose parameters the processes of a peer share: each process exchanges its own part.

Each process has a :class:`~shoal.DiLoCo` for its part of the model, with outer parameters, their history and an
averager, which meets the processes of the same rank in other peers. Only the first process decides: it knows the other
peers, ends slots and finds groups. The others do with their parts of a fragment what it does with its own part::

    first process      a slot ends ─► begin ─► group, round ─┐         ┌─► all parts were averaged: land
    other processes                └► begin                  └► round ─┴─► one was not: give up

So all parts have the same version, and their journals have the same entries. The round of the other processes begins
when that of the first one is over, with the same members. In a download each process asks donors of its own rank. The
state is taken over only if all parts are of one version.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import msgspec
import torch

from shoal.averaging import RoundResult
from shoal.averaging.finite import all_finite
from shoal.base.clock import get_dht_time
from shoal.base.logs import words_of
from shoal.compression.base import bytes_of
from shoal.errors import AllreduceException, AveragingError, ShoalError
from shoal.optim.diloco.checkpoint import OuterCheckpoint
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragment_updates import Flight, FragmentUpdates, GroupFinding, OuterRound
from shoal.optim.diloco.fragments import divide
from shoal.optim.diloco.messages import (
    PARAMETERS,
    STATISTICS,
    OuterStatement,
    Wanted,
    parse_answer,
    request_for,
    unpacked,
)
from shoal.optim.diloco.outer_averager import OuterAverager, tag_of
from shoal.optim.history.journal import Entry, Update, hash_of, parse_entries
from shoal.optim.history.window import Relation
from shoal.optim.progress.run_settings import ParameterSettings, RunSettings
from shoal.optim.ranks.processes import Processes
from shoal.optim.ranks.shards import held_boxes, local_gradient, sharded_modules, volume
from shoal.optim.recovery.adopt import refusing_nonsense
from shoal.optim.setup.devices import is_dtensor, local_part
from shoal.optim.setup.training_setup import with_parameters
from shoal.optim.setup.training_state import OWN
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)

# How often a download is tried. If others end a slot between the downloads of two parts, these do not fit. Chosen: this
# hardly happens three times in a row.
DOWNLOADS = 3
# Lifetime of the record by which processes find the first one. Chosen: starting all of them takes less, even on a slow
# machine.
SECONDS_TO_BE_FOUND = 300.0


class Standing(NamedTuple):
    """What the first process knows about the group of a round, and about versions that this peer lacks."""

    relation: Relation
    known: Entry | None
    group: GroupFinding = GroupFinding()
    attempts: frozenset[bytes] = frozenset()
    is_finite: bool = True
    weight: float = 0.0


class Meeting(NamedTuple):
    """The round of the first processes, after which those of each other rank meet."""

    group_id: bytes
    own: PeerID
    peers: tuple[PeerID, ...]
    """All members, in order."""
    coming: int
    """How many members have the result, so that their other processes come."""

    @property
    def bits(self) -> str:
        """The key bits under which the processes of a rank look for each other. Only members can derive them."""
        return f"{int.from_bytes(hash_of(self.group_id)):0128b}"


def key_of(first: PeerID) -> str:
    """The key of the DHT under which the other processes find the first one."""
    return f"processes_of_{first}"


def newest_entries(metadata: Any) -> list[Entry]:
    """The version of each fragment of a state.

    Raises:
        ValueError: the state is malformed.
    """
    with refusing_nonsense():
        return [parse_entries(each["chain"])[-1] for each in metadata["fragments"]]


# --- the first process ------------------------------------------------------------------------------------------------


class LeadingFragment(FragmentUpdates):
    """A fragment in the first process. The other processes do the same with their parts of it."""

    def __init__(self, processes: Processes, *args: Any) -> None:
        super().__init__(*args)
        self._processes = processes
        # Set while a method runs that the others run as a whole, so that its calls of other methods are not sent to
        # them.
        self._is_included = False
        # Positions of the members that have the base version of the round.
        self._up_to_date: tuple[int, ...] = ()
        # Hashes of the others' outer parameters, if peers compare them.
        self._digests = b""
        self._round_id = b""

    @contextlib.contextmanager
    def _including(self) -> Iterator[None]:
        before, self._is_included = self._is_included, True
        try:
            yield
        finally:
            self._is_included = before

    def _tell(self, name: str, *arguments: Any) -> list[Any]:
        return self._processes.call(name, self.number, *arguments)

    def _stands(self) -> Standing:
        flight = self.flight
        if flight is None:
            return Standing(self.standing, self._known)
        message = flight.message
        attempts = frozenset(flight.attempts)
        return Standing(self.standing, flight.known, flight.group, attempts, message.is_finite, message.weight)

    def begin_run(self) -> None:
        values = self.fragment.read()
        hashes = self._tell("begin_run")
        with self._lock:
            self.state.values.copy_(values)
            self.journal.adopt([Entry(0, hash_of(bytes_of(values), *hashes), 0)])
        self._tell("adopt", self.journal.entries)

    def begin(self, slot: int, least_steps: int = 0) -> Flight:
        with self._including():
            flight = super().begin(slot, least_steps)
        told = self._tell("begin", slot, least_steps)
        self._digests = b"".join(digest for _, digest in told)
        if not all(is_finite for is_finite, _ in told):
            flight.message.is_finite, flight.message.weight = False, 0.0
        return flight

    def statement(self, expected: int, done: int = 0) -> OuterStatement:
        told = super().statement(expected, done)
        return msgspec.structs.replace(told, digest=hash_of(told.digest, self._digests)) if told.digest else told

    def judge(self, statements: Sequence[OuterStatement | None], *args: Any) -> bool:
        counts = super().judge(statements, *args)
        base = None if self.flight is None else self.flight.group.base
        self._up_to_date = tuple(n for n, each in enumerate(statements) if each and each.entries[-1] == base)
        return counts

    def give_up(self) -> None:
        if not self._is_included:
            self._tell("give_up", self._stands())
        super().give_up()

    def land(self, result: RoundResult | None) -> OuterRound | None:
        """Make the update as for any fragment, but only if all processes of this peer have their part of the result."""
        flight, meeting = self.flight, None
        assert flight is not None, "there is no round whose result could be applied"
        if result is not None:
            coming = {result.peers[n] for n in self._up_to_date} - {*result.failed_peers}
            meeting = Meeting(result.group_id, self.own, result.peers, len(coming))
        is_alone = meeting is None or meeting.coming == 1
        is_whole = result is None or (result.share_averaged == 1 and any(result.weights))
        has_most = result is None or flight.group.has_most(result.weights)
        has_met = flight.standing is Relation.WITH and is_whole and has_most and all_finite(self.vector)
        reasons = ["it was not whole"]
        if has_met and (flight.message.is_finite or not is_alone):
            reasons = self._tell("average", self._stands(), None if is_alone else meeting)
        if any(reasons):
            failed = [f"process {rank}: {reason}" for rank, reason in enumerate(reasons, 1) if reason]
            if has_met:
                logger.warning(
                    "fragment %d: not all parts could be averaged (%s); what this peer has done counts next time",
                    self.number,
                    ", ".join(failed),
                )
            self.give_up()
            return None
        stands = self._stands()
        with self._including():
            done = super().land(result)
        plain = None if result is None else dataclasses.replace(result, causes={}, traffic={}, absent={}, waits={})
        self._tell("land", stands, plain, self._round_id, is_alone)
        return done

    def _step(self, mean: torch.Tensor, round_id: bytes, *args: Any) -> None:
        self._round_id = round_id
        super()._step(mean, round_id, *args)

    def reset_model(self) -> None:
        if not self._is_included:
            self._tell("reset_model")
        super().reset_model()

    def take_over(self, metadata: Mapping[str, Any], tensors: list[torch.Tensor], *, is_new: bool) -> int:
        if not self._is_included:
            self._tell("take_over", self._stands(), is_new)
        with self._including():
            return super().take_over(metadata, tensors, is_new=is_new)

    def make_up(self, updates: Sequence[Update] = ()) -> int:
        """Make updates as for any fragment, but only those whose parts all processes can get."""
        following, newest = list[Update](), self.journal.newest
        for each in updates:
            if (each.version, each.after) == (newest.version + 1, newest.hash):
                unpacked(each.tensors, self.fragment.length)
                following.append(each)
                newest = newest.followed_by(each.round_id + each.names, each.samples)
        if following:
            wanted, heads = Wanted(self.state.version, self.heard_of), [each._replace(tensors=()) for each in following]
            following = following[: min([len(following), *self._tell("fetch", self._stands(), wanted, heads)])]
            self._tell("make_up", len(following))
        with self._including():
            return super().make_up(following)


class LeadingAverager(OuterAverager):
    """Downloads the part of the first process, while the other processes download theirs."""

    processes: Processes

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None, **options: Any) -> Any:
        assert wait, "the other processes wait for this one"
        for _ in range(DOWNLOADS):
            self.processes.begin_call("download", timeout)
            try:
                state = super().load_state_from_peers(wait, timeout, **options)
            finally:
                told = self.processes.end_call()
            try:
                if state is None or all(each == newest_entries(state[0]) for each in told):
                    return state
            except ValueError:
                return state  # which is refused
        raise AveragingError("the parts of a state were of different versions, or not available: trying again later")

    def load_part_from_peers(self, part: bytes, timeout: float, **options: Any) -> Any:
        if part != STATISTICS:
            return super().load_part_from_peers(part, timeout, **options)
        self.processes.begin_call("load_statistics", timeout)
        try:
            found = super().load_part_from_peers(part, timeout, **options)
            concurrent.futures.wait([found])
        finally:
            self.processes.end_call()
        return found


class ProcessDiLoCo(DiLoCo):
    """The optimizer of one process, for its part of the model. Its tensors share memory with the user's parameters.

    Args:
        processes: of this peer.
        sharding: a name for how they divide the parameters.
        parameters: the user's parameters.
        params: the same, as the user gives them.
        fragments: as for :class:`~shoal.DiLoCo`.
        options: of :class:`~shoal.DiLoCo`.
    """

    _averager_kind: ClassVar[type[OuterAverager]] = OuterAverager

    def __init__(
        self,
        processes: Processes,
        sharding: str,
        parameters: Sequence[torch.Tensor],
        *,
        params: list[Any],
        fragments: int | Sequence[Iterable[torch.Tensor]] = 1,
        **options: Any,
    ) -> None:
        self.processes, self.sharding, self.shared = processes, sharding, parameters
        self._modules = sharded_modules(parameters)
        self._leaves = [local_part(parameter).requires_grad_(parameter.requires_grad) for parameter in parameters]
        leaf_of = {id(parameter): leaf for parameter, leaf in zip(parameters, self._leaves, strict=True)}
        trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.numel()]
        # Fragments are divided by the sizes of whole parameters, so that they are the same in all processes.
        divided = [[leaf_of[id(each)] for each in fragment] for fragment in divide(parameters, trained, fragments)]
        super().__init__(params=with_parameters(params, self._leaves), fragments=divided, **options)

    def _make_averager(self, *args: Any, **options: Any) -> OuterAverager:
        prefix = f"{options['prefix']}_{self.processes.rank}_of_{self.processes.size}"
        return self._averager_kind(*args, **{**options, "prefix": prefix})

    @property
    def place(self) -> tuple[int, int, str]:
        """Which part this is: the rank of this process, the number of processes, and how they divide the parameters."""
        return self.processes.rank, self.processes.size, self.sharding

    def take_gradients(self) -> None:
        """The next inner step uses the gradients that the parameters have now."""
        for leaf, parameter in zip(self._leaves, self.shared, strict=True):
            leaf.grad = local_gradient(parameter)

    def drop_gradients(self) -> None:
        """Drop the gradients after the step."""
        for leaf in self._leaves:
            leaf.grad = None

    def reshard(self) -> None:
        """Drop whole parameters that modules have kept since their last pass, because they are outdated."""
        for module in self._modules:
            module.reshard()

    def version_of(self, state_dict: Mapping[str, Any]) -> Any:
        """The moment at which a checkpoint was made, equal in all processes; ``None``: it has no outer state.

        Raises:
            ValueError: it does not fit.
        """
        own = state_dict.get(OWN) or {}
        if "outer" not in own:
            return None
        saved = own.get("part")
        if saved is None or tuple(saved) != self.place:
            whose, here = (
                "a peer that is not sharded" if each is None else f"process {each[0]} of {each[1]} ({each[2]})"
                for each in (saved, self.place)
            )
            raise ValueError(
                f"the checkpoint is of {whose}, and this is {here}: load in each process what a process of the same "
                "rank has saved, with as many processes and the same sharding"
            )
        outer, fragments = own["outer"], self._rounds.fragments
        place = OuterCheckpoint.parse(outer, self.options.average, self.schedule, fragments).counter
        counts = place.slot, place.steps, place.samples, place.inner_steps
        return counts, [parse_entries(each["chain"]) for each in outer["fragments"]]

    def _note_thread(self) -> None:
        """Do not stand by: it can take part in a round only together with the other processes."""


class LeadingDiLoCo(ProcessDiLoCo):
    """The optimizer of the first process."""

    _averager_kind = LeadingAverager
    _is_loading = False

    def _make_fragment(self, *args: Any) -> FragmentUpdates:
        return LeadingFragment(self.processes, *args)

    def _begin(self) -> None:
        assert isinstance(self.averager, LeadingAverager)
        self.averager.processes = self.processes
        super()._begin()

    def agree(self) -> None:
        """Tell the other processes the id of this peer, and begin the run."""
        first = self.dht.peer_id
        self.dht.store(key_of(first), True, get_dht_time() + SECONDS_TO_BE_FOUND)
        self.processes.call("belong_to", first.to_bytes())
        self._rounds.begin_run()

    def _describe(self) -> RunSettings:
        found = super()._describe()
        whole = [
            ParameterSettings(each.name, tuple(parameter.shape), each.type, each.is_trained)
            for each, parameter in zip(found.parameters, self.shared, strict=False)
        ]
        needed = {"processes of a peer": str(self.processes.size), "sharding": self.sharding}
        return msgspec.structs.replace(found, parameters=whole, needed={**found.needed, **needed})

    def _make_inner_step(self, batch_size: int, scaler: Any) -> None:
        self.processes.begin_call("make_inner_step", batch_size)
        try:
            super()._make_inner_step(batch_size, scaler)
        finally:
            self.processes.end_call()

    def show_outer_parameters(self) -> None:
        self._rounds.begin_run()
        self.processes.call("show_outer_parameters")
        super().show_outer_parameters()

    def show_own_parameters(self) -> None:
        if not self._is_loading:
            self.processes.call("show_own_parameters")
        super().show_own_parameters()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of this part; each other process restores its own."""
        self._is_loading = True
        try:
            super().load_state_dict(state_dict)
        finally:
            self._is_loading = False

    def load_state(self, state: Any) -> None:
        """Not possible: an archive has whole tensors."""
        raise ValueError("a peer whose processes share the model cannot load an archive: load its model beforehand")


# --- the other processes ----------------------------------------------------------------------------------------------


class FollowingFragment(FragmentUpdates):
    """The part of a fragment in another process."""

    round_id = b""
    """Names the round that is applied, as in the first process."""
    fetched: Sequence[Update] = ()
    """What was downloaded to make up for what this peer has missed."""

    def stand(self, told: Standing) -> None:
        """Take over what the first process has found about this peer's standing."""
        self.standing, self._known = told.relation, told.known
        if (flight := self.flight) is not None:
            flight.group, flight.known, flight.attempts = told.group, told.known, set(told.attempts)
            flight.message.is_finite, flight.message.weight = told.is_finite, told.weight

    def judge(self, *args: Any) -> bool:
        """Returns true: the first process has already judged."""
        return True

    def _step(self, mean: torch.Tensor, round_id: bytes, *args: Any) -> None:
        super()._step(mean, self.round_id or round_id, *args)

    def begin_run(self) -> None:
        """Do nothing: the first process decides when the run begins."""


class FollowingDiLoCo(ProcessDiLoCo):
    """The optimizer of all processes but the first one, whose calls it carries out, see :meth:`obey`."""

    has_taken_over = False
    """Whether this peer has taken over a state."""

    def _make_fragment(self, *args: Any) -> FragmentUpdates:
        return FollowingFragment(*args)

    @property
    def _fragments(self) -> Sequence[FollowingFragment]:
        return cast(Sequence[FollowingFragment], self._rounds.fragments)

    def _begin(self) -> None:
        """Begin to meet others of this rank. Only the first process takes part in the progress of the run."""
        try:
            self.averager.run_in_background()
        except BaseException:
            self.shutdown()
            raise

    def obey(self, name: str, *arguments: Any) -> Any:
        """Carry out a call of the first process."""
        return getattr(self, f"call_{name}")(*arguments)

    def follow(self, slot: int) -> None:
        """Go to this slot."""
        self._rounds.counter.go_to(slot)
        if not self.averager.client_mode and self.averager.state_sharing_priority != slot:
            self.averager.state_sharing_priority = slot

    def call_belong_to(self, first: bytes) -> None:
        """Take over the id of the first process as that of this peer.

        Raises:
            ValueError: the DHT of this process does not find the record of the first process.
        """
        if not any(self.dht.get(key_of(PeerID(first)), latest=True) for _ in range(3)):
            raise ValueError(
                f"the DHT of process {self.processes.rank} finds nothing of the first process, so it is not connected "
                "with that one: give it initial_peers= of the run, or those of the first process, "
                "dht.get_visible_maddrs()"
            )
        for each in self._fragments:
            each.own = PeerID(first)

    def call_make_inner_step(self, samples: int) -> None:
        self._make_inner_step(samples, None)

    def call_show_outer_parameters(self) -> None:
        self.show_outer_parameters()

    def call_show_own_parameters(self) -> None:
        self.show_own_parameters()

    # --- a round ------------------------------------------------------------------------------------------------------

    def call_begin_run(self, number: int) -> bytes:
        """Returns a hash of the parameters."""
        each = self._fragments[number]
        values = each.fragment.read()
        with self._rounds.lock:
            each.state.values.copy_(values)
        return hash_of(bytes_of(values))

    def call_adopt(self, number: int, entries: Sequence[Entry]) -> None:
        self._fragments[number].journal.adopt(entries)

    def call_begin(self, number: int, slot: int, least_steps: int) -> tuple[bool, bytes]:
        """Returns whether this part of the message is finite, and a hash of outer parameters if peers compare them."""
        each = self._fragments[number]
        flight = each.begin(slot, least_steps)
        return flight.message.is_finite, each.statement(1).digest

    def call_give_up(self, number: int, told: Standing) -> None:
        self._fragments[number].stand(told)
        self._fragments[number].give_up()

    def call_average(self, number: int, told: Standing, meeting: Meeting | None) -> str:
        """Average this part with the other members; returns why that failed, or an empty text.

        Args:
            meeting: ``None``: there are no others, and this peer's own message is the result.
        """
        each = self._fragments[number]
        each.stand(told)
        if meeting is not None:
            try:
                self._meet(each, meeting)
            except (ShoalError, TimeoutError, concurrent.futures.CancelledError) as e:
                return words_of(e) or type(e).__name__
        return "" if all_finite(each.vector) else "its values are not finite"

    def _meet(self, each: FollowingFragment, meeting: Meeting) -> None:
        """Average this part with the processes of the same rank in other peers.

        Raises:
            AllreduceException: there is no mean over most members.
        """
        assert each.flight is not None, "a round has begun"
        options, tag = self.options, tag_of(each.number)
        self.averager.meet_under(each.number, meeting.bits)
        patience = min(options.matchmaking_time, options.averaging_timeout)
        control: Any = self.averager.step(
            gather=meeting.own.to_bytes(),
            scheduled_time=get_dht_time() + 0.9 * patience,
            weight=each.flight.weight,
            timeout=patience,
            wait=False,
            tag=tag,
            expected_group_size=meeting.coming,
        )
        try:
            first_of = control.result(patience + options.averaging_timeout)
        finally:
            control.cancel()
        result = control.round
        weights = {first_of[peer]: weight for peer, weight in zip(result.peers, result.weights, strict=True)}
        if result.share_averaged < 1:
            raise AllreduceException(f"only {result.share_averaged:.0%} of it was averaged")
        if not each.flight.group.has_most([weights.get(peer.to_bytes(), 0.0) for peer in meeting.peers]):
            raise AllreduceException("the messages of most members did not count")

    def call_land(
        self, number: int, told: Standing, result: RoundResult | None, round_id: bytes, is_alone: bool
    ) -> None:
        each = self._fragments[number]
        each.stand(told)
        each.round_id = round_id
        try:
            each.journal.serves_newcomers = self.averager.is_giving
            done = each.land(result)
        finally:
            each.round_id = b""
        assert done is not None, "the first process has found that the result can be used"
        if is_alone:
            each.contribution.error = None  # nothing was encoded, so nothing was left out

    def call_reset_model(self, number: int) -> None:
        self._fragments[number].reset_model()
        self.inner.forget_what_is_not_finite()

    # --- what this peer lacks -----------------------------------------------------------------------------------------

    def call_fetch(self, number: int, told: Standing, wanted: Wanted, heads: Sequence[Update]) -> int:
        """Download this part of updates that the first process has; returns how many have arrived.

        Args:
            heads: its updates, without tensors.
        """
        each, same = self._fragments[number], 0
        each.stand(told)
        try:
            request, timeout = request_for({number: wanted}), self.options.load_state_timeout
            found = self.averager.load_part_from_peers(request, timeout).result()
            with refusing_nonsense():
                got = [] if found is None else parse_answer(found[0], found[1], len(self._fragments)).get(number, [])
                while same < min(len(got), len(heads)) and got[same]._replace(tensors=()) == heads[same]:
                    unpacked(got[same].tensors, each.fragment.length)
                    same += 1
        except (ShoalError, TimeoutError, ValueError) as e:
            logger.warning("process %d of this peer could not make up for updates: %s", self.processes.rank, e)
            return 0
        each.fetched = got[:same]
        return same

    def call_make_up(self, number: int, count: int) -> None:
        each = self._fragments[number]
        updates, each.fetched = each.fetched, ()
        each.journal.serves_newcomers = self.averager.is_giving
        each.make_up(updates[:count])

    def call_download(self, timeout: float | None) -> list[Entry] | None:
        """Download this part of a state; returns its version. ``None``: nobody has given one that fits."""
        self._state: list[tuple[Any, list[torch.Tensor]]] = []
        try:
            state = self.averager.load_state_from_peers(timeout=timeout)
            if state is None:
                return None
            with refusing_nonsense():
                found, left = newest_entries(state[0]), list(state[1])
                for each, described in zip(self._fragments, state[0]["fragments"], strict=True):
                    own, left = left[: described["tensors"]], left[described["tensors"] :]
                    each.check(described, own)
                    self._state.append((described, own))
        except (ShoalError, TimeoutError, ValueError) as e:
            logger.warning("process %d of this peer could not download its part: %s", self.processes.rank, e)
            return None
        return found

    def call_take_over(self, number: int, told: Standing, is_new: bool) -> None:
        each = self._fragments[number]
        each.stand(told)
        each.take_over(*self._state[number], is_new=is_new)
        self.has_taken_over = True
        if number == len(self._fragments) - 1:
            self._state = []

    def call_load_statistics(self, timeout: float) -> None:
        """Begin with the statistics of another peer's inner optimizer. Without them, training continues all the
        same."""
        try:
            found = self.averager.load_part_from_peers(STATISTICS, timeout, differs=True).result()
            if found is not None and found[1]:
                with self._rounds.lock, refusing_nonsense():
                    self.inner.load_statistics(found[0], found[1])
        except (ShoalError, TimeoutError, ValueError) as e:
            logger.warning("process %d begins without the statistics of another peer: %s", self.processes.rank, e)


# --- what is refused --------------------------------------------------------------------------------------------------

# Optimizers that step a matrix as a whole.
_LOOKS_AT_WHOLE = ("Adafactor", "Muon", "Shampoo", "SOAP", "LAMB", "LARS")


def check_options(optimizer: Any, options: Mapping[str, Any]) -> None:
    """Check that the options of a peer fit parameters that its processes share.

    Raises:
        ValueError: they do not.
    """
    if not callable(optimizer) or isinstance(optimizer, (torch.optim.Optimizer, Sequence)):
        raise ValueError(
            "the parameters are sharded, and each process steps its part: give one function that makes the optimizer, "
            "such as optimizer=torch.optim.AdamW, and params="
        )
    if options.get("auxiliary"):
        raise ValueError("an auxiliary peer has no batches: one process is enough for it")
    if options.get("fragment_sync_delay", 0) != 0:
        raise ValueError(
            f"fragment_sync_delay={options['fragment_sync_delay']!r}: the processes of a sharded peer exchange their "
            "parts together, while training stands still. Leave it out"
        )
    if options.get("average") == PARAMETERS:
        raise ValueError("average='parameters' is not for sharded models, whose parts must have one version")
    if options.get("guard", "members") != "members" or options.get("aggregation") is not None:
        raise ValueError(
            "guard='open' and aggregation= judge whole messages, of which no process of a sharded peer has all: leave "
            "them out"
        )
    if options.get("check_state") is not None:
        raise ValueError(
            "check_state= is called in the first process alone, which cannot run a sharded model without the others: "
            "leave it out"
        )
    for name in ("model", "extra_tensors"):
        if options.get(name) is not None and len([*options[name].parameters()] if name == "model" else options[name]):
            raise ValueError(
                f"{name}= is not for sharded models: only parameters of the optimizer are exchanged. Leave it out"
            )
    if found := {"quorum", "target_group_size"} & (options.get("averager_opts") or {}).keys():
        raise ValueError(
            f"{found.pop()} in averager_opts: all parts of a sharded model must be averaged over the same peers: leave "
            "it out"
        )


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer may step parts of parameters.

    Raises:
        ValueError: it needs whole ones.
    """
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _LOOKS_AT_WHOLE:
            raise ValueError(
                f"{kind.__name__} looks at whole parameters, and each process has only parts: use an optimizer that "
                "treats each value by itself, such as AdamW, Adam, SGD or Lion"
            )


def describe_sharding(processes: Processes, parameters: Sequence[torch.Tensor]) -> str:
    """A name for how the processes divide the parameters. Peers that divide them differently have another name.

    Raises:
        ValueError: several processes have the same values.
    """
    held = held_boxes(processes, parameters)
    for number, (parameter, boxes) in enumerate(zip(parameters, held, strict=True)):
        full = [box for box in boxes if volume(box)]
        if len(set(full)) < len(full):
            what = "is sharded, and has copies" if is_dtensor(parameter) else "is not sharded, so that it is"
            raise ValueError(
                f"parameter {number}, of shape {tuple(parameter.shape)}, {what} in several processes, which would "
                "exchange it several times: shard all parameters with fully_shard, over a mesh of one dimension"
            )
    layouts: list[Any] = list(parameters)
    placements = {repr(placement) for layout in layouts for placement in layout.placements}
    digest = hashlib.sha256(repr(held).encode()).hexdigest()[:16]
    return f"{', '.join(sorted(placements))}, parts {digest}"
