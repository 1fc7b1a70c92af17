"""A server of experts as its callers and its owner see it: calls, limits, uids, its beginning and its end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import shoal as hivemind
from shoal import DHT, CompressionType, P2PHandlerError, get_dht_time
from shoal.access.badges import ROLES_BY_NAME, Roles
from shoal.access.tokens import Token
from shoal.base.extras import nested_flatten
from shoal.compression.serialization import BatchTensorDescriptor
from shoal.errors import NotAMemberError, P2PDaemonError, StreamClosedError
from shoal.moe import layers
from shoal.moe.backend import ModuleBackend
from shoal.moe.background import background_server
from shoal.moe.declare import declare, declare_experts, get_experts
from shoal.moe.expert import RemoteExpert
from shoal.moe.expert_server import Server, _generate_uids
from shoal.moe.handler import ConnectionHandler, ExpertLimits, ExpertRequest, ExpertService
from shoal.moe.uids import ExpertInfo
from shoal.serving.tensors import TensorList, receive_tensors, send_tensors
from tests.device import chosen_device
from tests.moe.swarms import swarm

pytestmark = pytest.mark.timeout(120)
SGD = partial(torch.optim.SGD, lr=1.0)
ROW = BatchTensorDescriptor(2)
SOON = 20.0


class Gate(nn.Module):
    """A scaled copy, which waits until it may go on; keeps the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.may_go, self.began, self.sizes = threading.Event(), threading.Event(), list[int]()
        self.may_go.set()

    def shut(self) -> None:
        """From now on, batches wait. One has passed already, when the schema was found out."""
        self.may_go.clear()
        self.began.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.began.set()
        assert self.may_go.wait(SOON)
        self.sizes.append(len(x))
        if x.shape[1:] != (2,):
            raise ValueError(f"width {x.shape[1]}")
        return x * self.scale


def backend_of(module: nn.Module, uid: str = "e.0", **kwargs: Any) -> ModuleBackend:
    optimizer = SGD(module.parameters()) if [*module.parameters()] else None
    return ModuleBackend(uid, module, optimizer=optimizer, args_schema=(ROW,), **{"max_batch_size": 64, **kwargs})


@contextmanager
def served(backends: Mapping[str, ModuleBackend], **kwargs: Any) -> Iterator[tuple[Server, DHT]]:
    """A server, and another peer."""
    with swarm(2) as (dht, caller):
        server = Server(dht, backends, start=True, **kwargs)
        try:
            yield server, caller
        finally:
            server.shutdown()
            server.join(SOON)
            assert not server.is_alive()


def ask(server: Server, caller: DHT, method: str, *tensors: torch.Tensor, **fields: Any) -> Any:
    """A future of the answer to one call."""

    async def call(dht: DHT, node: Any) -> list[torch.Tensor]:
        stub = ExpertService.get_stub(node.p2p, server.dht.peer_id)
        nbytes = sum(each.nbytes for each in tensors)
        async with getattr(stub, method)() as call:
            await call.send(ExpertRequest(**{"uid": "e.0", "nbytes": nbytes, **fields}))
            await send_tensors(call, [*tensors], end=True)
            return (await receive_tensors(call, 2**30))[0]

    return caller.run_coroutine(call, return_future=True)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_only_the_wrong_one_of_merged_requests_fails() -> None:
    gate = Gate()
    with served({"e.0": backend_of(gate)}) as (server, caller):
        gate.shut()
        first = ask(server, caller, "rpc_forward", torch.ones(1, 2))
        pool = server.module_backends["e.0"].forward_pool
        wait_for(gate.began.is_set)
        good = [ask(server, caller, "rpc_forward", torch.ones(2, 2)) for _ in range(3)]
        wide = ask(server, caller, "rpc_forward", torch.ones(1, 3))
        wait_for(lambda: len(pool) == 4)
        two_tensors = ask(server, caller, "rpc_forward", torch.ones(1, 2), torch.ones(1, 2))
        flat, double = (ask(server, caller, "rpc_forward", each) for each in (torch.ones(2), torch.ones(1, 2).double()))
        empty, large = (ask(server, caller, "rpc_forward", torch.ones(rows, 2)) for rows in (0, 65))
        for failing, text in (
            (two_tensors, "1 tensors expected, got 2"),
            (flat, r"must be float32 of shape \(None, 2\), got float32 of shape \(2,\)"),
            (double, "got float64"),
            (empty, "at least one row"),
            (large, "a batch of 65 rows is too large: allowed are 64"),
        ):
            with pytest.raises(P2PHandlerError, match=text):  # at once: the expert is still busy
                failing.result(SOON)
        gate.may_go.set()
        with pytest.raises(P2PHandlerError, match=r"width 3 \(got a tensor of shape \(1, 3\) where \(None, 2\)"):
            wide.result(SOON)
        assert [each.result(SOON)[0].shape for each in (first, *good)] == [(1, 2), (2, 2), (2, 2), (2, 2)]
        assert 6 in gate.sizes


