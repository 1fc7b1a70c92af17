"""A module that another peer runs: called like any module, and trained by ``backward``.

:class:`RemoteExpert` is what users hold. Its forward pass sends the inputs to the server and waits for the outputs; its
backward pass sends the inputs again, with the gradients of the outputs. The server trains the expert and returns the
gradients of the inputs. The coroutines :func:`expert_forward` and :func:`expert_backward` do the same without autograd.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar, cast, overload

import torch
from torch import nn

from shoal.base.extras import nested_compare, nested_flatten, nested_map, nested_pack
from shoal.base.logs import quoted
from shoal.base.reactor import AwaitableFuture, Portal
from shoal.base.serializer import MSGPackSerializer
from shoal.base.tasks import cancel_and_wait
from shoal.compression.serialization import BatchTensorDescriptor
from shoal.dht import DHT, DHTNode
from shoal.errors import P2PDaemonError, ProtocolError, ReactorError, StreamClosedError
from shoal.moe.handler import ExpertRequest, ExpertSchemas, ExpertService, codecs_of
from shoal.moe.uids import ExpertInfo, ExpertUID
from shoal.p2p import P2P, PeerID, StubBase
from shoal.serving.tensors import receive_tensors, send_tensors

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]
Schemas = Mapping[str, Any]
"""What an expert takes and returns: ``forward_schema``, ``outputs_schema``, ``keyword_names``, ``max_batch_size``."""

DUMMY = torch.empty(0, device="cpu", requires_grad=True)
"""An input that requires a gradient, so that autograd also calls ``backward`` if no other input does."""
DEFAULT_TIMEOUT = 60.0
"""How long a server may be silent, in seconds. Chosen: a batch takes less, also behind some others in the queue."""
MAX_ANSWER_BYTES = 2**30
"""The most memory of an answer. Chosen: what servers accept."""
ROWS_PER_REQUEST = 1024
"""The most rows of a request to a server that does not say how many it takes. Chosen."""
# How fast tensors leave at least; servers have so much more time. Chosen: 1 Mbit/s.
_LEAST_BYTES_PER_SECOND = 2**17


class RemoteExpertWorker:
    """Runs coroutines for experts in the background loop of this process."""

    _portal: ClassVar[Portal | None] = None

    @overload
    @classmethod
    def run_coroutine(cls, coro: Coroutine[Any, Any, T], return_future: Literal[False] = False) -> T: ...

    @overload
    @classmethod
    def run_coroutine(cls, coro: Coroutine[Any, Any, T], return_future: Literal[True]) -> AwaitableFuture[T]: ...

    @classmethod
    def run_coroutine(cls, coro: Coroutine[Any, Any, T], return_future: bool = False) -> T | AwaitableFuture[T]:
        """Run a coroutine, together with those of other threads.

        Args:
            return_future: return at once; cancelling the future cancels the coroutine.

        Raises:
            ReactorError: a blocking call from inside the loop.
        """
        portal = cls._portal
        if portal is None or portal.closed:  # also in a forked child
            portal = cls._portal = Portal("RemoteExpert")
        return portal.submit(coro) if return_future else portal.call(coro)


def get_server_stub(p2p: P2P, peer_id: PeerID) -> StubBase:
    """An object that calls the experts of a peer."""
    return ExpertService.get_stub(p2p, peer_id)


# --- calls ------------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(uid: ExpertUID, stub: StubBase, seconds: float | None) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        waited = "in time" if seconds is None else f"within {seconds:g} s"
        raise TimeoutError(
            f"expert {uid} of peer {stub.peer} did not answer {waited}: its server is overloaded or has stopped; "
            "`timeout` is how long to wait"
        ) from None


async def expert_info(uid: ExpertUID, stub: StubBase, timeout: float | None = DEFAULT_TIMEOUT) -> Schemas:
    """Ask a server what an expert takes and returns.

    Raises:
        P2PHandlerError, P2PDaemonError, TimeoutError, ProtocolError: as for :func:`expert_forward`.
    """
    with _explained(uid, stub, timeout):
        answer: ExpertSchemas = await stub.rpc_info(ExpertRequest(uid), timeout=timeout)
    try:
        info = MSGPackSerializer.loads(answer.info)
        args, kwargs = info["forward_schema"]
        info["forward_schema"], info["keyword_names"] = (tuple(args), dict(kwargs)), tuple(info["keyword_names"])
        rows = info.setdefault("max_batch_size", ROWS_PER_REQUEST)
        schemas = info["forward_schema"], info["outputs_schema"], info.get("grad_outputs_schema", ())
        descriptions = [*nested_flatten(schemas)]
    except (ValueError, TypeError, KeyError) as e:
        raise ProtocolError(f"malformed schemas of expert {uid}: {type(e).__name__}: {e}") from None
    is_valid = all(isinstance(each, BatchTensorDescriptor) for each in descriptions) and type(rows) is int and rows > 0
    if not is_valid or {*kwargs} != {*info["keyword_names"]}:
        raise ProtocolError(f"malformed schemas of expert {uid}: {quoted(info)}")
    return cast(Schemas, info)


async def expert_forward(
    uid: ExpertUID, inputs: Tensors, info: Schemas, stub: StubBase, timeout: float | None = DEFAULT_TIMEOUT
) -> list[torch.Tensor]:
    """Run an expert.

    Args:
        uid: the expert.
        inputs: its inputs, flattened.
        info: what it takes and returns.
        stub: calls its peer.
        timeout: seconds for which the server may be silent, besides those that the inputs need at 1 Mbit/s; ``None``:
            no limit.

    Returns:
        The outputs, flattened, on the CPU.

    Raises:
        P2PHandlerError: the expert failed, with its reason.
        P2PDaemonError: the peer cannot be reached.
        TimeoutError: it did not answer in time.
        ProtocolError: it answered something else.
    """
    schema = [*nested_flatten(info["forward_schema"])]
    outputs = await _ask(uid, "rpc_forward", inputs, schema, stub, timeout)
    if len(outputs) != len([*nested_flatten(info["outputs_schema"])]):
        raise ProtocolError(f"expert {uid} returned {len(outputs)} tensors, other than its schema says")
    return outputs


async def expert_backward(
    uid: ExpertUID,
    inputs: Tensors,
    grad_outputs: Tensors,
    info: Schemas,
    stub: StubBase,
    timeout: float | None = DEFAULT_TIMEOUT,
) -> list[torch.Tensor]:
    """Train an expert, once; arguments and errors as for :func:`expert_forward`.

    Args:
        grad_outputs: a gradient for each output, also for integers.

    Returns:
        The gradients of all inputs, on the CPU; zeros for integers.
    """
    grads_schema = info.get("grad_outputs_schema", info["outputs_schema"])
    schema = [*nested_flatten(info["forward_schema"]), *nested_flatten(grads_schema)]
    grads = await _ask(uid, "rpc_backward", [*inputs, *grad_outputs], schema, stub, timeout)
    if [each.shape for each in grads] != [each.shape for each in inputs]:
        raise ProtocolError(f"expert {uid} returned gradients of other shapes than its inputs have")
    return grads


async def _ask(
    uid: ExpertUID,
    method: str,
    tensors: Tensors,
    schema: Sequence[BatchTensorDescriptor],
    stub: StubBase,
    timeout: float | None,
) -> list[torch.Tensor]:
    if len(tensors) != len(schema):
        raise TypeError(f"expert {uid} takes {len(schema)} tensors in {method}, got {len(tensors)}")
    nbytes = sum(each.nbytes for each in tensors)
    # The server knows a request that is repeated by its id, and does not train twice.
    request = ExpertRequest(uid, secrets.token_bytes(16), nbytes)

    silence = None if timeout is None else timeout + nbytes / _LEAST_BYTES_PER_SECOND

    async def attempt() -> Any:
        with _explained(uid, stub, timeout):
            async with getattr(stub, method)() as call:
                await call.send(request)
                sending = asyncio.ensure_future(send_tensors(call, [*tensors], codecs_of(tensors, schema), end=True))
                receiving = asyncio.ensure_future(receive_tensors(call, MAX_ANSWER_BYTES, silence))
                try:
                    # A server that refuses the request says so before it has the tensors.
                    await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
                    if not receiving.done():
                        await sending
                    return (await receiving)[0]
                finally:
                    await cancel_and_wait(sending, receiving)

    try:
        answer = await attempt()
    except StreamClosedError:  # the answer may be lost
        stub.dial_anew()
        answer = await attempt()
    if not isinstance(answer, list) or not all(isinstance(each, torch.Tensor) for each in answer):
        raise ProtocolError(f"expert {uid} answered something else than tensors")
    return answer


# --- modules ----------------------------------------------------------------------------------------------------------


def flat_inputs(info: Schemas, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The inputs of a call to an expert as a flat list.

    Raises:
        AssertionError: another number of keyword arguments is expected.
        KeyError: a keyword argument has another name.
        TypeError: their structure differs from that of the schema, or they are no tensors.
    """
    names = info["keyword_names"]
    assert len(kwargs) == len(names), f"this expert takes the keyword arguments {[*names]}, got {[*kwargs]}"
    if missing := [name for name in names if name not in kwargs]:
        raise KeyError(f"this expert takes the keyword arguments {[*names]}: {missing} not found in {[*kwargs]}")
    inputs = args, dict(kwargs)
    if not nested_compare(inputs, info["forward_schema"]):
        shapes = nested_map(lambda each: tuple(each.shape), info["forward_schema"])
        raise TypeError(f"the inputs must have the structure of (arguments, keyword arguments) {shapes}")
    flat = [*nested_flatten(inputs)]
    for each in flat:
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"an expert takes tensors only, got {type(each).__name__}: {quoted(each)}")
    return flat


