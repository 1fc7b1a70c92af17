"""The DHT as programs use it: from ordinary threads, over real sockets."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, StrictInt

from shoal.base.clock import get_dht_time
from shoal.base.reactor import Portal
from shoal.dht import DHT, DHTNode
from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.schema import BytesWithPublicKey, SchemaValidator
from shoal.errors import BootstrapError, DHTError, P2PDaemonError, ReactorError
from shoal.p2p import P2P

pytestmark = [pytest.mark.oldest, pytest.mark.pretend]

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWNikr79Xdz69AuQ6KJHCC4opkyHBccKnbb8rEMcqmUnRE"


def later(seconds: float) -> float:
    return get_dht_time() + seconds


def launch(count: int, **options) -> list[DHT]:
    """The first one alone, the others at the same time by way of it."""
    dhts = [DHT(start=True, **options)]
    initial_peers = dhts[0].get_visible_maddrs()
    dhts += [DHT(initial_peers=initial_peers, start=True, await_ready=False, **options) for _ in range(count - 1)]
    for dht in dhts:
        dht.wait_until_ready()
    return dhts


@pytest.fixture
def alone() -> Iterator[DHT]:
    dht = DHT(start=True)
    yield dht
    dht.shutdown()


@pytest.fixture
def two() -> Iterator[list[DHT]]:
    dhts = launch(2)
    yield dhts
    for dht in dhts:
        dht.shutdown()


# --- getting and storing ----------------------------------------------------------------------------------------------


def test_ten_peers_share_values_and_dictionaries():
    dhts = launch(10)
    try:
        expires = later(30)
        assert dhts[3].store("key", "value", expires)
        for dht in dhts:
            assert dht.get("key") == ("value", expires)
        assert not dhts[5].store("key", "older", expires - 1)
        assert dhts[5].store("key", "newer", expires + 1)
        assert dhts[8].get("key", latest=True) == ("newer", expires + 1)
        for number, dht in enumerate(dhts):
            assert dht.store("key", number, expires + 2 + number, subkey=("peer", number))
        found = dhts[0].get("key", latest=True)
        assert found.expiration_time == expires + 11
        assert {subkey: value for subkey, (value, _) in found.value.items()} == {("peer", n): n for n in range(10)}
        assert dhts[1].get("missing") is None
    finally:
        for dht in dhts:
            dht.shutdown()


def test_futures(two):
    one, other = two
    storing = one.store("key", 1, later(30), return_future=True)
    assert isinstance(storing, concurrent.futures.Future)
    assert storing.result(5)
    getting = other.get("key", return_future=True)
    assert getting.result(5).value == 1
    latest = other.get("key", latest=True, return_future=True)
    assert latest.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        latest.result(5)


@pytest.mark.parametrize("operation", ["get", "store"])
def test_futures_are_cancelled_from_any_thread(two, operation):
    one, other = two
    asked, go_on = threading.Event(), asyncio.Event()

    async def hold_up(dht, node):
        call = node.protocol.find_at

        async def call_when_told(*args, **kwargs):
            asked.set()
            await go_on.wait()
            return await call(*args, **kwargs)

        node.protocol.find_at = call_when_told

    async def let_go(dht, node):
        assert len(node.pending_get_requests) == 0, "nobody looks for it any more"
        del node.protocol.find_at
        go_on.set()

    other.run_coroutine(hold_up)
    if operation == "get":
        futures = [other.get("key", latest=True, return_future=True) for _ in range(8)]
    else:
        futures = [other.store("key", n, later(30 + n), return_future=True) for n in range(8)]
    assert asked.wait(10)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda future: future.cancel(), futures))
    for future in futures:
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(10)
    other.run_coroutine(let_go)
    assert other.get("key", latest=True) is None
    assert other.store("key", "kept", later(30))
    assert one.get("key", latest=True).value == "kept"


def test_many_threads_at_once(two):
    one, other = two
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        stored = list(pool.map(lambda n: (one, other)[n % 2].store(f"key {n}", n, later(30)), range(40)))
        found = list(pool.map(lambda n: (other, one)[n % 2].get(f"key {n}").value, range(40)))
    assert all(stored)
    assert found == list(range(40))


async def test_futures_can_be_awaited_in_another_loop(two):
    one, other = two
    assert await asyncio.wrap_future(one.store("key", 1, later(30), return_future=True))
    assert (await asyncio.wrap_future(other.get("key", return_future=True))).value == 1


def test_mistakes_are_told_to_the_caller(alone):
    with pytest.raises(TypeError, match="cannot serialize"):
        alone.store("key", object(), later(30))
    with pytest.raises(ValueError, match="finite number"):
        alone.store("key", 1, float("nan"))
    with pytest.raises(TypeError, match="unexpected keyword"):
        alone.get("key", nonsense=True)


def test_blocking_calls_inside_the_loop_are_refused(alone):
    async def block(dht, node):
        with pytest.raises(ReactorError, match="would deadlock"):
            dht.get("key")
        with pytest.raises(ReactorError, match="would deadlock"):
            dht.store("key", 1, later(30))
        return dht.peer_id, dht.client_mode, dht.get_visible_maddrs(), dht.p2p

    assert alone.run_coroutine(block)[0] == alone.peer_id


# --- coroutines in the background -------------------------------------------------------------------------------------


def test_coroutines_run_with_the_node_and_a_handle(alone):
    async def remember(dht, node):
        assert isinstance(node, DHTNode)
        assert node.peer_id == dht.peer_id == alone.peer_id
        await node.store("key", "value", later(30))
        dht.remembered = await node.get("key")
        return threading.current_thread().name

    async def recall(dht, node):
        return dht.remembered

    assert alone.run_coroutine(remember) != threading.current_thread().name
    assert alone.run_coroutine(recall).value == "value"
    assert not hasattr(alone, "remembered")


def test_errors_and_cancelling_of_coroutines(alone):
    ended = threading.Event()

    async def fail(dht, node):
        raise ValueError("Oops")

    async def wait(dht, node):
        try:
            await asyncio.sleep(100)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="Oops"):
        alone.run_coroutine(fail)
    future = alone.run_coroutine(fail, return_future=True)
    assert isinstance(future.exception(5), ValueError)
    waiting = alone.run_coroutine(wait, return_future=True)
    alone.run_coroutine(_nothing)
    waiting.cancel()
    assert ended.wait(5)


async def _nothing(dht, node):
    return None


# --- addresses --------------------------------------------------------------------------------------------------------


def test_by_default_only_this_machine_can_connect(alone):
    [address] = alone.get_visible_maddrs()
    assert address["ip4"] == "127.0.0.1"
    assert address["p2p"] == str(alone.peer_id)
    assert int(address["tcp"]) > 0
    assert alone.get_visible_maddrs(latest=True) == [address]


def test_announced_addresses_replace_the_real_ones():
    announced = "/ip4/203.0.113.7/tcp/31337"
    portal = Portal("test")
    p2p = portal.call(P2P.create(announce_maddrs=[announced]))
    dht = DHT(start=True, p2p=p2p)
    try:
        assert [str(address) for address in dht.get_visible_maddrs()] == [f"{announced}/p2p/{p2p.peer_id}"]
        assert dht.p2p is p2p
    finally:
        dht.shutdown()
        assert p2p.is_alive
        portal.call(p2p.shutdown())
        portal.close(1)


async def test_other_components_can_use_the_same_peer(alone):
    assert await alone.replicate_p2p() is alone.p2p
    assert alone.p2p.peer_id == alone.peer_id
    assert alone.node.p2p is alone.p2p


def test_clients_have_no_addresses(alone):
    client = DHT(initial_peers=alone.get_visible_maddrs(), start=True, client_mode=True)
    try:
        assert client.client_mode
        assert not alone.client_mode
        assert client.get_visible_maddrs() == []
        assert client.store("key", 1, later(30))
        assert alone.get("key").value == 1
    finally:
        client.shutdown()


# --- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("initial_peers", [b"bytes", 5, [5]], ids=repr)
def test_what_is_no_list_of_addresses_is_refused(initial_peers):
    with pytest.raises(TypeError, match="initial_peers must"):
        DHT(initial_peers=initial_peers, start=False)


@pytest.mark.parametrize("address", ["127.0.0.1", "", "/ip4/127.0.0.1/tcp/1337"])
def test_malformed_addresses_are_named(address):
    for given in ([address], address):
        with pytest.raises(ValueError, match=address or "it is empty"):
            DHT(initial_peers=given, start=True)


def test_nobody_answers():
    start = time.monotonic()
    with pytest.raises(P2PDaemonError, match=r"(?i)failed to connect to bootstrap peers") as caught:
        DHT(initial_peers=[NOBODY], start=True)
    assert time.monotonic() - start < 10
    assert isinstance(caught.value, BootstrapError)
    assert NOBODY in caught.value.verdicts
    later_start = DHT(initial_peers=[NOBODY], start=True, await_ready=False)
    with pytest.raises(BootstrapError):
        later_start.wait_until_ready(10)
    assert not later_start.is_alive()
    with pytest.raises(DHTError, match="could not start"):
        later_start.get("key")
    later_start.shutdown()


def test_a_wrong_peer_id_is_named(alone):
    port = alone.get_visible_maddrs()[0]["tcp"]
    address = NOBODY.replace("/tcp/9/", f"/tcp/{port}/")
    with pytest.raises(BootstrapError) as caught:
        DHT(initial_peers=[address], start=True)
    assert str(alone.peer_id) in caught.value.verdicts[address]


def test_starting_later():
    dht = DHT(start=False, num_workers=2, bucket_size=7)
    assert not dht.is_alive()
    assert dht.kwargs == {"bucket_size": 7}
    for use in (lambda: dht.get("key"), lambda: dht.peer_id, lambda: dht.node, lambda: dht.add_validators([])):
        with pytest.raises(RuntimeError, match=r"run_in_background|wait_until_ready"):
            use()
    dht.shutdown()
    dht.join()
    dht.run_in_background()
    try:
        assert dht.is_alive()
        assert dht.node.config.bucket_size == 7
        assert dht.node.config.num_workers == 2
        with pytest.raises(RuntimeError, match="started already"):
            dht.run_in_background()
    finally:
        dht.shutdown()


def test_waiting_for_a_slow_start(monkeypatch):
    release = asyncio.Event()
    create = DHTNode.create

    async def create_when_released(**options):
        await release.wait()
        return await create(**options)

    monkeypatch.setattr(DHTNode, "create", create_when_released)
    dht = DHT(start=True, await_ready=False)
    try:
        with pytest.raises(TimeoutError):
            dht.wait_until_ready(0.01)
        with pytest.raises(RuntimeError, match="wait_until_ready"):
            dht.add_validators([])
        assert dht.is_alive()
        early = dht.store("key", 1, later(30), return_future=True)
        assert not early.done()
        dht.portal.reactor.loop.call_soon_threadsafe(release.set)
        assert early.result(5)
        dht.wait_until_ready()
    finally:
        dht.shutdown()


# --- ending -----------------------------------------------------------------------------------------------------------


def test_shutdown_is_idempotent_and_final(two):
    one, other = two
    assert one.is_alive()
    one.shutdown()
    one.shutdown()
    one.join(1)
    one.terminate()
    assert not one.is_alive()
    for use in (lambda: one.get("key"), lambda: one.store("key", 1, later(1)), lambda: one.run_coroutine(_nothing)):
        with pytest.raises(ReactorError, match="is shut down"):
            use()
    assert one.peer_id is not None
    assert len(one.get_visible_maddrs()) == 1
    assert other.store("key", 1, later(30))


def test_shutdown_resolves_futures(two):
    one, _ = two
    futures = [one.run_coroutine(_wait_forever, return_future=True) for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(one.run_coroutine, _wait_forever)
        assert not blocked.done()
        one.shutdown()
        assert isinstance(blocked.exception(5), (concurrent.futures.CancelledError, ReactorError))
    for future in futures:
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(1)


async def _wait_forever(dht, node):
    await asyncio.Event().wait()


def test_shutdown_during_the_start_leaves_nothing(monkeypatch):
    begun, cancelled = threading.Event(), threading.Event()

    async def never(**options):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    monkeypatch.setattr(DHTNode, "create", never)
    dht = DHT(start=True, await_ready=False)
    assert begun.wait(5)
    dht.shutdown()
    assert cancelled.is_set()
    dht.join(1)
    with pytest.raises((DHTError, ReactorError)):
        dht.wait_until_ready(1)


def test_a_forgotten_dht_is_shut_down():
    dht = DHT(start=True)
    p2p, reference = dht.p2p, weakref.ref(dht)
    del dht
    gc.collect()
    assert reference() is None
    deadline = time.monotonic() + 5
    while p2p.is_alive and time.monotonic() < deadline:
        time.sleep(0.01)  # closing runs in the background; there is no event to wait for
    assert not p2p.is_alive


# --- validators -------------------------------------------------------------------------------------------------------


class Counts(BaseModel):
    counts: dict[BytesWithPublicKey, StrictInt]


def test_signed_records_through_live_peers():
    alice, mallory = (SignatureValidator(PrivateKey()) for _ in range(2))
    dhts = launch(2, record_validators=[alice])
    dhts.append(DHT(initial_peers=dhts[0].get_visible_maddrs(), start=True, record_validators=[mallory]))
    owner, reader, attacker = dhts
    try:
        subkey = b"peer" + alice.local_public_key
        expires = later(30)
        assert owner.store("key", "mine", expires, subkey=subkey)
        assert reader.get("key", latest=True).value == {subkey: ("mine", expires)}
        assert not attacker.store("key", "forged", expires + 1, subkey=subkey)
        assert not attacker.store("other", "forged", expires, subkey=subkey)
        assert attacker.get("key", latest=True).value == {subkey: ("mine", expires)}
        assert owner.store("key", "again mine", expires + 2, subkey=subkey)
        owner.shutdown()
        assert not attacker.store("key", "forged", expires + 3, subkey=subkey)
        assert reader.get("key", latest=True).value == {subkey: ("again mine", expires + 2)}
    finally:
        for dht in dhts:
            dht.shutdown()


def test_validators_added_to_running_peers(two):
    validator = SignatureValidator(PrivateKey())
    for dht in two:
        dht.add_validators([SchemaValidator(Counts, allow_extra_keys=False, prefix="run"), validator])
    one, other = two
    subkey = b"x" + validator.local_public_key
    assert one.store("run_counts", 5, later(30), subkey=subkey)
    assert not one.store("run_counts", 5.0, later(31), subkey=subkey)
    assert not one.store("run_counts", 5, later(31), subkey=b"x")
    assert not one.store("unknown", 5, later(31))
    assert {k: v.value for k, v in other.get("run_counts", latest=True).value.items()} == {subkey: 5}
    one.add_validators([SchemaValidator(Counts, prefix="another")])
    assert len(one.node.protocol.record_validator.validators) == 2

    async def add(dht, node):
        dht.add_validators([SchemaValidator(Counts, prefix="third")])

    one.run_coroutine(add)
    assert len(one.node.protocol.record_validator.validators[0].schemas) == 3


# --- forking ----------------------------------------------------------------------------------------------------------

FORK = """
import os, time
from shoal.base.clock import get_dht_time
from shoal.dht import DHT
from shoal.errors import ReactorError

