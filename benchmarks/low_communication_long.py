"""Whether low-communication training reaches the loss of synchronous training, if it is long and its rates are tuned.

    python benchmarks/low_communication_long.py --store long.jsonl
    python benchmarks/low_communication_long.py --steps 320 --tuning-steps 80 --methods "H=80, 4 bits"

Four peers train a byte-level transformer like that of the demo, half as large, each on its own share of the text. They
are in one process: the peers, their messages and all bytes are real, only the network and the clock are not. It has
lines of 100 Mbit/s and 60 ms, and an inner step takes 0.02 s. Synchronous training is computed without a network: in
each step the mean of the peers' gradients, both in float16, and its bytes are those that an all-reduce must send.

Each method gets its own rates. Its inner learning rate is a multiple of the demo's, found by short runs:
twice and half as much, and on as long as that is better. Of its outer optimizers, all make a whole run, and the
best one counts. With ``--store`` each run is kept, and the program goes on where it was ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from low_communication_peer import LowCommunicationPeer

from shoal.cli.demo.model import ModelSize
from shoal.testing import Link, Network, run
from tests.simulation.facades import facades_in_virtual_time, in_virtual_thread, pause

PEERS = 4
SIZE, BATCH_SIZE, HELD_OUT_WINDOWS = ModelSize(context=32, width=64), 16, 1024
STEPS, TUNING_STEPS = 5120, 1280
"""Of a whole run, and of one that finds the inner rate: the last step of all methods is one with an exchange."""
FIRST_FACTOR = 2.0
BYTES_PER_SECOND, ROUND_TRIP, SECONDS_PER_STEP = 12.5e6, 0.060, 0.02
TIME_LIMIT_SECONDS = 100_000.0
BYTES_OF_HALF = 2
GOAL, FEWER = 0.02, 200

WITH_MOMENTUM = ((0.9, 0.5), (0.7, 0.9))
FOUR_BITS = {"sync_every": 80, "compression": "4 bits"}
Outer = tuple[float, float]
METHODS: dict[str, tuple[dict[str, Any], tuple[Outer, ...]]] = {
    "H=80, 4 bits": (FOUR_BITS, WITH_MOMENTUM),
    "streaming H=80": ({**FOUR_BITS, "fragments": 4, "fragment_sync_delay": 15}, WITH_MOMENTUM),
    "sparse H=10": ({"sync_every": 10, "compression": "top-k"}, ((0.7, 0.0), (1.0, 0.0))),
}
"""Options of DiLoCo, and rates and momentums of the outer optimizer; the first one is for finding the inner rate."""

Result = dict[str, Any]


class SimulatedPeer(LowCommunicationPeer):
    """A peer whose steps take virtual time."""

    def compute_gradients(self) -> float:
        pause(SECONDS_PER_STEP)
        return super().compute_gradients()


def make(cls: type[LowCommunicationPeer], index: int, mode: dict[str, Any], steps: int, seed: int) -> Any:
    return cls(
        index,
        PEERS,
        mode,
        steps,
        seed=seed,
        batches=1000 * seed + index,
        batch_size=BATCH_SIZE,
        held_out=HELD_OUT_WINDOWS,
        size=SIZE,
    )


def train_synchronously(inner: float, steps: int, seed: int) -> Result:
    """All peers make each step together."""
    peers = [
        make(LowCommunicationPeer, index, {"kind": "alone", "inner": inner}, steps, seed) for index in range(PEERS)
    ]
    first = peers[0]
    for peer in peers:
        peer.model = first.model  # they would always have the same
    optimizer = first.make_optimizer()
    parameters = list(first.model.parameters())
    for _ in range(steps):
        sums = [torch.zeros_like(each) for each in parameters]
        for peer in peers:
            optimizer.zero_grad()
            peer.compute_gradients()
            for total, each in zip(sums, parameters, strict=True):
                total += each.grad.half()
        for total, each in zip(sums, parameters, strict=True):
            each.grad = (total / PEERS).half().float()
        optimizer.step()
        first.scheduler.step()
    payload = steps * 2 * (PEERS - 1) / PEERS * first.values * BYTES_OF_HALF
    per_step = SECONDS_PER_STEP + 4 * ROUND_TRIP + payload / steps / BYTES_PER_SECOND
    return {"loss": first.held_out_loss(), "payload": payload, "seconds": steps * per_step, "rounds": steps}


def train_locally(options: dict[str, Any], outer: Outer, inner: float, steps: int, seed: int) -> Result:
    """With DiLoCo, on a simulated network."""
    mode = {"kind": "diloco", "inner": inner, "options": {**options, "outer": outer}}
    peers = [make(SimulatedPeer, index, mode, steps, seed) for index in range(PEERS)]
    result: Result = run(_train(peers, steps), seed=seed, time_limit=TIME_LIMIT_SECONDS)
    return result


async def _train(peers: list[SimulatedPeer], steps: int) -> Result:
    network = Network(Link(delay=ROUND_TRIP / 2), uplink=BYTES_PER_SECOND, downlink=BYTES_PER_SECOND)
    hosts = [network.add_host() for _ in peers]

    async def ask(command: str, *arguments: Any, to: int = PEERS) -> list[Any]:
        calls = [partial(getattr(peer, command), *arguments) for peer in peers[:to]]
        return await asyncio.gather(
            *(host.run(in_virtual_thread(call)) for host, call in zip(hosts, calls, strict=False))
        )

    with facades_in_virtual_time():
        for peer, host in zip(peers, hosts, strict=True):
            peer.dht_options = {"transport": host.transport(), "rng": host.rng}
        [address] = await ask("open", to=1)
        await ask("join", address)
        await ask("appear")
        await ask("meet")
        seconds = max(answer["seconds"] for answer in await ask("train", steps))
        found = await ask("measure", True)
        await ask("close")
    assert len({tuple(each["bits"]) for each in found}) == 1, "outer parameters differ"
    rounds = [each for answer in found for each in answer["rounds"]]
    assert all(each["peers"] == PEERS for each in rounds), "a round was not complete"
    return {
        "loss": found[0]["loss"],
        "payload": sum(each["bytes"] for each in rounds) / PEERS,
        "sent": sum(each["sent"] for each in found) / PEERS,
        "seconds": seconds,
        "rounds": len(rounds) / PEERS,
    }


class Runs:
    """What has been measured, in this program or an earlier one."""

    def __init__(self, store: Path | None, seed: int) -> None:
        self._store, self._seed = store, seed
        lines = store.read_text(encoding="utf-8").splitlines() if store and store.exists() else []
        self._known = {json.dumps(key): result for key, result in map(json.loads, lines)}
        self.processor_seconds = 0.0

    def get(self, method: str, outer: Outer | None, inner: float, steps: int) -> Result:
        key = [method, outer, inner, steps, self._seed]
        result = self._known.get(json.dumps(key))
        if result is None:
            began = time.process_time()
            if outer is None:
                result = train_synchronously(inner, steps, self._seed)
            else:
                result = train_locally(METHODS[method][0], outer, inner, steps, self._seed)
            result["processor"] = time.process_time() - began
            self._known[json.dumps(key)] = result
            if self._store:
                with self._store.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, result]) + "\n")
        self.processor_seconds += result["processor"]
        print(
            f"    {method}, outer {outer}, inner rate x {inner:g}, {steps} steps: loss {result['loss']:.4f} "
            f"({result['processor']:.0f} s of one core)",
            flush=True,
        )
        return result


def find_best(loss_at: Callable[[float], float]) -> float:
    """The factor with the least loss: twice as much or half as much, on as long as that is better."""

    def finite_loss_at(factor: float) -> float:
        loss = loss_at(factor)
        return loss if math.isfinite(loss) else math.inf

    best, least = FIRST_FACTOR, finite_loss_at(FIRST_FACTOR)
    for step in (2.0, 0.5):
        while (loss := finite_loss_at(best * step)) < least:
            best, least = best * step, loss
        if best != FIRST_FACTOR:
            break  # on the other side it can only be worse
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of a whole run; best a multiple of 80")
    parser.add_argument("--tuning-steps", type=int, default=TUNING_STEPS, help="of a run that finds an inner rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", type=Path, help="runs are kept in this file, and not made again")
    args = parser.parse_args()
    runs = Runs(args.store, args.seed)
    print(f"{PEERS} peers, {args.steps} steps of {BATCH_SIZE} windows each, seed {args.seed}", flush=True)
    inner = find_best(lambda factor: runs.get("synchronous", None, factor, args.tuning_steps)["loss"])
    base = runs.get("synchronous", None, inner, args.steps)
    rows = [("synchronous", None, inner, base)]
    for method in args.methods:
        first, *_ = outers = METHODS[method][1]
        inner = find_best(lambda factor: runs.get(method, first, factor, args.tuning_steps)["loss"])  # noqa: B023
        found = [(method, outer, inner, runs.get(method, outer, inner, args.steps)) for outer in outers]
        rows.append(min(found, key=lambda row: row[3]["loss"]))
    for method, outer, inner, result in rows:
        excess, fewer = result["loss"] / base["loss"] - 1, base["payload"] / result["payload"]
        line = (
            f"  {method:<15} inner rate x {inner:<4g} outer {outer}  "
            f"loss {result['loss']:.4f} ({100 * excess:+.2f} %)  "
            f"payload {result['payload'] / 1e6:8.2f} MB ({fewer:.0f} x fewer)  {result['rounds']:.0f} rounds  "
            f"{result['seconds']:.0f} s on a wide area"
        )
        if outer is not None:
            beside = result["sent"] - result["payload"]
            is_met = excess <= GOAL and fewer >= FEWER
            line += f"  beside it {beside / 1e3:.0f} kB  {'met' if is_met else 'MISSED'}: {100 * GOAL:g} %, {FEWER} x"
        print(line)
    print(f"  {runs.processor_seconds / 60:.0f} minutes of one core in all")
    print(json.dumps({**vars(args), "results": rows}, default=str))


if __name__ == "__main__":
    main()
