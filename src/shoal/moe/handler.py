"""The calls of other peers to experts: their messages, the checks at the door, and the answers.

A request is an :class:`ExpertRequest` and a list of tensors; the answer is a list of tensors, too::

    rpc_forward    inputs                        ─►  outputs
    rpc_backward   inputs + output gradients     ─►  input gradients
    rpc_info       (no tensors)                  ─►  ExpertSchemas

Inputs are flat: positional ones, then keyword ones by sorted name, as :func:`~shoal.base.extras.nested_flatten` has
them. There is one gradient for each output: zeros of the same type for integers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta

from shoal.base.bounded import Bounded
from shoal.base.closeable import Facade, at_the_door
from shoal.base.extras import nested_flatten
from shoal.base.logs import quoted
from shoal.base.reactor import AwaitableFuture, Portal
from shoal.base.serializer import MSGPackSerializer
from shoal.compression.serialization import BatchTensorDescriptor, codec_of
from shoal.dht.dht import DHT, check_dht
from shoal.errors import BusyError, ProtocolError
from shoal.moe.backend import ModuleBackend
from shoal.net.connection import Call
from shoal.net.service import P2PContext, ServicerBase
from shoal.net.transport import Count, Header
from shoal.p2p import P2P
from shoal.peers.identity import PeerID
from shoal.serving.task_pool import Outputs, TaskPool
from shoal.serving.tensors import CodecFor, receive_tensors, send_tensors

Tensors = Sequence[torch.Tensor]
Schema = Sequence[BatchTensorDescriptor]


class ExpertRequest(Header):
    """Asks an expert for something; tensors follow."""

    uid: Annotated[str, Meta(max_length=1024)]
    call_id: Annotated[bytes, Meta(max_length=32)] = b""
    """Random. A backward pass that is repeated with the same id is answered again, but trains only once."""
    nbytes: Count = 0
    """The memory that the tensors take: the sum of their ``nbytes``."""


class ExpertSchemas(Header):
    """What an expert takes and returns."""

    info: bytes
    """``ModuleBackend.get_info()``, packed by :class:`MSGPackSerializer`. It has ``forward_schema``,
    ``outputs_schema`` and ``keyword_names``; ``grad_inputs_schema`` and ``grad_outputs_schema`` if gradients travel
    with other codecs."""


@dataclass(frozen=True)
class ExpertLimits:
    """What a server of experts grants to others. All numbers are chosen."""

    request_bytes: int = 2**30
    """The most memory of one request."""
    bytes: int = 2**32
    """The most memory of all requests at the same time. Answers count, too, until they are sent."""
    seconds: float = 300.0
    """How long a request may take, including its time in the queue."""
    silence: float = 30.0
    """How long a caller may be silent while it sends tensors, and not read while it is answered."""
    remembered: int = 4096
    """Backward passes that are known to be done."""
    remembered_bytes: int = 2**28
    """The most memory of their results."""


DEFAULT_LIMITS = ExpertLimits()


def codecs_of(tensors: Tensors, schema: Schema) -> CodecFor:
    """The codecs with which tensors travel that fit a schema."""
    codes = {id(tensor): each.compression for tensor, each in zip(tensors, schema, strict=True)}
    return lambda tensor: codec_of(codes[id(tensor)])


def check_tensors(what: str, tensors: Tensors, schema: Schema) -> None:
    """Check number, types and dimensions of tensors, and that all have the same number of rows.

    The sizes of other dimensions may differ from the schema, such as the length of a sequence: only the module knows.

    Raises:
        ValueError: they do not fit.
    """
    if len(tensors) != len(schema):
        raise ValueError(f"{what}: {len(schema)} tensors expected, got {len(tensors)}")
    for number, (tensor, expected) in enumerate(zip(tensors, schema, strict=True)):
        if tensor.ndim != len(expected.size) or tensor.dtype != expected.dtype:
            raise ValueError(f"{what}: tensor {number} must be {_described(expected)}, got {_described(tensor)}")
    if len({len(tensor) for tensor in tensors}) > 1:
        raise ValueError(f"{what}: the tensors have different numbers of rows: {[len(tensor) for tensor in tensors]}")


def _described(tensor: torch.Tensor | BatchTensorDescriptor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def unusual_shapes(tensors: Tensors, schema: Schema) -> str:
    """Shapes that differ from the schema, in words; empty if there are none."""
    pairs = zip(tensors, schema, strict=False)
    unusual = [(tuple(t.shape), tuple(each.size)) for t, each in pairs if tuple(t.shape[1:]) != tuple(each.size[1:])]
    return "; ".join(f"got a tensor of shape {got} where {expected} is usual" for got, expected in unusual)


CallKey = tuple[PeerID, bytes]
"""The caller, and the id that it has given to a call."""


class _Pass(NamedTuple):
    """A backward pass with an identity."""

    result: AwaitableFuture[Outputs]
    nbytes: int


class _Passes:
    """Backward passes by identity, so that none trains twice when its answer is lost.

    Args:
        most: how many passes are remembered, and how many more without their results.
        most_bytes: memory of the results. The oldest are dropped first.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes, self._nbytes = most, most_bytes, 0
        self._passes: dict[CallKey, _Pass] = {}
        self._dropped: Bounded[CallKey, None] = Bounded(most)
        self._waiting: Counter[CallKey] = Counter()

    async def run(self, key: CallKey, pool: TaskPool, tensors: Tensors) -> Outputs:
        """The result of a pass, which is begun unless it has been before."""
        if not key[1]:
            return await pool.submit_task(*tensors)
        if key in self._dropped:
            raise ValueError("this backward pass was done before, and its result is no longer kept: do not repeat it")
        if key not in self._passes:
            self._passes[key] = _Pass(pool.submit_task(*tensors), sum(each.nbytes for each in tensors))
            self._nbytes += self._passes[key].nbytes
            self._drop_oldest()
        result = self._passes[key].result
        self._waiting[key] += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(result))
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                # A pass that has begun continues: its caller may ask again.
                if result.cancel() or (result.done() and result.exception() is not None):
                    self._forget(key)

    def _drop_oldest(self) -> None:
        while len(self._passes) > self._most or self._nbytes > self._most_bytes:
            oldest = next(iter(self._passes))
            if not self._passes[oldest].result.done():
                return
            self._forget(oldest)
            self._dropped[oldest] = None

    def _forget(self, key: CallKey) -> None:
        if key in self._passes:
            self._nbytes -= self._passes.pop(key).nbytes