def test_calls_in_turn_with_unknown_and_small_ones() -> None:
    """Also: a small input may have a large result."""

    class Widen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :1].repeat(1, 3 * 2**20)

    with served({"e.0": backend_of(Widen())}) as (server, caller):
        with pytest.raises(P2PHandlerError, match=r"no expert 'e\.9' here"):
            ask(server, caller, "rpc_forward", torch.ones(1, 2), uid="e.9").result(SOON)
        assert ask(server, caller, "rpc_forward", torch.ones(1, 2)).result(60)[0].shape == (1, 3 * 2**20)


def test_repeated_backward_trains_once() -> None:
    gate = Gate()
    limits = ExpertLimits(remembered_bytes=8)
    with served({"e.0": backend_of(gate)}, limits=limits) as (server, caller):
        x, grad = torch.ones(1, 2), torch.ones(1, 2)
        backward = partial(ask, server, caller, "rpc_backward")
        gate.shut()
        both = [backward(x, grad, call_id=b"one") for _ in range(2)]
        wait_for(gate.began.is_set)
        gate.may_go.set()
        assert [each.result(SOON)[0].tolist() for each in both] == [[[1, 1]]] * 2
        assert gate.scale.item() == -1
        assert backward(x, grad, call_id=b"one").result(SOON)[0].tolist() == [[1, 1]]
        assert gate.scale.item() == -1
        assert backward(x, grad, call_id=b"two").result(SOON)[0].tolist() == [[-1, -1]]
        assert gate.scale.item() == -3
        with pytest.raises(P2PHandlerError, match="no longer kept"):
            backward(x, grad, call_id=b"one").result(SOON)
        assert gate.scale.item() == -3
        with pytest.raises(P2PHandlerError, match="width 3"):
            backward(torch.ones(1, 3), torch.ones(1, 3), call_id=b"bad").result(SOON)
        with pytest.raises(P2PHandlerError, match="width 3"):  # it has not trained, so it is tried again
            backward(torch.ones(1, 3), torch.ones(1, 3), call_id=b"bad").result(SOON)


def test_caller_that_leaves_takes_its_request_out_of_the_queue() -> None:
    gate = Gate()
    with served({"e.0": backend_of(gate)}) as (server, caller):
        gate.shut()
        first = ask(server, caller, "rpc_forward", torch.ones(1, 2))
        wait_for(gate.began.is_set)
        leaving = [
            ask(server, caller, "rpc_forward", torch.ones(3, 2)),
            ask(server, caller, "rpc_backward", torch.ones(3, 2), torch.ones(3, 2), call_id=b"x"),
        ]
        pools = server.module_backends["e.0"].get_pools()
        wait_for(lambda: [len(pool) for pool in pools] == [1, 1])
        for each in leaving:
            each.cancel()
        wait_for(lambda: [len(pool) for pool in pools] == [0, 0])
        gate.may_go.set()
        first.result(SOON)
        again = ask(server, caller, "rpc_backward", torch.ones(2, 2), torch.ones(2, 2), call_id=b"x")
        assert again.result(SOON)[0].shape == (2, 2)
        assert gate.sizes == [3, 1, 2]  # the first one when the schema was found out


def test_limits_are_checked_before_memory_is_taken() -> None:
    gate = Gate()
    with served({"e.0": backend_of(gate)}, limits=ExpertLimits(request_bytes=64, bytes=150)) as (server, caller):
        gate.shut()
        waiting = ask(server, caller, "rpc_forward", torch.ones(8, 2))
        wait_for(gate.began.is_set)
        for tensors, nbytes, text in (
            (9, 72, "a request of 72 bytes is too large: allowed are 64"),
            (8, 64, "BusyError: 64 bytes of requests wait here already"),  # a peer gets half of all memory
            (8, 8, "tensors of 64 bytes are too large: allowed are 8"),
        ):
            with pytest.raises(P2PHandlerError, match=text):
                ask(server, caller, "rpc_forward", torch.ones(tensors, 2), nbytes=nbytes).result(SOON)
        gate.may_go.set()
        assert waiting.result(SOON)[0].shape == (8, 2)
        assert ask(server, caller, "rpc_forward", torch.ones(8, 2)).result(SOON)[0].shape == (8, 2)


