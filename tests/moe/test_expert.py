"""A remote expert as a module: results, gradients, failures, time limits and repetitions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shoal import DHT, P2PHandlerError
from shoal.access.badges import ROLES_BY_NAME
from shoal.access.tokens import Token
from shoal.errors import NotAMemberError, P2PDaemonError, ProtocolError, ReactorError, StreamClosedError
from shoal.moe import expert as client
from shoal.moe import handler
from shoal.moe.declare import declare_experts, get_experts
from shoal.moe.expert import (
    RemoteExpert,
    RemoteExpertWorker,
    batch_create_remote_experts,
    create_remote_experts,
)
from shoal.moe.uids import ExpertInfo
from shoal.serving.tensors import send_tensors
from tests.device import chosen_device
from tests.dht.members import Authority, Member
from tests.moe.servers import Row, expert, serving
from tests.moe.swarms import soon, swarm
from tests.p2p.peers import until
from tests.reach.relays import HERE, tell
from tests.test_reactor import in_forked_child, needs_fork


class Swarm(NamedTuple):
    server: DHT
    client: DHT

    def expert(self, uid: str = "e.0", **options: Any) -> RemoteExpert:
        return RemoteExpert(ExpertInfo(uid, self.server.peer_id), self.client.p2p, **options)


@pytest.fixture
def two() -> Iterator[Swarm]:
    with swarm(2) as [server, client]:
        yield Swarm(server, client)


def test_results_and_gradients_are_those_of_the_module(two: Swarm) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
    with serving(two.server, {"e.0": expert(module, Row(5))}):
        remote, inputs = two.expert(), torch.randn(3, 5, requires_grad=True)
        rows = [remote(inputs[n : n + 1]) for n in range(3)]
        together = remote(inputs)
        assert together.shape == (3, 4)
        assert torch.allclose(torch.cat(rows), together, atol=1e-5)
        assert torch.allclose(together, module(inputs), atol=1e-5)
        weights = torch.randn(3, 4)
        (gradient,) = torch.autograd.grad((together * weights).sum(), inputs)
        (expected,) = torch.autograd.grad((module(inputs) * weights).sum(), inputs)
        assert torch.allclose(gradient, expected, atol=1e-5)
        assert gradient.norm() > 0
        assert remote(inputs.detach()).requires_grad, "the expert itself is trained"
        with torch.no_grad():
            assert not remote(inputs).requires_grad
        (first,) = torch.autograd.grad(remote(inputs).sum(), inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            (first.sum() + inputs.sum()).backward()


def test_errors_of_the_server_are_told_and_it_lives_on(two: Swarm) -> None:
    with serving(two.server, {"e.0": expert(nn.Linear(5, 4), Row(5))}):
        remote = two.expert()
        with pytest.raises(P2PHandlerError, match="3x6"):
            remote(torch.randn(3, 6))
        with pytest.raises(P2PHandlerError, match=r"no expert 'e\.1'"):
            two.expert("e.1")(torch.randn(3, 5))
        output = remote(torch.randn(3, 5))
    with pytest.raises(P2PDaemonError):
        output.sum().backward()
    with pytest.raises(P2PDaemonError):
        remote(torch.randn(3, 5))
    for remote in (
        RemoteExpert(ExpertInfo("e.0", None), None),
        RemoteExpert(ExpertInfo("e.0", two.client.peer_id), None),
    ):
        with pytest.raises(P2PDaemonError, match="has no peer"):
            remote(torch.randn(3, 5))


def nested(first: Any, *, scale: torch.Tensor, shift: torch.Tensor) -> dict[str, Any]:
    a, (b, number) = first
    return {"sum": [a * scale + b @ b.mT, shift], "next": number + 1}


def test_nested_inputs_keywords_and_integer_outputs(two: Swarm) -> None:
    """Keywords may come in any order. Codes of the schema are followed."""
    first = (Row(2, 2), [Row(2, 3), Row(dtype=torch.int64)])
    both = expert(nested, first, kwargs_schema={"scale": Row(1, 1), "shift": Row(4)})
    only_keywords = expert(lambda *, x: x * 2, kwargs_schema={"x": Row(3)})
    with serving(two.server, {"e.0": both, "e.1": only_keywords}):
        a, b, scale = (torch.randn(2, *size, requires_grad=True) for size in ((2, 2), (2, 3), (1, 1)))
        shift = torch.ones(2, 4)
        remote, inputs = two.expert(), (a, [b, torch.tensor([1, 2])])
        output = remote(inputs, shift=shift, scale=scale)
        expected = nested(inputs, scale=scale, shift=shift)
        assert [*output] == ["next", "sum"] or [*output] == ["sum", "next"]
        assert output["next"].tolist() == [2, 3]
        assert not output["next"].requires_grad
        assert torch.allclose(output["sum"][0], expected["sum"][0], atol=1e-5)
        grads = torch.autograd.grad(output["sum"][0].sum(), (a, b, scale))
        for grad, right in zip(grads, torch.autograd.grad(expected["sum"][0].sum(), (a, b, scale)), strict=True):
            assert torch.allclose(grad, right, atol=1e-5)
        assert two.expert("e.1")(x=torch.ones(1, 3)).tolist() == [[2, 2, 2]]
        with pytest.raises(AssertionError, match=r"keyword arguments \['scale', 'shift'\], got \[\]"):
            remote(inputs)
        with pytest.raises(KeyError, match="scale"):
            remote(inputs, scales=scale, shift=shift)
        with pytest.raises(TypeError, match="structure"):
            remote(a, [b, b], scale=scale, shift=shift)
        with pytest.raises(TypeError, match=r"tensors only, got float: 0\.5"):
            remote((a, [b, 0.5]), scale=scale, shift=shift)


def test_each_backward_trains_once_even_if_its_answer_is_lost(two: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 1, bias=False)
    backend = expert(module, Row(2), optimizer=torch.optim.SGD(module.parameters(), lr=1.0))
    lost = iter([True])

    async def lose_once(call: Any, *args: Any, **kwargs: Any) -> int:
        if next(lost, False):
            call.connection.abort()
            raise StreamClosedError("lost")
        return await send_tensors(call, *args, **kwargs)

    with serving(two.server, {"e.0": backend}):
        weight, inputs = module.weight.detach().clone(), torch.tensor([[1.0, 2.0]], requires_grad=True)
        output = two.expert()(inputs)
        monkeypatch.setattr(handler, "send_tensors", lose_once)
        (gradient,) = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        assert next(lost, None) is None
        assert torch.equal(gradient, weight)
        assert torch.allclose(module.weight, weight - inputs)
        output.sum().backward()
        assert torch.allclose(module.weight, weight - 2 * inputs), "another backward trains again"


def test_refusal_is_told_before_all_tensors_are_sent(two: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never_done(*args: Any, **kwargs: Any) -> None:
        await asyncio.Event().wait()

    with serving(two.server, {"e.0": expert(nn.Linear(2, 2), Row(2))}):
        remote, unknown = two.expert(), two.expert("e.1")
        unknown._schemas = remote.info
        monkeypatch.setattr(client, "send_tensors", never_done)
        with pytest.raises(P2PHandlerError, match=r"no expert 'e\.1'"):
            unknown(torch.ones(1, 2))


class Stuck:
    """A pool that never does anything."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def submit_task(self, *args: torch.Tensor) -> Any:
        future: Any = handler.AwaitableFuture()
        future.add_done_callback(lambda _: self.cancelled.set())
        return future


