"""The averager that users hold. :mod:`shoal.averaging.node` does its work in the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from shoal.averaging.aggregation import Aggregation
from shoal.averaging.arguments import DEFAULT_STALL_TIMEOUT, AveragerConfig, check_names, check_tags, resolve_timeouts
from shoal.averaging.control import AveragingMode, Gathered, RoundResult, StepControl
from shoal.averaging.groups.settings import present_mode
from shoal.averaging.messages import MAX_GATHERED_BYTES
from shoal.averaging.node import AveragerNode, average_once, schema_of
from shoal.averaging.round.parts import DEFAULT_PART_SIZE_BYTES
from shoal.averaging.round.session import GroupSession
from shoal.averaging.state.download import Layout, OwnedState, State, check_fit, layout_of
from shoal.averaging.state.newcomer import CheckTensors
from shoal.averaging.tensor_lock import TensorLock
from shoal.base.clock import get_dht_time
from shoal.base.closeable import Facade, at_the_door, options_from
from shoal.base.reactor import Portal
from shoal.base.serializer import MSGPackSerializer
from shoal.compression import CompressionBase, CompressionInfo, NoCompression
from shoal.compression.base import check_codec, copies_of
from shoal.compression.serialization import check_state_codec
from shoal.dht.dht import check_dht
from shoal.errors import ReactorError
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht import DHT

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
Infos = Sequence[CompressionInfo]


def _weakly(method: Callable[P, T]) -> Callable[P, T]:
    """The same method without a reference to its object, so that the loop does not keep a dropped averager alive."""
    weak = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        alive = weak()
        if alive is None:
            raise ReactorError("this averager no longer exists")
        result: T = alive(*args, **kwargs)
        return result

    return call


class DecentralizedAverager(Facade):
    """Averages a list of tensors with other peers that do the same under the same prefix.

    A step finds a group of peers; then every member of the group gets the weighted mean of all members' tensors.
    Without lossy compression all members get the same bits.

    Args:
        averaged_tensors: tensors to average in place; leaves of autograd. Use them inside :meth:`get_tensors`.
        dht: the DHT in which averagers find each other.
        start: start to answer other averagers at once; otherwise call :meth:`run_in_background` later.
        prefix: name of the run; averagers with different prefixes never meet. No dots.
        target_group_size: close a group at this size; ``None``: no limit.
        min_group_size: smaller groups do not start.
        initial_group_bits: the first bucket of peers, such as ``"010"``. With many peers, groups of the target size
            form in all buckets at once, and peers mix from round to round.
        min_matchmaking_time: seconds for which a group stays open, unless it is complete earlier.
        request_timeout: seconds within which a leader must answer.
        averaging_alpha: move local values by this fraction of the way to the average; 1: replace them.
        part_size_bytes: size in bytes of the parts in which tensors travel, after compression.
        allreduce_timeout: seconds for a whole all-reduce; ``None``: as long as it makes progress.
        next_chunk_timeout: seconds for the next chunk of a state download; also the default of ``sender_timeout``.
        sender_timeout: the most seconds of silence before a sending member is given up; 30 if nothing is set.
        reducer_timeout: the same for a reducer. It must be longer, because a reducer may itself wait for senders.
            Default: twice ``sender_timeout``.
        compression: codec for averaging; the same in all peers.
        state_compression: codec for state downloads.
        tensor_infos: a description of each tensor for the codecs.
        bandwidth: relative speed of this peer's network; 0: let others reduce; ``None``: the mean of the others.
        min_vector_size: members that would reduce fewer values reduce none.
        auxiliary: help to reduce, without own data.
        allow_state_sharing: let newcomers download this averager's state. Default: yes, unless client or auxiliary.
        declare_state_period: seconds between renewals of that offer.
        client_mode: only connect to others and accept no connections. Default: the DHT's setting.
        shutdown_timeout: the most seconds that :meth:`shutdown` takes.
        averaging_expiration: old name of ``min_matchmaking_time``.
        quorum: do not wait for all members. When this many members of a group have sent their tensors, the others have
            ``quorum_grace`` seconds left; then the round ends without the parts that they have not sent. Members that
            come later get the result. ``None``: wait for all living members. The same in all peers.
        quorum_grace: the grace period in seconds of a round with a ``quorum``.
        tags: for averagers that do not average everything at once: by name, the indices of the tensors that a step with
            this name averages. Steps with different tags may run at the same time, so no tensor may have two tags. The
            same in all peers.
        aggregation: the rule that combines the values of all members, see :mod:`shoal.averaging.aggregation`; ``None``:
            their weighted mean. The same in all peers.
        agreement: further settings by name, for example the dataset. A peer with other values is rejected: it joins no
            group and gets no state. Both peers log which settings differ.
        state_download_rate: the most bytes per second that a download of a state takes. Default: no limit.

    Raises:
        AssertionError: an argument that the description above excludes.
        ValueError: arguments that contradict each other, such as time limits.
    """

    serializer = MSGPackSerializer
    instead_of_a_copy = "save the tensors themselves, inside `with averager.get_tensors()`"
    phases: str = "one all-reduce"
    """What :meth:`average_in_group` does, in words. Only peers with the same words form groups."""

    @at_the_door
    def __init__(
        self,
        averaged_tensors: Sequence[torch.Tensor],
        dht: DHT,
        *,
        start: bool,
        prefix: str,
        target_group_size: int | None = None,
        min_group_size: int = 2,
        initial_group_bits: str = "",
        min_matchmaking_time: float = 5.0,
        request_timeout: float = 3.0,
        averaging_alpha: float = 1.0,
        part_size_bytes: int = DEFAULT_PART_SIZE_BYTES,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        compression: CompressionBase | None = None,
        state_compression: CompressionBase | None = None,
        tensor_infos: Sequence[CompressionInfo] | None = None,
        bandwidth: float | None = None,
        min_vector_size: int = 0,
        auxiliary: bool = False,
        allow_state_sharing: bool | None = None,
        declare_state_period: float = 30,
        client_mode: bool | None = None,
        daemon: bool = True,
        shutdown_timeout: float = 5,
        averaging_expiration: float | None = None,
        quorum: int | None = None,
        quorum_grace: float = 3.0,
        tags: Mapping[str, Sequence[int]] | None = None,
        aggregation: Aggregation | None = None,
        agreement: Mapping[str, str] | None = None,
        state_download_rate: float = math.inf,
    ) -> None:
        check_dht(dht)
        check_names(prefix, initial_group_bits, bandwidth)
        tensors = list(averaged_tensors)
        for index, tensor in enumerate(tensors):
            is_leaf = isinstance(tensor, torch.Tensor) and tensor.grad_fn is None
            assert is_leaf, f"averaged tensor {index} must be a leaf tensor: give a parameter, or .detach() it"
        check_codec("compression", compression)
        check_state_codec("state_compression", state_compression)
        client_mode = dht.client_mode if client_mode is None else client_mode
        assert not (client_mode and auxiliary), "an auxiliary peer must accept connections: client_mode excludes it"
        if averaging_expiration is not None:
            assert min_matchmaking_time == 5.0, "averaging_expiration is the old name of min_matchmaking_time: give one"
            logger.warning("averaging_expiration is the old name of min_matchmaking_time")
            min_matchmaking_time = averaging_expiration
        if request_timeout >= min_matchmaking_time:
            logger.debug("request_timeout %g s is not below min_matchmaking_time", request_timeout)
        if target_group_size is not None and target_group_size & (target_group_size - 1):
            logger.warning("target_group_size %d is not a power of two: peers mix more slowly", target_group_size)
        sender_limit, reducer_limit = resolve_timeouts(next_chunk_timeout, sender_timeout, reducer_timeout)
        mode = AveragingMode.AUX if auxiliary else AveragingMode.CLIENT if client_mode else AveragingMode.NODE
        self.dht, self.prefix, self.client_mode, self.bandwidth = dht, prefix, client_mode, bandwidth
        self._mode, self._p2p = mode, dht.p2p
        self.tensor_infos = tuple(
            tensor_infos or (CompressionInfo.from_tensor(t, key=i) for i, t in enumerate(tensors))
        )
        assert len(self.tensor_infos) == len(tensors), f"{len(tensors)} tensors, {len(self.tensor_infos)} tensor_infos"
        self.request_timeout, self.shutdown_timeout = request_timeout, shutdown_timeout
        self.next_chunk_timeout, self.declare_state_period = next_chunk_timeout, declare_state_period
        self.state_compression = state_compression or NoCompression()
        self._tensors, self._lock = tensors, TensorLock()
        self.total_size = sum(tensor.numel() for tensor in tensors)
        self.schema_hash = schema_of(self.tensor_infos)
        self._allow_state_sharing = mode is AveragingMode.NODE if allow_state_sharing is None else allow_state_sharing
        if client_mode and allow_state_sharing:
            raise ValueError("allow_state_sharing: others cannot connect to a peer in client mode")
        self._state_sharing_priority = 0.0
        self._config = options_from(
            AveragerConfig,
            locals(),
            sender_timeout=sender_limit,
            reducer_timeout=reducer_limit,
            chunk_timeout=next_chunk_timeout if next_chunk_timeout is not None else DEFAULT_STALL_TIMEOUT,
            compression=compression or NoCompression(),
            state_compression=self.state_compression,
            phases=self.phases,
            tags=check_tags(tags or {}, len(tensors)),
            agreement=agreement or {},
        )
        self.matchmaking_kwargs = {
            "min_matchmaking_time": min_matchmaking_time,
            "request_timeout": request_timeout,
            "target_group_size": target_group_size,
            "min_group_size": min_group_size,
        }
        self.allreduce_kwargs = {
            "compression": self._config.compression,
            "part_size_bytes": part_size_bytes,
            "averaging_alpha": averaging_alpha,
            "sender_timeout": sender_limit,
            "reducer_timeout": reducer_limit,
        }
        self._portal = Portal(type(self).__name__)
        self._started: concurrent.futures.Future[AveragerNode] | None = None
        if start:
            try:
                self.run_in_background(await_ready=True)
            except BaseException:
                self._portal.begin_close()
                raise

    # --- life ---------------------------------------------------------------------------------------------------------

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start to answer other averagers.

        Raises:
            ValueError: another averager with this prefix already runs on this DHT.
        """
        if self._started is None:
            self.be_the_only(f"an averager with prefix {self.prefix!r}", self.dht)
            self._started = self._portal.submit(self._start())
        if await_ready:
            self.wait_until_ready(timeout)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until other averagers can reach this one; raises the error that prevented it."""
        self._beginning().result(timeout)

    def _beginning(self) -> concurrent.futures.Future[AveragerNode]:
        if self._started is None:
            raise ReactorError(f"this {type(self).__name__} was made with start=False: call run_in_background() first")
        return self._started

    async def _start(self) -> AveragerNode:
        node = AveragerNode(
            self.dht.p2p,
            self.dht.node,
            self._tensors,
            self.tensor_infos,
            self._config,
            self._lock,
            _weakly(self.get_current_state),
            _weakly(self.average_in_group),
            _weakly(self.get_part),
        )
        node.state_sharing.set(allowed=self._allow_state_sharing, priority=self._state_sharing_priority)
        await node.start()
        self._portal.on_close(node.close)
        return node

    @property
    def node(self) -> AveragerNode:
        """The coroutine side, for components that live in the loop."""
        return self._beginning().result()

    def is_alive(self) -> bool:
        """Whether this averager answers others."""
        return self._started is not None and not self._portal.closed

    def begin_shutdown(self) -> None:
        """Start to leave without waiting for the end; :meth:`shutdown` waits."""
        self._portal.begin_close()

    def shutdown(self) -> None:
        """Cancel outstanding steps, tell the others, and leave. Idempotent; takes at most ``shutdown_timeout``."""
        self._portal.close(self.shutdown_timeout)

    def __del__(self) -> None:
        if getattr(self, "_portal", None) is not None and not self._portal.closed:
            self._portal.begin_close()

    # --- averaging ----------------------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerID:
        return self.dht.peer_id

    @property
    def last_round(self) -> RoundResult | None:
        """The result of the last all-reduce."""
        return self.node.last_round

    @property
    def last_updated(self) -> float:
        """DHT time at which the tensors were last averaged; 0 if never."""
        return self.node.last_updated

    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
        *,
        expected_group_size: int | None = None,
        tag: str = "",
    ) -> Gathered | StepControl:
        """Average with other peers once.

        Args:
            gather: a plain value for the other members to read.
            scheduled_time: DHT time at which the group should start; default: now + ``min_matchmaking_time``.
            weight: this peer's weight; default 1.
            timeout: seconds after which the step gives up looking for a group; ``None``: never.
            allow_retries: look for another group if a round fails before ``timeout`` is over.
            require_trigger: wait for ``allow_allreduce()`` of the returned control before the tensors are read.
            wait: wait for the result and return it; otherwise return a :class:`StepControl` at once.
            expected_group_size: start before the scheduled time if the group has this many members; auxiliaries are not
                counted.
            tag: average only the tensors that have this name in ``tags``; needed if the averager has any tags.

        Returns:
            By peer, the value that each member of the group gave as ``gather``; or the control.

        Raises:
            AllreduceException: no group was found in time, or the round failed.
            ReactorError: this averager, or its DHT, is shut down.
            AssertionError: bad arguments.
            ValueError: the tag is unknown, or ``gather`` takes more than 64 KiB in serialized form.
        """
        if not self.dht.is_alive():
            raise ReactorError(
                f"the DHT of this {type(self).__name__} is shut down, so it finds no peers: make both again, and shut "
                "the DHT down last"
            )
        assert not (wait and require_trigger), "a step that waits for a trigger cannot be waited for: use wait=False"
        now = get_dht_time()
        deadline = math.inf if timeout is None else now + timeout
        if scheduled_time is None:
            scheduled_time = min(now + self._config.min_matchmaking_time, deadline)
        else:
            assert scheduled_time < deadline, f"scheduled_time {scheduled_time} is not before the deadline {deadline}"
        control = StepControl(
            scheduled_time,
            deadline,
            allow_retries,
            (0.0 if self.mode is AveragingMode.AUX else 1.0) if weight is None else weight,
            self._pack_gathered(gather),
            expected_group_size=expected_group_size,
            tag=self._check_tag(tag),
        )
        if not require_trigger:
            control.allow_allreduce()
        running = self._portal.submit(self._run_step(control))
        control.add_done_callback(lambda _: running.cancel())  # cancelling the control ends the step
        if not wait:
            return control
        try:
            return control.result()
        except BaseException:
            control.cancel()
            raise

    def _pack_gathered(self, gather: Any) -> bytes:
        packed = self.serializer.dumps(gather)
        if len(packed) > MAX_GATHERED_BYTES:
            fix = "put it into the DHT, and gather its key"
            raise ValueError(f"gather= takes at most {MAX_GATHERED_BYTES} bytes, this has {len(packed)}: {fix}")
        return packed

    async def average_in_group(self, session: GroupSession, tensors: Sequence[torch.Tensor], infos: Infos) -> None:
        """Average in a group that was found. Runs in the event loop while the tensors are locked.

        Override it to average in several phases, and describe them in :attr:`phases`. If it raises, the step has
        failed, and the tensors must be unchanged.

        Args:
            session: the group; its ``all_reduce`` may be awaited several times, equally often in all members.
            tensors: the tensors that the step averages.
            infos: one for each tensor.
        """
        await average_once(session, tensors, infos)

    def _check_tag(self, tag: str) -> str:
        if tag not in (known := tuple(self._config.tags) or ("",)):
            raise ValueError(f"tag must be one of {known}, which this averager was made with; got {tag!r}")
        return tag

    async def _ready_node(self) -> AveragerNode:
        return await asyncio.wrap_future(self._beginning())

    async def _run_step(self, control: StepControl) -> None:
        try:
            await (await self._ready_node()).run_step(control)
        finally:
            # This has an effect only if the step ended without a result, for example in a shutdown.
            control.cancel()

    @contextmanager
    def get_tensors(self) -> Iterator[Sequence[torch.Tensor]]:
        """The averaged tensors, locked: they are not averaged inside this block. Keep it short."""
        with self._lock.hold():
            yield self._tensors

    def get_group_bits(self, wait: bool = True, *, tag: str = "") -> Any:
        """The bucket in which this averager looks for groups; with tags, the one for steps with this tag."""
        return self._ask(self._get_bits(self._check_tag(tag)), wait)

    async def _get_bits(self, tag: str) -> str:
        return (await self._ready_node()).lanes[tag].keys.group_bits

    def set_group_bits(self, group_bits: str, wait: bool = True, *, tag: str = "") -> Any:
        """Choose the bucket for the next search; with tags, the one for steps with this tag."""
        assert all(c in "01" for c in group_bits), f"group bits are 0 and 1 only, got {group_bits!r}"
        return self._ask(self._set_bits(self._check_tag(tag), group_bits), wait)

    async def _set_bits(self, tag: str, group_bits: str) -> None:
        (await self._ready_node()).lanes[tag].keys.group_bits = group_bits

    def _ask(self, coro: Any, wait: bool) -> Any:
        return self._portal.call(coro) if wait else self._portal.submit(coro)

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def mode(self) -> AveragingMode:
        """How this peer takes part now. While no peer can call it, it takes part as a client."""
        return present_mode(self._mode, self._p2p)

    @property
    def allow_state_sharing(self) -> bool:
        """Whether newcomers may download this averager's state."""
        return self._allow_state_sharing

    @allow_state_sharing.setter
    def allow_state_sharing(self, allowed: bool) -> None:
        if allowed and self.client_mode:
            raise ValueError("allow_state_sharing: others cannot connect to a peer in client mode")
        self._allow_state_sharing = allowed
        self._update_state_sharing()

    @property
    def state_sharing_priority(self) -> float:
        """Newcomers prefer donors with a higher number."""
        return self._state_sharing_priority

    @state_sharing_priority.setter
    def state_sharing_priority(self, priority: float) -> None:
        if priority and self.client_mode:
            raise ValueError("state_sharing_priority: others cannot connect to a peer in client mode")
        self._state_sharing_priority = float(priority)
        self._update_state_sharing()

    def _update_state_sharing(self) -> None:
        if self._started is not None and not self._portal.closed:
            sharing = self.node.state_sharing
            allowed, priority = self._allow_state_sharing, self._state_sharing_priority
            loop = self._portal.reactor.loop
            loop.call_soon_threadsafe(lambda: sharing.set(allowed=allowed, priority=priority))

    def get_current_state(self) -> Any:
        """The state that newcomers download; override it to share more. Called in a worker thread.

        Returns:
            A tuple of metadata (plain values) and a list of tensors; optionally also a list of their
            ``CompressionInfo``. The tensors are copied, unless the tuple is an
            :class:`~shoal.averaging.state.download.OwnedState`.
        """
        with self.get_tensors() as tensors:
            copies = copies_of(tensors)
        return OwnedState({"group_key": self.node.group_bits}, copies, self.tensor_infos)

    def get_part(self, part: bytes) -> OwnedState | None:
        """A part of the state by its name, for peers that want only that; ``None``: there is no part of this name.

        Called in a worker thread, like :meth:`get_current_state`.
        """
        return None

    def load_state_from_peers(
        self, wait: bool = True, timeout: float | None = None, *, skip: Collection[PeerID] = ()
    ) -> Any:
        """Download the state of the best donor; this averager itself does not change.

        Args:
            wait: return the state (metadata and tensors), or ``None`` if no donor gave one; otherwise return a future.
            timeout: seconds for everything; ``None``: as long as a donor keeps sending.
            skip: donors that are not asked.

        Raises:
            TimeoutError: the download took longer than ``timeout``.
        """
        coro = self._download_state(skip, self._check_of_downloads())
        return self._portal.call(coro, timeout) if wait else self._portal.submit(coro)

    def _check_of_downloads(self) -> CheckTensors | None:
        """A check that refuses tensors that this peer cannot use, before they are downloaded; ``None``: no check.

        Called before each download, in the thread that wants the download.
        """
        layout = self._expected_layout()
        return None if layout is None else functools.partial(check_fit, own=layout)

    def _expected_layout(self) -> Layout | None:
        """The tensors that a downloaded state must have.

        ``None``: a subclass defines its own state, so only the size is limited, not the shape.
        """
        return layout_of(self._tensors) if self._gives_the_state_of(DecentralizedAverager) else None

    def _gives_the_state_of(self, kind: type[DecentralizedAverager]) -> bool:
        """Whether this averager gives the same state as this kind, because no subclass has overridden it."""
        return getattr(self.get_current_state, "__func__", None) is kind.get_current_state

    async def _download_state(self, skip: Collection[PeerID], check: CheckTensors | None) -> State | None:
        return await (await self._ready_node()).state_downloads.download(skip, check=check)

    def leave_out(self, donor: PeerID, version: bytes | None) -> None:
        """Do not ask this donor for a while, because its state was refused."""
        self._portal.reactor.loop.call_soon_threadsafe(self.node.state_downloads.leave_out, donor, version)
