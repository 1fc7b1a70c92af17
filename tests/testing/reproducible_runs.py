"""Programs whose runs must be the same whenever the seed is: prints one hash of events for each.

Run as ``python -m tests.testing.reproducible_runs SEED``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import torch

from shoal.base.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.errors import ShoalError
from shoal.p2p import P2P, Call, Header, P2PContext, ServicerBase
from shoal.testing import (
    Link,
    Nat,
    Network,
    SharedTable,
    Trace,
    run,
    start_averagers,
    start_dht_node,
    start_dht_nodes,
    start_peers,
    start_step,
)

LINK = Link(delay=(0.02, 0.1), jitter=0.02, dial_failure=0.02, break_rate=0.02)


class Blob(Header):
    size: int = 0


class Echo(ServicerBase):
    async def rpc_unary(self, request: Blob, context: P2PContext) -> Blob:
        await asyncio.sleep(0.01)
        return request

    async def rpc_stream(self, call: Call, context: P2PContext) -> None:
        while (blob := await call.receive(Blob)) is not None:
            await call.send(blob, await call.read_payload(2**20))


async def call_each_other(trace: Trace) -> None:
    """Unary calls and bulk streams between peers on slow lines, some of which die, across a partition."""
    network = Network(LINK, uplink=500_000.0, downlink=800_000.0, trace=trace)
    peers = await start_peers(network, 6)
    for peer in peers:
        await Echo().add_p2p_handlers(peer)

    async def use(caller: P2P, callee: P2P) -> None:
        caller.add_addresses(callee.peer_id, await callee.get_visible_maddrs())
        stub = Echo.get_stub(caller, callee.peer_id)
        for number in range(3):
            await stub.rpc_unary(Blob(size=number), timeout=5.0)
            async with stub.rpc_stream() as call:
                await call.send(Blob(size=1), caller.rng.randbytes(30_000), end=True)
                await call.receive(Blob)
                await call.read_payload(2**20)

    loop = asyncio.get_running_loop()
    loop.call_later(1.0, network.hosts[1].crash)
    loop.call_later(1.5, network.hosts[2].power_off)
    loop.call_later(2.0, network.partition, network.hosts[:3], network.hosts[3:])
    loop.call_later(4.0, network.heal)
    uses = [network.hosts[i].spawn(use(a, b)) for i, a in enumerate(peers) for b in peers if a is not b]
    await asyncio.gather(*uses, return_exceptions=True)
    await asyncio.gather(*(peer.shutdown() for peer in peers))


async def share_a_table(trace: Trace) -> None:
    """Stores and gets in a distributed table of which a part dies."""
    network = Network(LINK, trace=trace)
    nodes = await start_dht_nodes(network, 15)
    hosts = [network.host_of(node.peer_id) for node in nodes]

    async def store(number: int) -> None:
        await nodes[number].store(f"key {number % 5}", number, get_dht_time() + 60, subkey=number)

    async def get(number: int) -> None:
        await nodes[number].get(f"key {number % 5}", latest=number % 2 == 0)

    await asyncio.gather(*(host.run(store(number)) for number, host in enumerate(hosts)))
    for host in network.rng.sample(hosts, 4):
        host.power_off()
    living = [(number, host) for number, host in enumerate(hosts) if host.is_up]
    await asyncio.gather(*(host.run(get(number)) for number, host in living))
    await asyncio.gather(*(host.run(nodes[number].shutdown()) for number, host in living))


async def average(trace: Trace) -> None:
    """A round of averagers of which two die."""
    network = Network(LINK, trace=trace)
    tensors = [torch.full((200,), float(number)) for number in range(8)]
    settings = {"part_size_bytes": 64, "min_matchmaking_time": 3.0}
    averagers = await start_averagers(network, [[tensor] for tensor in tensors], SharedTable(0.05), **settings)
    steps = [start_step(network, averager, timeout=10) for averager in averagers]
    loop = asyncio.get_running_loop()
    loop.call_later(2.0, network.hosts[0].crash)
    loop.call_later(3.3, network.hosts[1].crash)
    await asyncio.wait([asyncio.wrap_future(step) for step in steps])
    for number, tensor in enumerate(tensors):
        trace.record(loop.time(), number, b"result", bytes(tensor.numpy().data))


async def get_through_routers(trace: Trace) -> None:
    """Peers behind routers of all kinds dial each other; a relay dies meanwhile, and a router starts again."""
    network = Network(LINK, trace=trace, internet=True)
    kinds = [None, None, Nat(), Nat(mapping="hard"), Nat(rejects=True), Nat(behind=Nat(hairpin=True))]
    nodes: list[DHTNode] = []
    for nat in kinds:
        host = network.add_host(nat=nat)
        nodes.append(await start_dht_node(network, host, nodes[:1]))
    hosts = [network.host_of(node.peer_id) for node in nodes]

    async def dial(caller: DHTNode, other: DHTNode) -> None:
        with contextlib.suppress(ShoalError):
            caller.p2p.add_addresses(other.peer_id, await other.get_visible_maddrs())
            (await caller.p2p.dial(other.peer_id)).abort()

    for moment in range(3):
        await asyncio.gather(
            *(
                host.run(dial(caller, other))
                for host, caller in zip(hosts[2:], nodes[2:], strict=True)
                for other in nodes
                if other is not caller
            )
        )
        if moment == 0:
            hosts[1].crash()
            assert hosts[2].nat is not None
            hosts[2].nat.rebind(new_address=True)
        await asyncio.sleep(20)


PROGRAMS = (call_each_other, share_a_table, average, get_through_routers)


def hashes(seed: int) -> dict[str, str]:
    """The hash of each program's events."""
    traces = {program: Trace() for program in PROGRAMS}
    for program, trace in traces.items():
        run(program(trace), seed=seed)
    return {program.__name__: f"{trace.events} events {trace.digest()}" for program, trace in traces.items()}


if __name__ == "__main__":
    for name, digest in hashes(int(sys.argv[1])).items():
        print(name, digest)
