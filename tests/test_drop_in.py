"""What users write, under the name that they know: each test reads like a piece of a program."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pydantic
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

import shoal as hivemind

pytestmark = pytest.mark.oldest


@pytest.fixture
def dhts() -> Iterator[list[hivemind.DHT]]:
    first = hivemind.DHT(start=True)
    second = hivemind.DHT(initial_peers=[str(maddr) for maddr in first.get_visible_maddrs()], start=True)
    yield [first, second]
    second.shutdown()
    first.shutdown()


def soon(seconds: float = 60) -> float:
    return hivemind.get_dht_time() + seconds


# --- the table --------------------------------------------------------------------------------------------------------


def test_store_and_get(dhts: list[hivemind.DHT]) -> None:
    first, second = dhts
    expiration = soon()
    assert first.store("my_key", ("i", "love", "bees"), expiration_time=expiration)
    value, until = second.get("my_key", latest=True)  # type: ignore[misc]
    assert (value, until) == (("i", "love", "bees"), expiration)
    assert second.get("my_key").value[0] == "i"  # type: ignore[union-attr]
    assert second.get("nothing") is None


def test_dictionaries(dhts: list[hivemind.DHT]) -> None:
    first, second = dhts
    first.store("workers", subkey="alice", value=1, expiration_time=soon())
    second.store("workers", subkey=("bob", 2), value=[2], expiration_time=soon())
    found = first.get("workers", latest=True)
    assert found is not None
    assert {subkey: item.value for subkey, item in found.value.items()} == {"alice": 1, ("bob", 2): [2]}


def test_futures_are_waited_for_and_awaited(dhts: list[hivemind.DHT]) -> None:
    first, second = dhts
    storing = first.store("key", 1, soon(), return_future=True)
    assert storing.result(timeout=10) is True

    async def program() -> Any:
        return await second.get("key", latest=True, return_future=True)

    assert asyncio.run(program()).value == 1
    getting = second.get("another key", return_future=True)
    getting.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        getting.result()


def test_coroutines_on_the_node(dhts: list[hivemind.DHT]) -> None:
    async def how_many_peers(dht: hivemind.DHT, node: hivemind.dht.DHTNode) -> int:
        dht.visits = getattr(dht, "visits", 0) + 1  # type: ignore[attr-defined]
        return len(node.protocol.routing_table) + dht.visits  # type: ignore[attr-defined]

    assert dhts[0].run_coroutine(how_many_peers) == 2
    assert dhts[0].run_coroutine(how_many_peers, return_future=True).result() == 3
    assert not hasattr(dhts[0], "visits")


def test_start_later_and_settings() -> None:
    dht = hivemind.DHT(start=False, num_workers=2, cache_size=100)
    assert not dht.is_alive()
    assert dht.kwargs == {"cache_size": 100}
    dht.run_in_background(await_ready=False)
    dht.wait_until_ready(timeout=30)
    assert dht.is_alive()
    assert not dht.client_mode
    assert [maddr["p2p"] for maddr in dht.get_visible_maddrs()] == [dht.peer_id.to_base58()]
    dht.shutdown()
    dht.join()
    assert not dht.is_alive()


def test_a_peer_that_cannot_be_reached_is_told() -> None:
    stranger = "12D3KooWPTeYwtPq2qTVSYvDs9NyKGB4bgqEwzLLKwDtNPsYM2Jn"
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{stranger}"
    for given in ([address], address):
        with pytest.raises(hivemind.p2p.P2PDaemonError, match=r"(?i)failed to connect to bootstrap peers"):
            hivemind.DHT(initial_peers=given, start=True)


def test_records_with_an_owner(dhts: list[hivemind.DHT]) -> None:
    from shoal.dht.crypto import RSASignatureValidator
    from shoal.utils.crypto import RSAPrivateKey

    mine, foreign = RSASignatureValidator(), RSASignatureValidator(RSAPrivateKey())
    dhts[0].add_validators([mine])
    dhts[1].add_validators([foreign])
    subkey = b"me" + mine.local_public_key
    assert dhts[0].store("key", 1, soon(10), subkey=subkey)
    assert not dhts[1].store("key", 2, soon(20), subkey=subkey)
    found = dhts[1].get("key", latest=True)
    assert found is not None
    assert found.value[subkey].value == 1


def test_records_with_a_type() -> None:
    from shoal.dht.schema import BytesWithPublicKey, SchemaValidator, conbytes

    class Schema(pydantic.BaseModel):
        experiment_name: bytes
        n_batches: dict[bytes, pydantic.conint(ge=0, strict=True)]  # type: ignore[valid-type]
        signed_data: dict[BytesWithPublicKey, bytes]
        tag: conbytes(strict=True, regex="v[0-9]+")  # type: ignore[valid-type]

    dht = hivemind.DHT(start=True, record_validators=[SchemaValidator(Schema, allow_extra_keys=False, prefix="run")])
    assert dht.store("run_experiment_name", b"foo_bar", soon())
    assert not dht.store("run_experiment_name", 666, soon(70))
    assert dht.store("run_n_batches", 5, soon(), subkey=b"uid1")
    assert not dht.store("run_n_batches", -1, soon(), subkey=b"uid2")
    assert dht.store("run_tag", b"v12", soon())
    assert not dht.store("run_tag", b"12", soon(70))
    assert not dht.store("something_else", b"foo_bar", soon())
    dht.shutdown()


def test_a_table_for_members_only() -> None:
    from shoal.utils.auth import AccessToken, TokenAuthorizerBase
    from shoal.utils.crypto import RSAPrivateKey

    authority = RSAPrivateKey()

    class Authorizer(TokenAuthorizerBase):
        async def get_token(self) -> AccessToken:
            token = AccessToken("alice", self.local_public_key.to_bytes(), soon())
            token.signature = authority.sign(token.signed_bytes())
            return token

        def is_token_valid(self, access_token: AccessToken) -> bool:
            is_ours = authority.get_public_key().verify(access_token.signed_bytes(), access_token.signature)
            return is_ours and access_token.expiration_time > hivemind.get_dht_time()

        def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
            return access_token.expiration_time < soon(30)

    first = hivemind.DHT(start=True, authorizer=Authorizer(RSAPrivateKey()))
    peers = first.get_visible_maddrs()
    second = hivemind.DHT(initial_peers=peers, start=True, authorizer=Authorizer(RSAPrivateKey()))
    assert second.store("key", 1, soon())
    assert first.get("key", latest=True).value == 1  # type: ignore[union-attr]
    with pytest.raises(hivemind.p2p.P2PDaemonError):
        hivemind.DHT(initial_peers=peers, start=True)
    second.shutdown()
    first.shutdown()


def test_storage_by_itself() -> None:
    from shoal.dht.storage import DHTLocalStorage

    storage: hivemind.TimedStorage[str, int] = hivemind.TimedStorage(maxsize=2)
    assert storage.store("a", 1, soon(1))
    assert not storage.store("a", 2, soon(0.5))
    assert storage.store("b", 2, soon(2))
    assert storage.store("c", 3, soon(3))
    assert "a" not in storage
    assert len(storage) == 2
    key, entry = storage.top()
    assert (key, entry.value) == ("b", 2)  # type: ignore[union-attr]
    assert hivemind.utils.ValueWithExpiration(1, 2.0) == (1, 2.0)
    local = DHTLocalStorage()
    key_id = hivemind.dht.DHTID.generate("key")
    assert local.store(key_id, b"value", soon())
    assert local.store(key_id, b"entry", soon(70), subkey="subkey")
    assert local.get(key_id).value.get("subkey").value == b"entry"  # type: ignore[union-attr]


# --- peers ------------------------------------------------------------------------------------------------------------


async def test_what_belongs_to_a_daemon_is_accepted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    as_before = {"auto_nat": True, "dht_mode": "server", "quic": None}
    p2p = await hivemind.P2P.create(no_listen=True, use_relay=False, tls=False, conn_manager=False, **as_before)
    await p2p.shutdown()
    assert caplog.messages == ["tls, conn_manager: no effect here, because there is no libp2p daemon underneath"]
    with pytest.raises(ValueError, match="force_reachability is 'maybe': give 'public'"):
        await hivemind.P2P.create(force_reachability="maybe")
    with pytest.raises(TypeError, match="no parameter use_relays"):
        await hivemind.P2P.create(use_relays=True)


async def test_transport(tmp_path: Path) -> None:
    identity = tmp_path / "identity"
    first = await hivemind.P2P.create(identity_path=str(identity))
    second = await hivemind.P2P.create(initial_peers=await first.get_visible_maddrs())
    await second.wait_for_at_least_n_peers(1)
    [known] = await second.list_peers()
    assert known == hivemind.PeerInfo(first.peer_id, known.addrs)
    with pytest.raises(hivemind.p2p.P2PDaemonError, match="not 5"):
        await second.wait_for_at_least_n_peers(5, attempts=2, delay=0.01)
    assert hivemind.PeerID.from_identity(identity.read_bytes()) == first.peer_id
    assert first.peer_id == first.peer_id.to_base58() == str(first.peer_id)
    for p2p in (second, first):
        await p2p.shutdown()
        assert not p2p.is_alive


def test_addresses() -> None:
    from shoal.utils.multiaddr import Multiaddr
    from shoal.utils.networking import LOCALHOST, choose_ip_address

    address = Multiaddr("/ip4/127.0.0.1/tcp/1337")
    assert address["tcp"] == "1337"
    assert "ip4" in address
    assert Multiaddr(address.to_bytes()) == address
    assert choose_ip_address([address]) == LOCALHOST


# --- utilities --------------------------------------------------------------------------------------------------------


def test_serializer() -> None:
    @hivemind.MSGPackSerializer.ext_serializable(0x7A)
    class Point:
        def __init__(self, x: int, y: int) -> None:
            self.x, self.y = x, y

        def packb(self) -> bytes:
            return bytes([self.x, self.y])

        @classmethod
        def unpackb(cls, raw: bytes) -> Point:
            return cls(*raw)

    restored = hivemind.MSGPackSerializer.loads(hivemind.MSGPackSerializer.dumps([Point(1, 2), (3, [4])]))
    assert (restored[0].x, restored[0].y) == (1, 2)
    assert restored[1] == (3, [4])


def test_nested_structures() -> None:
    Batch = namedtuple("Batch", ["inputs", "mask"])
    batch = Batch([torch.ones(2), torch.ones(3)], {"a": torch.zeros(1)})
    sizes = hivemind.nested_map(torch.numel, batch)
    assert sizes == Batch([2, 3], {"a": 1})
    assert list(hivemind.nested_flatten(sizes)) == [2, 3, 1]
    assert hivemind.nested_pack([1, 2, 3], sizes) == Batch([1, 2], {"a": 3})


def test_futures() -> None:
    future: hivemind.MPFuture[str] = hivemind.MPFuture()
    threading.Thread(target=future.set_result, args=("done",)).start()
    assert future.result(timeout=10) == "done"

    async def program() -> str:
        return await future

    assert asyncio.run(program()) == "done"
    with pytest.raises(hivemind.utils.mpfuture.InvalidStateError):
        future.set_result("again")


async def test_asynchronous_helpers() -> None:
    from shoal.utils.asyncio import achain, aenumerate, as_aiter, asingle, azip, iter_as_aiter

    assert [x async for x in azip(as_aiter(1, 2), iter_as_aiter("ab"))] == [(1, "a"), (2, "b")]
    assert [x async for x in aenumerate(achain(as_aiter("x"), as_aiter("y")))] == [(0, "x"), (1, "y")]
    assert await asingle(as_aiter(1)) == 1
    assert [x async for x in hivemind.amap_in_executor(lambda x: x**2, as_aiter(1, 2, 3), max_prefetch=2)] == [1, 4, 9]
    lock = threading.Lock()
    async with hivemind.enter_asynchronously(lock):
        assert lock.locked()
    assert not lock.locked()


async def test_tensors_in_pieces() -> None:
    from shoal.utils.streaming import combine_from_streaming, split_for_streaming

    tensor = torch.randn(1000, 100)
    serialized = hivemind.serialize_torch_tensor(tensor)
    chunks = list(split_for_streaming(serialized, chunk_size_bytes=2**14))
    assert torch.equal(hivemind.deserialize_torch_tensor(combine_from_streaming(chunks)), tensor)


def test_descriptions_of_tensors() -> None:
    descriptor = hivemind.TensorDescriptor.from_tensor(torch.ones(1, 3))
    assert (descriptor.numel(), descriptor.make_zeros().tolist()) == (3, [[0, 0, 0]])
    batch = hivemind.BatchTensorDescriptor.from_tensor(torch.ones(1, 3))
    assert batch.make_zeros(2).shape == (2, 3)


def test_low_rank_arithmetic() -> None:
    matrix = torch.randn(100, 4)
    hivemind.utils.math.orthogonalize_(matrix)
    torch.testing.assert_close(matrix.t() @ matrix, torch.eye(4), rtol=0, atol=1e-5)
    assert list(hivemind.utils.math.get_flatten_greedy_dims(torch.empty(16, 3, 5, 5))) == [16, 75]


def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    hivemind.use_hivemind_log_handler("nowhere")
    logger = hivemind.get_logger("my_program")
    with caplog.at_level(logging.INFO):
        logger.info("hello")
    assert caplog.messages == ["hello"]


def test_limits_and_speed() -> None:
    hivemind.utils.limits.increase_file_limit()
    ema = hivemind.PerformanceEMA(alpha=0.1)
    ema.update(10, interval=2.0)
    assert ema.samples_per_second == pytest.approx(5.0)


def test_each_module_path_works_without_importing_it_first() -> None:
    """In a fresh interpreter: rooms load at first use."""
    script = """
        import shoal as hivemind
        hivemind.utils.crypto.RSAPrivateKey().get_public_key()
        hivemind.utils.logging.get_logger, hivemind.utils.asyncio.azip, hivemind.utils.math.orthogonalize_
        hivemind.dht.crypto.RSASignatureValidator(), hivemind.dht.schema.SchemaValidator
        hivemind.dht.storage.TimedStorage, hivemind.dht.traverse, hivemind.dht.routing.DHTID.generate()
        hivemind.utils.timed_storage.TimedStorage, hivemind.utils.serializer.MSGPackSerializer
        hivemind.utils.performance_ema.PerformanceEMA, hivemind.utils.tensor_descr.TensorDescriptor
        hivemind.p2p.p2p_daemon.P2P, hivemind.p2p.p2p_daemon_bindings.control.P2PDaemonError
        hivemind.p2p.p2p_daemon_bindings.datastructures.PeerID
        hivemind.utils.nested_flatten, hivemind.utils.networking.LOCALHOST, hivemind.utils.auth.AuthRole.CLIENT
        from shoal.utils import *
        get_dht_time()
    """
    subprocess.run([sys.executable, "-c", dedent(script)], check=True, timeout=60)


async def test_a_mode_that_does_not_exist_is_an_error_and_an_empty_list_of_places_is_the_default() -> None:
    with pytest.raises(ValueError, match="dht_mode is 'nonsense': give 'server', 'client' or 'auto'"):
        await hivemind.P2P.create(dht_mode="nonsense")
    p2p = await hivemind.P2P.create(host_maddrs=[])
    assert await p2p.get_visible_maddrs()
    await p2p.shutdown()


def test_an_address_with_an_rsa_peer_id_is_an_error_of_the_daemon() -> None:
    address = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    with pytest.raises(hivemind.p2p.P2PDaemonError, match="not made from an Ed25519 key"):
        hivemind.DHT(initial_peers=[address], start=True)


def test_a_dht_takes_no_number_of_workers() -> None:
    dht = hivemind.DHT(num_workers=None, host_maddrs=[], start=True)
    assert dht.num_workers > 0
    dht.shutdown()


async def test_addresses_for_quic_are_skipped() -> None:
    hosts = ["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic"]
    p2p = await hivemind.P2P.create(host_maddrs=hosts)
    assert ["tcp" in address for address in await p2p.get_visible_maddrs()] == [True]
    await p2p.shutdown()
    with pytest.raises(hivemind.p2p.P2PDaemonError, match=r"no usable address to listen on in .*quic"):
        await hivemind.P2P.create(host_maddrs=hosts[1:])


async def test_an_rsa_identity_is_refused_with_the_fix(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 1024).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    identity = tmp_path / "identity"
    identity.write_bytes(b"\x08\x00\x12" + bytes([len(key) & 127 | 128, len(key) >> 7]) + key)  # as libp2p writes it
    identity.chmod(0o400)
    with pytest.raises(
        hivemind.p2p.P2PDaemonError, match=r"not an Ed25519 identity .*: delete the file to get a new one"
    ):
        await hivemind.P2P.create(identity_path=identity)


# --- experts ----------------------------------------------------------------------------------------------------------


def test_mixtures_of_remote_experts() -> None:
    from shoal.moe.client.beam_search import MoEBeamSearcher
    from shoal.moe.client.expert import RemoteExpert

    server = hivemind.Server.create(
        expert_pattern="expert.[0:3].[0:3].[0:3]", num_experts=6, expert_cls="ffn", hidden_dim=16, start=True
    )
    dht = hivemind.DHT(initial_peers=server.dht.get_visible_maddrs(), start=True)
    moe = hivemind.RemoteMixtureOfExperts(
        in_features=16, grid_size=(4, 4, 4), dht=dht, k_best=3, uid_prefix="expert.", forward_timeout=60
    )
    for _ in range(3):
        moe(torch.randn(10, 16)).sum().backward()
    assert moe.proj.weight.grad.norm() > 0
    searcher = MoEBeamSearcher(dht, "expert.", (4, 4, 4))
    best = searcher.find_best_experts([[0.0] * 4] * 3, beam_size=2)
    assert all(isinstance(each, RemoteExpert) for each in best)
    assert {*server.module_backends} >= {each.uid for each in best}
    [found, nothing] = hivemind.moe.get_experts(dht, [best[0].uid, "expert.9.9.9"])
    assert found(torch.randn(1, 16)).shape == (1, 16)
    assert nothing is None
    dht.shutdown()
    server.shutdown()


def test_experts_that_are_too_slow() -> None:
    server = hivemind.Server.create(
        expert_uids=["expert.0.0", "expert.1.1"], expert_cls="nop_delay", hidden_dim=16, optim_cls=None, start=True
    )
    dht = hivemind.DHT(initial_peers=server.dht.get_visible_maddrs(), start=True)
    moe = hivemind.RemoteSwitchMixtureOfExperts(
        in_features=16,
        grid_size=(2, 2),
        dht=dht,
        k_best=2,
        uid_prefix="expert.",
        forward_timeout=0.1,
        backward_timeout=0.1,
        timeout_after_k_min=0.1,
    )
    for _ in range(3):
        inputs = torch.randn(10, 16, requires_grad=True)
        outputs, balancing_loss = moe(inputs)
        assert outputs.shape == inputs.shape
        (outputs.sum() + balancing_loss).backward()
    dht.shutdown()
    server.shutdown()
