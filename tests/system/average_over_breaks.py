"""Averages one vector with two other peers, again and again; one of them resets its connections in every round."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys

import torch

from shoal import DHT, DecentralizedAverager
from shoal.averaging.round.session import GroupSession

PEERS = 3


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


class Breaking(DecentralizedAverager):
    """Resets all connections with one other member when so many bytes have come in a round, if any are given."""

    breaks_after = 0

    async def average_in_group(self, session: GroupSession, tensors, infos) -> None:
        breaking = asyncio.ensure_future(self._break(session)) if self.breaks_after else None
        await super().average_in_group(session, tensors, infos)
        if breaking is not None:
            say(broke=breaking.done())
            breaking.cancel()

    async def _break(self, session: GroupSession) -> None:
        p2p = self.node.p2p
        enough = p2p.metrics.bytes_received + self.breaks_after
        while p2p.metrics.bytes_received < enough:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.001)
        others = [peer for peer in session.group.peer_ids if peer != p2p.peer_id]
        p2p.pool.cut(lambda stream: stream.remote == others[0])
        p2p.server.cut(lambda stream: stream.remote == others[0], "reset by a test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial-peers", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--megabytes", type=int, default=40)
    args = parser.parse_args()

    dht = DHT(initial_peers=args.initial_peers, start=True)
    say(address=str(dht.get_visible_maddrs()[0]))
    vector = torch.empty(args.megabytes * 10**6 // 4)
    averager = Breaking(
        [vector], dht, start=True, prefix="broken", target_group_size=PEERS, min_group_size=PEERS, client_mode=False
    )
    say(ready=True)
    assert sys.stdin.readline() == "go\n"
    breaks = not args.initial_peers
    for finished in range(1, args.rounds + 1):
        seed = finished + 100 * int.from_bytes(averager.peer_id.to_bytes()[-3:])
        with averager.get_tensors() as averaged:
            averaged[0].copy_(torch.randn(vector.numel(), generator=torch.Generator().manual_seed(seed)))
        if breaks:
            averager.breaks_after = finished * args.megabytes * 10**6 // args.rounds
        assert averager.step(timeout=60) is not None
        found = averager.last_round
        assert found is not None
        with averager.get_tensors() as averaged:
            digest = hashlib.sha256(averaged[0].numpy().tobytes()).hexdigest()
        say(
            round=finished,
            digest=digest,
            share=found.share_averaged,
            failed=len(found.failed_peers),
            seconds=found.duration,
            resumed=averager.node.p2p.metrics.exchanges_resumed,
        )
    averager.shutdown()
    dht.shutdown()
    say(done=True)


if __name__ == "__main__":
    main()