def test_silent_server_is_a_timeout_and_learns_of_it(two: Swarm) -> None:
    backend = expert(nn.Linear(2, 2), Row(2))
    with serving(two.server, {"e.0": backend}):
        remote = two.expert(timeout=0.2)
        output = remote(torch.ones(1, 2))
        backend.forward_pool = forward = Stuck()  # type: ignore[assignment]
        backend.backward_pool = backward = Stuck()  # type: ignore[assignment]
        with pytest.raises(TimeoutError, match=r"expert e\.0 of peer .* did not answer within 0\.2 s"):
            remote(torch.ones(1, 2))
        assert forward.cancelled.wait(30)
        with pytest.raises(TimeoutError, match="did not answer"):
            output.sum().backward()
        assert backward.cancelled.wait(30)


def test_malformed_schemas_are_refused(two: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = expert(nn.Linear(2, 2), Row(2))
    changes = [{"forward_schema": 7}, {"outputs_schema": ["x"]}, {"keyword_names": ("a",)}, {"max_batch_size": 0}]
    with serving(two.server, {"e.0": backend}):
        for info in (["x"], *[{**backend.get_info(), **change} for change in changes]):
            monkeypatch.setattr(backend, "get_info", lambda info=info: info)
            with pytest.raises(ProtocolError, match=r"malformed schemas of expert e\.0"):
                two.expert()(torch.ones(1, 2))
            monkeypatch.undo()


@pytest.mark.devices
def test_results_are_where_the_inputs_are(two: Swarm) -> None:
    device = chosen_device()
    with serving(two.server, {"e.0": expert(nn.Linear(2, 3), Row(2))}):
        inputs = torch.ones(1, 2, device=device, requires_grad=True)
        output = two.expert()(inputs)
        assert output.device == inputs.device
        output.sum().backward()
        assert inputs.grad is not None
        assert inputs.grad.device == inputs.device


def test_experts_are_made_of_what_is_known_of_them(two: Swarm) -> None:
    with serving(two.server, {"e.0": expert(nn.Identity(), Row(2))}):
        declare_experts(two.server, ["e.0"], soon())
        (found,) = get_experts(two.client, ["e.0"])
        assert found(torch.ones(1, 2)).tolist() == [[1, 1]]
        infos = [ExpertInfo("e.0", two.server.peer_id), None]
        known: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future = create_remote_experts(known, two.client, return_future=True)
        known.set_result(infos)
        first, nothing = future.result(10)
        assert nothing is None
        assert first(torch.ones(1, 2)).tolist() == [[1, 1]]
        [[_, nothing], rest] = batch_create_remote_experts([infos, []], two.client)
        assert (nothing, rest) == (None, [])


def many_at_once(count: int) -> None:
    """Coroutines run together: none ends before all have begun."""
    begun, everyone = [], asyncio.Event()

    async def meet(number: int) -> int:
        begun.append(number)
        if len(begun) == count:
            everyone.set()
        await everyone.wait()
        return number

    futures = [RemoteExpertWorker.run_coroutine(meet(n), return_future=True) for n in range(count)]
    assert [future.result(30) for future in futures] == [*range(count)]


@needs_fork
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_worker_runs_coroutines_of_threads_and_forked_processes(two: Swarm) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        [*threads.map(many_at_once, [10, 10])]

    async def block() -> None:
        RemoteExpertWorker.run_coroutine(asyncio.sleep(0))

    with pytest.raises(ReactorError, match="would deadlock"):
        RemoteExpertWorker.run_coroutine(block())
    remote = two.expert()

    def in_child(connection: Any) -> None:
        many_at_once(10)
        with pytest.raises(ReactorError, match="before a fork"):
            remote(torch.ones(1, 2))
        connection.send("done")

    assert in_forked_child(in_child) == "done"


# --- who may call, and by which way -----------------------------------------------------------------------------------


def test_experts_behind_routers_are_called_through_relays() -> None:
    with ExitStack() as stack:
        relay = stack.enter_context(DHT(start=True, force_reachability="public", host_maddrs=HERE["host_maddrs"]))
        join = {"initial_peers": relay.get_visible_maddrs(), "client_mode": True, "start": True}
        server, client = (stack.enter_context(DHT(**join)) for _ in range(2))

        async def reserve(handle: Any, node: Any) -> None:
            for p2p in (server.p2p, client.p2p):
                p2p.circuits.punching = None  # on one machine that would always succeed
            server.p2p.reservations.want(True)
            await until(lambda: bool(server.p2p.reservations.held))
            tell(client.p2p, server.p2p)

        server.run_coroutine(reserve)
        stack.enter_context(serving(server, {"e.0": expert(nn.Linear(5000, 2), Row(5000))}))
        inputs = torch.randn(20, 5000, requires_grad=True)
        RemoteExpert(ExpertInfo("e.0", server.peer_id), client.p2p)(inputs).sum().backward()
        assert inputs.grad is not None
        assert client.p2p.metrics.bytes_relayed > 2 * inputs.nbytes


def test_only_members_who_train_may_call_experts() -> None:
    run, until = Token.new_run("friends"), int(soon(3600))
    with ExitStack() as stack:
        server = stack.enter_context(DHT(start=True, token=run.text))
        known = server.get_visible_maddrs()
        stack.enter_context(serving(server, {"e.0": expert(nn.Identity(), Row(2))}))
        found: dict[str, Any] = {}
        for name in ("train", "monitor"):
            dht = stack.enter_context(DHT(known, start=True, token=run.invite(ROLES_BY_NAME[name], until).text))
            (found[name],) = get_experts(dht, ["e.0"])  # type: ignore[misc]
        assert found["train"](torch.ones(1, 2)).tolist() == [[1, 1]]
        with pytest.raises(NotAMemberError, match="monitor"):
            found["monitor"](torch.ones(1, 2))


def test_authorizer_covers_calls_to_experts() -> None:
    authority = Authority()
    with ExitStack() as stack:
        server = stack.enter_context(DHT(start=True, authorizer=Member(authority)))
        known, info = server.get_visible_maddrs(), ExpertInfo("e.0", server.peer_id)
        stack.enter_context(serving(server, {"e.0": expert(nn.Identity(), Row(2))}))
        member = stack.enter_context(DHT(known, start=True, authorizer=Member(authority)))
        stranger = stack.enter_context(DHT(start=True))
        assert RemoteExpert(info, member.p2p)(torch.ones(1, 2)).tolist() == [[1, 1]]
        stranger.p2p.add_addresses(server.peer_id, known)
        with pytest.raises(P2PHandlerError, match="only members may call this"):
            RemoteExpert(info, stranger.p2p)(torch.ones(1, 2))