def test_request_that_waits_too_long_fails() -> None:
    gate = Gate()
    with served({"e.0": backend_of(gate)}, limits=ExpertLimits(seconds=0.05)) as (server, caller):
        gate.shut()
        with pytest.raises(P2PHandlerError, match=r"TimeoutError: expert e\.0 had no time .* within 0\.05 s"):
            ask(server, caller, "rpc_forward", torch.ones(8, 2)).result(SOON)
        gate.may_go.set()


def test_silent_caller_loses_its_memory() -> None:
    limits = ExpertLimits(request_bytes=64, bytes=64, silence=0.05)
    with served({"e.0": backend_of(Gate())}, limits=limits) as (server, caller):

        async def say_nothing(dht: DHT, node: Any) -> None:
            async with ExpertService.get_stub(node.p2p, server.dht.peer_id).rpc_forward() as call:
                await call.send(ExpertRequest("e.0", nbytes=64))
                await call.receive(TensorList)

        with pytest.raises(StreamClosedError):
            caller.run_coroutine(say_nothing)
        assert ask(server, caller, "rpc_forward", torch.ones(8, 2)).result(SOON)[0].shape == (8, 2)


def test_caller_that_does_not_read_loses_its_answer() -> None:
    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_ones(len(x), 2**24)

    with served({"e.0": backend_of(Large())}, limits=ExpertLimits(silence=0.5, bytes=2**26)) as (server, caller):
        held = server.conn_handlers[0]._service._held

        async def read_nothing(dht: DHT, node: Any) -> None:
            async with ExpertService.get_stub(node.p2p, server.dht.peer_id).rpc_forward() as call:
                await call.send(ExpertRequest("e.0", nbytes=8))
                await send_tensors(call, [torch.ones(1, 2)], end=True)
                await asyncio.sleep(SOON)

        calling = caller.run_coroutine(read_nothing, return_future=True)
        wait_for(lambda: held.total() == 2**26)
        wait_for(lambda: not held)
        calling.cancel()


def test_private_run_admits_only_those_that_may_train() -> None:
    secret, until = Token.new_run("secret"), int(time.time()) + 3600
    train, watch = (secret.invite(roles, until).text for roles in (ROLES_BY_NAME["train"], Roles.MONITOR))
    with DHT(start=True, token=train) as dht:
        server = Server(dht, {"e.0": backend_of(Gate())}, start=True)
        known = dht.get_visible_maddrs()
        with DHT(known, start=True, token=train) as member, DHT(known, start=True, token=watch) as watcher:
            assert ask(server, member, "rpc_forward", torch.ones(1, 2)).result(SOON)[0].shape == (1, 2)
            with pytest.raises(NotAMemberError):
                ask(server, watcher, "rpc_forward", torch.ones(1, 2)).result(SOON)
        server.shutdown()
        server.join(SOON)


@pytest.mark.devices
def test_experts_are_on_the_device_of_their_server(tmp_path: Path) -> None:
    device, module = chosen_device(), nn.Linear(2, 3)
    backend = backend_of(module)
    with served({"e.0": backend}, device=device, checkpoint_dir=tmp_path) as (server, caller):
        assert module.weight.device.type == device.type
        x = torch.ones(2, 2, requires_grad=True)
        RemoteExpert(ExpertInfo("e.0", server.dht.peer_id), caller.p2p)(x).sum().backward()
        assert x.grad is not None
        assert x.grad.device == x.device
        assert module.weight.device.type == device.type
    state = torch.load(tmp_path / "e.0" / "checkpoint_last.pt", weights_only=True)
    assert state["module"]["weight"].equal(module.weight.detach().cpu())


# --- uids and declarations --------------------------------------------------------------------------------------------


def test_experts_are_declared_and_withdrawn() -> None:
    uids = ["e.0.1", "e.0.2"]
    with served({uid: backend_of(Gate(), uid) for uid in uids}) as (server, caller):
        found = get_experts(caller, [*uids, "e.0.3"])
        assert [each and each.peer_id for each in found] == [server.dht.peer_id] * 2 + [None]
        assert found[0](torch.ones(1, 2)).shape == (1, 2)  # type: ignore[index]
        server.shutdown()
        server.shutdown()
        assert get_experts(caller, uids) == [None, None]