class ExpertService(ServicerBase):
    """Answers calls to experts. Lives in the loop.

    Args:
        backends: the experts by uid.
    """

    def __init__(self, backends: Mapping[str, ModuleBackend], limits: ExpertLimits = DEFAULT_LIMITS) -> None:
        self._backends, self._limits = backends, limits
        self._passes = _Passes(limits.remembered, limits.remembered_bytes)
        self._held: Counter[PeerID] = Counter()

    async def rpc_info(self, request: ExpertRequest, context: P2PContext) -> ExpertSchemas:
        """What an expert takes and returns."""
        return ExpertSchemas(MSGPackSerializer.dumps(self._backend(request.uid).get_info()))

    async def rpc_forward(self, call: Call, context: P2PContext) -> None:
        """Run an expert."""
        request, backend = await self._request(call)

        async def run(tensors: Tensors) -> Outputs:
            return await backend.forward_pool.submit_task(*tensors)

        await self._answer(call, request, run, backend.forward_schema, backend.outputs_schema)

    async def rpc_backward(self, call: Call, context: P2PContext) -> None:
        """Train an expert; returns the gradients of its inputs."""
        request, backend = await self._request(call)
        run = partial(self._passes.run, (context.remote_id, request.call_id), backend.backward_pool)
        schema = backend.forward_schema, backend.grad_outputs_schema
        await self._answer(call, request, run, schema, backend.grad_inputs_schema)

    def _backend(self, uid: str) -> ModuleBackend:
        backend = self._backends.get(uid)
        if backend is None:
            raise ValueError(f"there is no expert {quoted(uid)} here")
        return backend

    async def _request(self, call: Call) -> tuple[ExpertRequest, ModuleBackend]:
        request = await call.receive(ExpertRequest)
        if request is None or call.payload_size:
            raise ProtocolError("a call to an expert begins with one request without a payload")
        return request, self._backend(request.uid)

    async def _answer(
        self,
        call: Call,
        request: ExpertRequest,
        run: Callable[[Tensors], Awaitable[Outputs]],
        takes: Any,
        returns: Any,
    ) -> None:
        """Receive the tensors of a schema, run the expert, and send the result."""
        flat_schema = [*nested_flatten(takes)]
        with self._room_for(request.nbytes, call.remote):
            tensors, _ = await receive_tensors(call, request.nbytes, self._limits.silence)
            if not isinstance(tensors, list) or not all(isinstance(each, torch.Tensor) for each in tensors):
                raise ProtocolError("a call to an expert takes a list of tensors")
            check_tensors(f"expert {request.uid}", tensors, flat_schema)
            with self._explained(request.uid, tensors, flat_schema):
                async with asyncio.timeout(self._limits.seconds):
                    result = await run(tensors)
            del tensors
        codecs = codecs_of(result, [*nested_flatten(returns)])
        with self._counted(sum(each.nbytes for each in result), call.remote):
            await send_tensors(call, [*result], codecs, end=True, silence=self._limits.silence)

    @contextlib.contextmanager
    def _room_for(self, nbytes: int, peer: PeerID) -> Iterator[None]:
        """Memory for a request, before it arrives. A peer gets at most half of what there is."""
        limits, held = self._limits, self._held
        if nbytes > limits.request_bytes:
            raise ValueError(f"a request of {nbytes} bytes is too large: allowed are {limits.request_bytes}")
        if held.total() + nbytes > limits.bytes or held[peer] + nbytes > max(limits.bytes // 2, limits.request_bytes):
            raise BusyError(f"{held.total()} bytes of requests wait here already: try again later, or another expert")
        with self._counted(nbytes, peer):
            yield

    @contextlib.contextmanager
    def _counted(self, nbytes: int, peer: PeerID) -> Iterator[None]:
        self._held[peer] += nbytes
        try:
            yield
        finally:
            self._held[peer] -= nbytes
            if not self._held[peer]:
                del self._held[peer]

    @contextlib.contextmanager
    def _explained(self, uid: str, tensors: Tensors, schema: Schema) -> Iterator[None]:
        """Add details to errors of the computing thread."""
        try:
            yield
        except TimeoutError:
            raise TimeoutError(f"expert {uid} had no time for this request within {self._limits.seconds:g} s") from None
        except Exception as e:
            unusual = unusual_shapes(tensors, schema)
            raise RuntimeError(f"expert {uid}: {type(e).__name__}: {e}{unusual and f' ({unusual})'}") from e


class ConnectionHandler(Facade):
    """Lets other peers call the experts of a server.

    Args:
        dht: other peers reach the experts through this peer.
        module_backends: the experts by uid.
        balanced: accepted for compatibility: one handler serves all calls.
        shutdown_timeout: the most seconds that :meth:`shutdown` takes.
        start: begin now; otherwise call :meth:`run_in_background` later.
        limits: what others may ask for.
    """

    def __init__(
        self,
        dht: DHT,
        module_backends: Mapping[str, ModuleBackend],
        *,
        balanced: bool = True,
        shutdown_timeout: float = 3,
        start: bool = False,
        limits: ExpertLimits = DEFAULT_LIMITS,
    ) -> None:
        self.dht, self.module_backends, self.shutdown_timeout = dht, module_backends, shutdown_timeout
        self._service = ExpertService(module_backends, limits)
        self._portal = Portal("ConnectionHandler")
        self._started: AwaitableFuture[None] | None = None
        if start:
            self.run_in_background()

    @at_the_door
    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Begin to answer.

        Raises:
            P2PDaemonError: other experts are served on this DHT already.
        """
        if self._started is None:
            check_dht(self.dht)
            self._started = self._portal.submit(self._start(self.dht.p2p))
        if await_ready:
            self._started.result(timeout)

    start = run_in_background

    async def _start(self, p2p: P2P) -> None:
        await self._service.add_p2p_handlers(p2p)
        self._portal.on_close(lambda: self._service.remove_p2p_handlers(p2p))

    def is_alive(self) -> bool:
        return self._started is not None and not self._portal.closed

    def shutdown(self) -> None:
        """Stop answering. Idempotent."""
        self._portal.close(self.shutdown_timeout)