dht = DHT(start=True)
client = DHT(initial_peers=dht.get_visible_maddrs(), start=True, client_mode=True)
known = (dht.peer_id, dht.client_mode, dht.get_visible_maddrs(), client.peer_id, client.client_mode)

async def nothing(dht, node):
    return None

pid = os.fork()
if pid == 0:
    status = 1
    try:
        start = time.monotonic()
        assert known == (dht.peer_id, dht.client_mode, dht.get_visible_maddrs(), client.peer_id, client.client_mode)
        assert dht.get_visible_maddrs(latest=True) == known[2]
        for use in (
            lambda: dht.get("key"),
            lambda: dht.get("key", return_future=True),
            lambda: dht.store("key", 1, get_dht_time() + 10),
            lambda: dht.run_coroutine(nothing),
            lambda: dht.add_validators([]),
            lambda: dht.node,
            lambda: dht.p2p,
        ):
            try:
                use()
            except ReactorError as e:
                assert "fork" in str(e), e
            else:
                raise AssertionError("it worked in the child")
        assert not dht.is_alive()
        dht.shutdown()
        own = DHT(initial_peers=dht.get_visible_maddrs(), start=True)
        assert own.peer_id != dht.peer_id
        assert own.store("key", "from the child", get_dht_time() + 10)
        own.shutdown()
        assert time.monotonic() - start < 30, "nothing of that waits for the loop, which is not there"
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(pid, 0)[1] == 0, "the child failed"
assert dht.get("key", latest=True).value == "from the child"
client.shutdown()
dht.shutdown()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_forked_child_knows_facts_only():
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK], check=True, timeout=30)


@pytest.mark.slow_drill
@pytest.mark.slow
def test_a_busy_minute_loses_nothing():
    """Hundreds of calls at once, of many peers in one process: each waits for its turn, and nobody takes others for
    dead because it is busy itself."""
    first = DHT(start=True)
    dhts = [first, *(DHT(initial_peers=first.get_visible_maddrs(), start=True) for _ in range(15))]
    known = [set(dht.node.protocol.routing_table) for dht in dhts]
    expires = get_dht_time() + 600
    stores = [dhts[n % 16].store(f"key {n}", n, expires, return_future=True) for n in range(400)]
    assert all(future.result() for future in stores)
    gets = [dhts[n % 7].get(f"key {n}", return_future=True) for n in range(400)]
    assert [getattr(future.result(), "value", None) for future in gets] == list(range(400))
    still_known = [set(dht.node.protocol.routing_table) for dht in dhts]
    for dht in dhts:
        dht.shutdown()
    assert all(before and before <= after for before, after in zip(known, still_known, strict=True))