def test_declaring_continues_after_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    errors = iter([OSError("no network")])

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        for error in errors:
            raise error
        return declare(*args, **kwargs)

    monkeypatch.setattr("shoal.moe.dht_handler.declare", fail_once)
    with served({"e.0": backend_of(Gate())}, update_period=0.05, expiration=30) as (_, caller):
        wait_for(lambda: get_experts(caller, ["e.0"]) != [None])
    assert "could not declare 1 experts, trying again in 0.05 s: no network" in caplog.text


def test_drawn_uids_are_free(caplog: pytest.LogCaptureFixture) -> None:
    with swarm(2) as (own, other):
        until = get_dht_time() + 60
        declare_experts(other, ["e.0.1", "e.0.2", "expert.0"], until)
        declare_experts(own, ["e.0.3"], until)
        drawn = _generate_uids(2, "e.0.[0:5]", own, 100)
        assert set(drawn) <= {"e.0.0", "e.0.3", "e.0.4"}  # its own one is free, as after a restart
        assert len({*drawn}) == 2
        assert not caplog.text
        assert set(_generate_uids(9, "e.0.[0:5]", own)) == {"e.0.0", "e.0.3", "e.0.4"}
        assert "only 3 free uids of 9 for the pattern e.0.[0:5]" in caplog.text
        assert _generate_uids(2, None, own) == ["expert.1", "expert.2"]


@pytest.mark.parametrize("pattern", ["e.[0-5]", "e.[5:5]", "e.[0:5", "e.0:5", "[a:b].1"])
def test_malformed_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"write text, or \[from:to\]"):
        _generate_uids(1, pattern, None)


def create(**kwargs: Any) -> Server:
    return Server.create(**{"hidden_dim": 4, "start": True, "optim_cls": SGD, **kwargs})


def test_checkpoints_name_the_experts_of_the_next_start(tmp_path: Path) -> None:
    for pattern, count in (("f.[0:9].[0:9]", 2), ("g.[5:9]", 1)):
        server = create(num_experts=count, expert_pattern=pattern, checkpoint_dir=tmp_path)
        if pattern.startswith("f"):
            first = {*server.module_backends}
            for backend in server.module_backends.values():
                nn.init.constant_(backend.module.ffn.bias, 7)
        server.shutdown()
        server.join(SOON)
    again = create(num_experts=3, expert_pattern="f.[0:9].[0:9]", checkpoint_dir=str(tmp_path))
    again.shutdown()
    again.join(SOON)
    assert first < {*again.module_backends}
    assert all(each.module.ffn.bias.eq(7).all() == (uid in first) for uid, each in again.module_backends.items())
    with pytest.raises(ValueError, match="checkpoints of 3 experts, and num_experts is 1"):
        create(num_experts=1, expert_pattern="f.[0:9].[0:9]", checkpoint_dir=tmp_path)


# --- beginning and end ------------------------------------------------------------------------------------------------


def test_server_of_a_program(caplog: pytest.LogCaptureFixture) -> None:
    """Programs have a ``create`` of their own, and use names by their inherited paths."""
    from shoal.moe.server import server as inherited  # type: ignore[attr-defined]
    from shoal.moe.server.layers import name_to_block, name_to_input  # type: ignore[import-not-found]

    class Own(hivemind.Server):
        @classmethod
        def create(cls, expert_cls: str, *, start: bool, **kwargs: Any) -> Server:  # type: ignore[override]
            dht = DHT(start=True)
            (uid,) = inherited._generate_uids(1, "head.0.[0:4]", dht)
            module = name_to_block[expert_cls](8)
            schema = (BatchTensorDescriptor.from_tensor(name_to_input[expert_cls](3, 8)),)
            backend = hivemind.ModuleBackend(uid, module, args_schema=schema, max_batch_size=16)
            backend.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            return cls(dht, {uid: backend}, num_connection_handlers=2, device="cpu", start=start, **kwargs)

    with caplog.at_level(logging.INFO):
        server = Own.create("ffn", start=True, stats_report_interval=60)
    assert server.ready.is_set()
    (uid,) = server.module_backends
    count = sum(each.numel() for each in server.module_backends[uid].module.parameters())
    assert ["Server started with 1 modules:", f"{uid}: FeedforwardExpert, {count} parameters"] == caplog.messages[-2:]
    with DHT(server.dht.get_visible_maddrs(), start=True) as caller:
        x = torch.ones(2, 8, requires_grad=True)
        RemoteExpert(ExpertInfo(uid, server.dht.peer_id), caller.p2p)(x).square().sum().backward()
        assert x.grad is not None
    server.shutdown()
    server.join(SOON)


