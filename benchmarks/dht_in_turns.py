"""What an operation of the DHT costs in this version and in another one of shoal, to about one percent.

    git worktree add ../before v0.1 && python benchmarks/dht_in_turns.py --against ../before

Both versions run at the same time and on the same core, each with a whole swarm in one process: real connections, one
event loop. They take turns of a few operations, so whatever slows the machine down slows down both. Ids of nodes and
keys are the same on both sides. What is compared is processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

OPERATIONS = ("store", "get", "get latest")
VALUE = b"x" * 100
SECONDS_TO_LIVE = 3600.0
# Callers at a time, and operations of each kind in one turn.
CALLERS, PER_TURN = 4, 12
# Turns whose times are not counted: the first ones still open connections.
WARM_UP = 4
HERE = Path(__file__).resolve().parent.parent


class Swarm:
    """All nodes of one version."""

    def __init__(self, nodes: list[Any], rng: random.Random) -> None:
        self._nodes, self._rng = nodes, rng
        self._done = dict.fromkeys(OPERATIONS, 0)

    @classmethod
    async def start(cls, identities: list[Path], rng: random.Random) -> Swarm:
        from shoal.dht.node import DHTNode

        nodes: list[Any] = []
        addresses = None
        for path in identities:
            node = await DHTNode.create(initial_peers=addresses, identity_path=path, check_if_identity_free=False)
            nodes.append(node)
            addresses = addresses or await node.get_visible_maddrs()
        return cls(nodes, rng)

    async def turn(self, operation: str) -> float:
        """Do a few operations; returns the processor time of one, in milliseconds."""
        first = self._done[operation]
        self._done[operation] += PER_TURN
        began = time.process_time()
        for number in range(first, first + PER_TURN, CALLERS):
            await asyncio.gather(*(self._do(operation, f"key {number + each}") for each in range(CALLERS)))
        return 1e3 * (time.process_time() - began) / PER_TURN

    async def _do(self, operation: str, key: str) -> None:
        node = self._rng.choice(self._nodes)
        if operation == "store":
            assert await node.store(key, VALUE, expiration_time=time.time() + SECONDS_TO_LIVE)
        else:
            found = await node.get(key, latest=operation == "get latest")
            assert found is not None
            assert found.value == VALUE


def write_identities(directory: str, peers: int, rng: random.Random) -> list[Path]:
    from shoal.p2p import Identity

    paths = [Path(directory, f"{number}.id") for number in range(peers)]
    for path in paths:
        path.touch(mode=0o600)
        path.write_bytes(Identity.generate(rng).to_bytes())
    return paths


async def serve(identities: list[Path], rng: random.Random) -> None:
    """Take a turn for each operation that is read, and answer with its time."""
    swarm = await Swarm.start(identities, rng)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while operation := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        print(await swarm.turn(operation), flush=True)


def serve_in_loop_of_shoal(peers: int, seed: int) -> None:
    from shoal.base.reactor import new_event_loop

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(write_identities(directory, peers, rng), rng))


class Version:
    """A process with the swarm of one version."""

    def __init__(self, tree: Path, peers: int, seed: int) -> None:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--serve"]
        command += ["--peers", str(peers), "--seed", str(seed)]
        environment = {"SHOAL_HOST_MADDRS": "/ip4/127.0.0.1/tcp/0", **os.environ, "PYTHONPATH": str(tree / "src")}
        environment["OMP_NUM_THREADS"] = "1"
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, {min(os.sched_getaffinity(0))})

    def read(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit("a swarm has ended: its traceback is above")
        return line

    def turn(self, operation: str) -> float:
        assert self.process.stdin
        print(operation, file=self.process.stdin, flush=True)
        return float(self.read())


def compare(args: argparse.Namespace) -> None:
    times: dict[str, list[list[float]]] = {operation: [[], []] for operation in OPERATIONS}
    for seed in range(args.seeds):
        versions = [Version(tree, args.peers, seed) for tree in (args.against.resolve(), HERE)]
        try:
            assert [version.read() for version in versions] == ["ready", "ready"]
            for turn in range(WARM_UP + args.turns):
                for operation in OPERATIONS:
                    for which in (0, 1) if turn % 2 else (1, 0):
                        took = versions[which].turn(operation)
                        if turn >= WARM_UP:
                            times[operation][which].append(took)
        finally:
            for version in versions:
                version.process.kill()
                version.process.communicate()
    print(f"processor time of an operation among {args.peers} peers, medians of {args.seeds * args.turns} turns")
    print(f"  {'':<12}{'before':>12}{'now':>12}{'change':>10}")
    for operation, (before, now) in times.items():
        change = median(now) / median(before) - 1
        print(f"  {operation:<12}{median(before):>9.2f} ms{median(now):>9.2f} ms{change:>+10.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of the other version")
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3, help="swarms of each version, one after the other")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_in_loop_of_shoal(args.peers, args.seed)
    elif args.against is None or not (args.against / "src" / "shoal").is_dir():
        parser.error(f"--against must be a checkout of shoal, with src/shoal in it, got {args.against}")
    else:
        compare(args)


if __name__ == "__main__":
    main()