class RemoteExpert(nn.Module):
    """An expert of another peer, as a module without parameters.

    Results are on the device of the first input, and each gradient is on the device of its input. A backward pass makes
    the server train the expert by one step.

    Args:
        expert_info: the expert and its peer.
        p2p: calls it.
        timeout: how many seconds the server may be silent; ``None``: no limit.
    """

    def __init__(self, expert_info: ExpertInfo, p2p: P2P | None, *, timeout: float | None = DEFAULT_TIMEOUT) -> None:
        super().__init__()
        self._expert_info, self.p2p, self.timeout = expert_info, p2p, timeout
        self.has_answered: bool | None = None
        """Whether it has answered when a mixture called it last; ``None``: it was not called."""
        self._schemas: Schemas | None = None
        self._pid = os.getpid()

    @property
    def uid(self) -> ExpertUID:
        """The name of the expert."""
        return self._expert_info.uid

    @property
    def peer_id(self) -> PeerID | None:
        """The peer that runs it."""
        return self._expert_info.peer_id

    @property
    def stub(self) -> StubBase:
        """Calls its peer.

        Raises:
            P2PDaemonError: this expert was made without a peer.
            ReactorError: it was made before a fork.
        """
        if self.p2p is None or self.peer_id is None:
            raise P2PDaemonError(f"expert {self.uid} has no peer: get it with get_experts()")
        if self._pid != os.getpid():
            raise ReactorError(f"expert {self.uid} was made before a fork: make a DHT and get it again after the fork")
        return get_server_stub(self.p2p, self.peer_id)

    @property
    def info(self) -> Schemas:
        """What the expert takes and returns. The server is asked for it once.

        Raises:
            P2PHandlerError, P2PDaemonError, TimeoutError, ProtocolError: as for :func:`expert_forward`.
        """
        if self._schemas is None:
            self._schemas = RemoteExpertWorker.run_coroutine(expert_info(self.uid, self.stub, self.timeout))
        return self._schemas

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the expert; tensors may be nested as the expert's module has them.

        Raises:
            AssertionError, KeyError, TypeError: as for :func:`flat_inputs`.
            P2PHandlerError, P2PDaemonError, TimeoutError, ProtocolError: as for :func:`expert_forward`.
        """
        inputs = flat_inputs(self.info, args, kwargs)
        outputs = _RemoteModuleCall.apply(DUMMY, self, *inputs)  # type: ignore[no-untyped-call]
        return nested_pack(outputs, self.info["outputs_schema"])

    def extra_repr(self) -> str:
        return f"uid={self.uid}, peer_id={self.peer_id}"


class _RemoteModuleCall(torch.autograd.Function):
    """One call of an expert, and the call that trains it."""

    @staticmethod
    def forward(ctx: Any, dummy: torch.Tensor, expert: RemoteExpert, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.expert = expert
        ctx.save_for_backward(*inputs)
        on_cpu = [each.detach().cpu() for each in inputs]
        call = expert_forward(expert.uid, on_cpu, expert.info, expert.stub, expert.timeout)
        answer = RemoteExpertWorker.run_coroutine(call)
        outputs = tuple(each.detach().to(inputs[0].device) for each in answer)
        ctx.outputs = [(each.shape, each.dtype) for each in outputs]
        ctx.mark_non_differentiable(*[each for each in outputs if not each.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, expert = ctx.saved_tensors, ctx.expert
        grads_on_cpu = [
            grad.detach().cpu() if dtype.is_floating_point else torch.zeros(shape, dtype=dtype, device="cpu")
            for grad, (shape, dtype) in zip(grad_outputs, ctx.outputs, strict=True)
        ]
        on_cpu = [each.detach().cpu() for each in inputs]
        call = expert_backward(expert.uid, on_cpu, grads_on_cpu, expert.info, expert.stub, expert.timeout)
        grads = RemoteExpertWorker.run_coroutine(call)
        there = [grad.detach().to(each.device) for grad, each in zip(grads, inputs, strict=True)]
        return None, None, *once(there)


class _Once(torch.autograd.Function):
    """Makes it an error to differentiate gradients again; autograd would take them for constants."""

    @staticmethod
    def forward(ctx: Any, dummy: torch.Tensor, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise RuntimeError("remote experts have no second derivatives: leave out create_graph=True")


def once(grads: Tensors) -> list[torch.Tensor | None]:
    """Gradients as ``backward`` returns them: none for integers, and none that can be differentiated again."""
    floats = [each for each in grads if each.is_floating_point()]
    if torch.is_grad_enabled():
        floats = [*_Once.apply(DUMMY, *floats)]  # type: ignore[no-untyped-call]
    left = iter(floats)
    return [next(left) if each.is_floating_point() else None for each in grads]


# --- making them ------------------------------------------------------------------------------------------------------

Infos = Sequence[ExpertInfo | None]
Experts = list[RemoteExpert | None]


def experts_from(infos: Infos, p2p: P2P) -> Experts:
    """Experts to call; ``None`` stays ``None``."""
    return [None if info is None else RemoteExpert(info, p2p) for info in infos]


def create_remote_experts(
    infos: Infos | concurrent.futures.Future[Infos], dht: DHT, return_future: bool = False
) -> Experts | AwaitableFuture[Experts]:
    """Make experts of what is known of them.

    Args:
        infos: the experts with their peers, ``None`` for those that were not found; or a future of that.
        dht: calls the experts.
        return_future: return at once.
    """
    return _create(infos, dht, experts_from, return_future)


def batch_create_remote_experts(
    infos: Sequence[Infos] | concurrent.futures.Future[Sequence[Infos]], dht: DHT, return_future: bool = False
) -> list[Experts] | AwaitableFuture[list[Experts]]:
    """Like :func:`create_remote_experts`, for a list of such lists."""
    return _create(infos, dht, lambda batch, p2p: [experts_from(each, p2p) for each in batch], return_future)


def _create(infos: Any, dht: DHT, make: Callable[[Any, P2P], T], return_future: bool) -> T | AwaitableFuture[T]:
    async def create(handle: Any, node: DHTNode) -> T:
        is_future = isinstance(infos, concurrent.futures.Future)
        return make(await asyncio.wrap_future(infos) if is_future else infos, node.p2p)

    return dht.run_coroutine(create, return_future=True) if return_future else dht.run_coroutine(create)