def test_codecs_reach_all_four_kinds_of_tensors() -> None:
    server = create(expert_uids=["e.0"], compression=CompressionType.FLOAT16, start=False)
    backend = server.module_backends["e.0"]
    schemas = [*nested_flatten([backend.backward_schema, backend.grad_inputs_schema, backend.grad_outputs_schema])]
    assert {each.compression for each in schemas} == {CompressionType.FLOAT16}
    server.shutdown()


def test_cause_of_a_failed_start_is_raised() -> None:
    with swarm(1) as (dht,):
        server = Server(dht, {}, start=True)
        with pytest.raises(P2PDaemonError, match="registered already"):
            Server(dht, {}, start=True)
        assert server.is_alive()
        assert dht.is_alive()
        server.shutdown()
        assert not dht.is_alive()
        server.join(SOON)


def test_start_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    with swarm(1) as (dht,):
        server = Server(dht, {})
        monkeypatch.setattr(server.runtime, "move_modules", may_end.wait)
        with pytest.raises(TimeoutError, match=r"not ready within 0\.01 seconds"):
            server.run_in_background(timeout=0.01)
        may_end.set()
        assert server.ready.wait(SOON)
        server.shutdown()
        server.join(SOON)


def test_handlers_of_one_dht_one_after_another() -> None:
    with swarm(1) as (dht,):
        for _ in range(3):
            handler = ConnectionHandler(dht, {}, balanced=False, start=True)
            assert handler.is_alive()
            handler.shutdown()
            handler.shutdown()
            assert not handler.is_alive()


@pytest.mark.slow
def test_background_server(tmp_path: Path) -> None:
    """It has the identity of its file, ends with the block, also after an error, and can die."""
    kwargs = {"hidden_dim": 4, "expert_uids": ["e.0"], "identity_path": str(tmp_path / "id")}
    others = psutil.Process().children()  # of tests before this one
    with contextlib.suppress(ZeroDivisionError), background_server(**kwargs) as first:
        (child,) = [each for each in psutil.Process().children() if each not in others]
        with DHT(first.addrs, start=True) as dht:
            assert RemoteExpert(ExpertInfo("e.0", first.peer_id), dht.p2p)(torch.ones(3, 4)).shape == (3, 4)
            raise ZeroDivisionError
    assert not child.is_running()
    with background_server(**kwargs) as second:
        assert second.peer_id == first.peer_id
        (child,) = [each for each in psutil.Process().children() if each not in others]
        child.kill()
        child.wait(SOON)


@pytest.mark.slow
def test_background_server_that_cannot_start() -> None:
    with (
        pytest.raises(RuntimeError, match="AssertionError: no expert class 'nope'"),
        background_server(expert_uids=["e.0"], expert_cls="nope"),
    ):
        pass


@pytest.mark.slow
def test_background_server_knows_the_classes_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports the module that has registered the class; the program itself it cannot run again."""
    monkeypatch.setattr(layers, "name_to_block", {**layers.name_to_block})
    monkeypatch.setattr(layers, "name_to_input", {**layers.name_to_input})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "module_of_doubles.py").write_text(
        """
import torch
import shoal

@shoal.register_expert_class("double", lambda rows, width: torch.empty(rows, width))
class Double(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((), 2.0))

    def forward(self, x):
        return self.factor * x
"""
    )
    importlib.import_module("module_of_doubles")
    kwargs = {"expert_uids": ["e.0"], "expert_cls": "double", "hidden_dim": 4}
    with background_server(**kwargs) as peer, DHT(peer.addrs, start=True) as dht:
        assert RemoteExpert(ExpertInfo("e.0", peer.peer_id), dht.p2p)(torch.ones(1, 4)).tolist() == [[2.0] * 4]
    layers.name_to_block["double"].__module__ = "__main__"
    with pytest.raises(ValueError, match="'double' is defined in the program"), background_server(**kwargs):
        pass


async def test_blocking_use_inside_the_loop_is_no_deadlock() -> None:
    """Shutting a server down takes time, so programs in a loop do it in a thread."""
    server = await asyncio.to_thread(create, expert_uids=["e.0"])
    await asyncio.to_thread(server.shutdown)
    await asyncio.to_thread(server.join, SOON)
    assert not server.is_alive()
