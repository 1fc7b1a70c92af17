"""The calls of other peers to experts: their messages, the checks at the door, and the answers.

A request is an :class:`ExpertRequest` and a list of tensors; the answer is a list of tensors, too::

    rpc_forward    inputs                        ─►  outputs
    rpc_backward   inputs + output gradients     ─►  input gradients
    rpc_info       (no tensors)                  ─►  ExpertSchemas

Inputs are flat: positional ones, then keyword ones by sorted name, as :func:`~shoal.base.extras.nested_flatten` has
them. There is one gradient for each output, also for integers, where any tensor of as many rows will do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

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
from shoal.errors import BusyError, P2PHandlerError, ProtocolError
from shoal.net.connection import Call
from shoal.net.service import P2PContext, ServicerBase
from shoal.net.transport import Count, Header
from shoal.p2p import P2P
from shoal.peers.identity import PeerID
from shoal.serving.tensors import CodecFor, receive_tensors, send_tensors

Tensors = Sequence[torch.Tensor]
Schema = Sequence[BatchTensorDescriptor]


class ExpertRequest(Header):
    """What is asked of which expert; tensors follow."""

    uid: Annotated[str, Meta(max_length=1024)]
    call_id: Annotated[bytes, Meta(max_length=32)] = b""
    """Random. A backward pass that is asked for again with the same id is answered again, and trains once."""
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
    """The most memory of all requests at the same time."""
    seconds: float = 300.0
    """How long a request may wait and be computed."""
    silence: float = 30.0
    """How long a caller may be silent while its tensors are on their way."""
    remembered: int = 4096
    """Backward passes that are known to be done."""
    remembered_bytes: int = 2**28
    """The most memory of their results."""


DEFAULT_LIMITS = ExpertLimits()


class Pool(Protocol):
    """Requests that wait for the computing thread."""

    def submit_task(self, *args: torch.Tensor) -> AwaitableFuture[tuple[torch.Tensor, ...]]:
        """Queue a request. Cancelling the future takes it out of the queue."""


class Backend(Protocol):
    """An expert, as far as calls are concerned."""

    forward_schema: Any
    outputs_schema: Any
    grad_inputs_schema: Any
    grad_outputs_schema: Any

    @property
    def forward_pool(self) -> Pool:
        """Where forward passes wait."""

    @property
    def backward_pool(self) -> Pool:
        """Where backward passes wait."""

    def get_info(self) -> dict[str, Any]:
        """What callers may know of it."""


def codecs_of(tensors: Tensors, schema: Schema) -> CodecFor:
    """The codecs with which tensors travel that fit a schema."""
    codes = {id(tensor): each.compression for tensor, each in zip(tensors, schema, strict=True)}
    return lambda tensor: codec_of(codes[id(tensor)])


def check_tensors(what: str, tensors: Tensors, schema: Schema) -> None:
    """Check number, types and dimensions of tensors, and that all have equally many rows.

    The sizes of other dimensions may differ from the schema, such as the length of a sequence: only the module knows.

    Raises:
        ValueError: they do not fit.
    """
    if len(tensors) != len(schema):
        raise ValueError(f"{what}: {len(schema)} tensors expected, got {len(tensors)}")
    for number, (tensor, expected) in enumerate(zip(tensors, schema, strict=True)):
        is_fit = tensor.dtype == expected.dtype or not expected.dtype.is_floating_point
        if tensor.ndim != len(expected.size) or not is_fit:
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


class _Pass(NamedTuple):
    """A backward pass with an identity."""

    result: AwaitableFuture[tuple[torch.Tensor, ...]] | None
    """``None`` once its result has been dropped."""
    nbytes: int


class _Passes:
    """Backward passes by identity, so that none trains twice because its answer was lost.

    Args:
        most: how many are remembered.
        most_bytes: memory of their results; the oldest are dropped first.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._passes: Bounded[tuple[PeerID, str, bytes], _Pass] = Bounded(most)
        self._most_bytes = most_bytes
        self._waiting: dict[tuple[PeerID, str, bytes], int] = {}

    async def run(self, key: tuple[PeerID, str, bytes], pool: Pool, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """The result of a pass, which is begun unless it has been before."""
        if key not in self._passes:
            # The gradients that it returns are as large as the inputs.
            self._passes[key] = _Pass(pool.submit_task(*tensors), sum(each.nbytes for each in tensors))
            self._drop_results()
        result = self._passes[key].result
        if result is None:
            raise P2PHandlerError("this backward pass was done before, and its result is no longer kept: do not repeat")
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            return await asyncio.shield(asyncio.wrap_future(result))
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                # One that has begun goes on: its caller may ask again.
                if result.cancel() or (result.done() and result.exception() is not None):
                    self._passes.pop(key, None)

    def _drop_results(self) -> None:
        total = sum(each.nbytes for each in self._passes.values() if each.result is not None)
        for key, each in [*self._passes.items()]:
            if total <= self._most_bytes:
                return
            if each.result is not None and each.result.done():
                self._passes[key] = _Pass(None, 0)
                total -= each.nbytes


class ExpertService(ServicerBase):
    """Answers calls to experts. Lives in the loop.

    Args:
        backends: the experts by uid.
    """

    def __init__(self, backends: Mapping[str, Backend], limits: ExpertLimits = DEFAULT_LIMITS) -> None:
        self._backends, self._limits = backends, limits
        self._passes = _Passes(limits.remembered, limits.remembered_bytes)
        self._held = 0

    @classmethod
    def handle_name(cls, method: str, namespace: str | None) -> str:
        name = f"ExpertService.{method}"  # also for subclasses
        return name if namespace is None else f"{namespace}::{name}"

    async def rpc_info(self, request: ExpertRequest, context: P2PContext) -> ExpertSchemas:
        """What an expert takes and returns."""
        return ExpertSchemas(MSGPackSerializer.dumps(self._backend(request.uid).get_info()))

    async def rpc_forward(self, call: Call, context: P2PContext) -> None:
        """Run an expert."""
        request, backend = await self._request(call)
        schema = [*nested_flatten(backend.forward_schema)]
        with self._room_for(request.nbytes):
            inputs = await self._receive(call, request)
            check_tensors(f"inputs of expert {request.uid}", inputs, schema)
            with self._explained(request.uid, inputs, schema):
                async with asyncio.timeout(self._limits.seconds):
                    outputs = await backend.forward_pool.submit_task(*inputs)
        await send_tensors(call, [*outputs], codecs_of(outputs, [*nested_flatten(backend.outputs_schema)]), end=True)

    async def rpc_backward(self, call: Call, context: P2PContext) -> None:
        """Train an expert; returns the gradients of its inputs."""
        request, backend = await self._request(call)
        inputs_schema, outputs_schema = [*nested_flatten(backend.forward_schema)], backend.grad_outputs_schema
        schema = [*inputs_schema, *nested_flatten(outputs_schema)]
        with self._room_for(request.nbytes):
            tensors = await self._receive(call, request)
            check_tensors(f"inputs and output gradients of expert {request.uid}", tensors, schema)
            with self._explained(request.uid, tensors, schema):
                async with asyncio.timeout(self._limits.seconds):
                    if request.call_id:
                        key = context.remote_id, request.uid, request.call_id
                        grads = await self._passes.run(key, backend.backward_pool, tensors)
                    else:
                        grads = await backend.backward_pool.submit_task(*tensors)
        await send_tensors(call, [*grads], codecs_of(grads, [*nested_flatten(backend.grad_inputs_schema)]), end=True)

    def _backend(self, uid: str) -> Backend:
        backend = self._backends.get(uid)
        if backend is None:
            raise ValueError(f"there is no expert {quoted(uid)} here")
        return backend

    async def _request(self, call: Call) -> tuple[ExpertRequest, Backend]:
        request = await call.receive(ExpertRequest)
        if request is None or call.payload_size:
            raise ProtocolError("a call to an expert begins with one request without a payload")
        return request, self._backend(request.uid)

    async def _receive(self, call: Call, request: ExpertRequest) -> list[torch.Tensor]:
        tensors, _ = await receive_tensors(call, request.nbytes, self._limits.silence)
        if not isinstance(tensors, list) or not all(isinstance(each, torch.Tensor) for each in tensors):
            raise ProtocolError("a call to an expert takes a list of tensors")
        return tensors

    @contextlib.contextmanager
    def _room_for(self, nbytes: int) -> Iterator[None]:
        """Memory for a request, before it arrives."""
        limits = self._limits
        if nbytes > limits.request_bytes:
            raise ValueError(f"a request of {nbytes} bytes is too large: allowed are {limits.request_bytes}")
        if self._held + nbytes > limits.bytes:
            raise BusyError(f"{self._held} bytes of requests wait here already: try again later, or another expert")
        self._held += nbytes
        try:
            yield
        finally:
            self._held -= nbytes

    @contextlib.contextmanager
    def _explained(self, uid: str, tensors: Tensors, schema: Schema) -> Iterator[None]:
        """Say more about what goes wrong in the computing thread."""
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
        module_backends: Mapping[str, Backend],
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
