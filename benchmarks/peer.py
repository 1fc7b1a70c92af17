"""One peer of the all-reduce benchmark: a process that obeys the commands it reads, see :mod:`commands`.

It runs in two environments, shoal's own and the one of the library that shoal is compared with, so it imports nothing
but the standard library, torch and the library under test. shoal and hivemind share their public interface, so they
share this code too.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from commands import obey, peer_parser

FORMATION_LIMIT_SECONDS = 120
CODECS = {"float16": "Float16Compression", "uniform8bit": "Uniform8BitQuantization"}
"""Classes of either library, by the name that a coordinator gives as the option ``compression``."""
LOSSY_TOLERANCE = 0.05
"""How far an average of lossy values may be from the exact one, as a share of it, in the mean of squares."""
POLL_SECONDS = 0.002
"""How often a peer looks whether its group is complete; small against every time measured here."""


def realistic_shapes(megabytes: float) -> list[tuple[int, ...]]:
    """Shapes of a transformer's tensors that take exactly this many megabytes (10^6 bytes) in fp32."""
    budget = round(megabytes * 1e6 / 4)
    width = next((w for w in (1024, 512, 256, 128, 64) if 48 * w * w <= budget), 32)
    layer = [
        (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,),
        (4 * width, width), (4 * width,), (width, 4 * width), (width,), (width,), (width,),
    ]  # fmt: skip
    shapes: list[tuple[int, ...]] = []
    while True:
        for shape in layer:
            size = torch.Size(shape).numel()
            if size > budget:
                return [*shapes, (budget,)] if budget else shapes
            shapes.append(shape)
            budget -= size


def equal_shapes(megabytes: float, count: int) -> list[tuple[int, ...]]:
    """Shapes of tensors of equal size that take about this many megabytes (10^6 bytes) in fp32."""
    return [(round(megabytes * 1e6 / 4 / count),)] * count


class Peer(ABC):
    """What the coordinator may ask for. Every value is checked after every round: a fast wrong answer is no answer."""

    version: str

    def __init__(self, index: int, peers: int, shapes: list[tuple[int, ...]]) -> None:
        self.index, self.peers = index, peers
        generator = torch.Generator().manual_seed(0)
        self.base = [torch.randn(shape, generator=generator) for shape in shapes]

    @abstractmethod
    def open(self, initial_peers: list[str] | None = None) -> Any:
        """Start; returns the address that the others need (asked of peer 0 alone)."""

    @abstractmethod
    def join(self, address: Any) -> None:
        """Connect with the others, who are told the same."""

    @abstractmethod
    def fill(self) -> None:
        """Set the local vector: the common base times (index + 1)."""

    @abstractmethod
    def form(self) -> dict[str, float]:
        """Find the group of all peers; returns when it began and when it was complete."""

    @abstractmethod
    def reduce(self) -> dict[str, float]:
        """Average within the group; returns when it began and when the result was there."""

    @abstractmethod
    def check(self) -> None:
        """Raise unless the local vector holds the average."""

    @abstractmethod
    def close(self) -> None:
        """Leave."""

    def compare(self, tensors: list[torch.Tensor], factor: float) -> None:
        for tensor, base in zip(tensors, self.base, strict=True):
            torch.testing.assert_close(tensor.detach(), base * factor, rtol=1e-4, atol=1e-5)


class GlooPeer(Peer):
    """torch.distributed's all-reduce over TCP, without encryption, of one flat vector: gloo's best case."""

    version = torch.__version__

    def open(self, initial_peers: list[str] | None = None) -> str:
        self.meeting_place = tempfile.TemporaryDirectory(prefix="shoal-benchmark-")
        return f"file://{self.meeting_place.name}/rendezvous"

    def join(self, address: str) -> None:
        import torch.distributed

        torch.distributed.init_process_group("gloo", init_method=address, rank=self.index, world_size=self.peers)
        self.vector = torch.cat([tensor.flatten() for tensor in self.base])

    def fill(self) -> None:
        torch.cat([tensor.flatten() for tensor in self.base], out=self.vector).mul_(self.index + 1)

    def form(self) -> dict[str, float]:
        began = time.monotonic()
        torch.distributed.barrier()
        return {"began": began, "ended": time.monotonic()}

    def reduce(self) -> dict[str, float]:
        began = time.monotonic()
        torch.distributed.all_reduce(self.vector)
        return {"began": began, "ended": time.monotonic()}

    def check(self) -> None:
        pieces = self.vector.split([tensor.numel() for tensor in self.base])
        tensors = [piece.view_as(tensor) for piece, tensor in zip(pieces, self.base, strict=True)]
        self.compare(tensors, self.peers * (self.peers + 1) / 2)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class AveragerPeer(Peer):
    """A DecentralizedAverager of the library's default settings, with a group that is complete at all peers."""

    def __init__(
        self,
        library: str,
        index: int,
        peers: int,
        shapes: list[tuple[int, ...]],
        options: dict[str, Any],
        address: str = "127.0.0.1",
    ) -> None:
        super().__init__(index, peers, shapes)
        self.library = importlib.import_module(library)
        self.version = self.library.__version__
        self.stage = importlib.import_module(f"{library}.averaging.control").AveragingStage
        self.codec = options.get("compression")
        if self.codec is not None:
            codec = getattr(importlib.import_module(f"{library}.compression"), CODECS[self.codec])()
            options = {**options, "compression": codec}
        self.options = options
        self.listen = {"host_maddrs": [f"/ip4/{address}/tcp/0"]}

    def open(self, initial_peers: list[str] | None = None) -> list[str]:
        self.dht = self.library.DHT(initial_peers=initial_peers or [], start=True, **self.listen)
        return [str(address) for address in self.dht.get_visible_maddrs()]

    def join(self, address: list[str]) -> None:
        if self.index != 0:
            self.dht = self.library.DHT(initial_peers=address, start=True, **self.listen)
        tensors = [torch.zeros_like(tensor) for tensor in self.base]
        size = {"target_group_size": self.peers, "min_group_size": self.peers}
        self.averager = self.library.DecentralizedAverager(
            tensors, self.dht, start=True, prefix="benchmark", **{**size, **self.options}
        )

    def fill(self) -> None:
        with self.averager.get_tensors() as tensors, torch.no_grad():
            for tensor, base in zip(tensors, self.base, strict=True):
                torch.mul(base, self.index + 1, out=tensor)

    def form(self) -> dict[str, float]:
        began = time.monotonic()
        self.control = self.averager.step(wait=False, require_trigger=True, timeout=FORMATION_LIMIT_SECONDS)
        while self.control.stage != self.stage.AWAITING_TRIGGER:
            if self.control.done():
                raise RuntimeError(f"no group was formed: {self.control.exception()}")
            time.sleep(POLL_SECONDS)
        return {"began": began, "ended": time.monotonic()}

    def reduce(self) -> dict[str, float]:
        began = time.monotonic()
        self.control.allow_allreduce()
        members = self.control.result(FORMATION_LIMIT_SECONDS)
        ended = time.monotonic()
        if len(members) != self.peers:
            raise RuntimeError(f"the group had {len(members)} members instead of {self.peers}")
        return {"began": began, "ended": ended}

    def check(self) -> None:
        factor = (self.peers + 1) / 2
        try:
            with self.averager.get_tensors() as tensors:
                if self.codec is None:
                    self.compare(list(tensors), factor)
                else:
                    self.compare_roughly(list(tensors), factor)
        except (AssertionError, RuntimeError) as e:
            raise RuntimeError(f"{self.account()}: {' '.join(str(e).split())}") from e
        if told := self.losses():
            raise RuntimeError(f"the right average, but {told}")

    def losses(self) -> str:
        """What the library itself says was not as it should be in the last round; only shoal tells."""
        last = getattr(self.averager, "last_round", None)
        lists = ("failed_peers", "left_out_peers", "not_finite_peers")
        told = [f"{name}: {', '.join(map(str, getattr(last, name)))}" for name in lists if getattr(last, name, ())]
        if last is not None and last.share_averaged < 1:
            told.append(f"only {last.share_averaged:.3f} of the vector was averaged")
        return "; ".join(told)

    def account(self) -> str:
        """Whose means the vector holds, and how much of each; and what the library says about the round."""
        with self.averager.get_tensors() as tensors:
            vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
        base = torch.cat([tensor.flatten() for tensor in self.base])
        everybody, found, left = range(self.peers), {}, 1.0
        for count in range(self.peers, 0, -1):
            for members in itertools.combinations(everybody, count):
                factor = statistics.fmean(index + 1 for index in members)
                share = torch.isclose(vector, base * factor, rtol=1e-4, atol=1e-6).float().mean().item()
                if share > 1e-3 and factor not in found:  # by chance, values near 0 look like any mean
                    found[factor] = f"{share:.3f} like the mean of {members}"
                    left -= share
        shares = "; ".join([*found.values(), f"{max(0.0, left):.3f} like none"])
        return f"{shares}. Told of the round: {self.losses() or 'it was complete'}"

    def look(self) -> dict[str, Any]:
        """How others call this peer of shoal, at which port it listens, and at which relays it has reservations."""

        async def see(dht: Any, node: Any) -> dict[str, Any]:
            p2p = node.p2p
            return {
                "peer_id": str(p2p.peer_id),
                "port": int(p2p.transport.addresses()[0]["tcp"]),
                "reachability": p2p.reachability.value,
                "reservations": len(p2p.reservations.held),
                "holds": [str(relay) for relay in p2p.reservations.held],
            }

        return self.dht.run_coroutine(see)

    def ports_to(self, peer_id: str) -> list[int]:
        """The ports here of the connections that this peer of shoal has made to another one."""

        async def see(dht: Any, node: Any) -> list[int]:
            streams = node.p2p.pool.streams_to(self.library.PeerID.from_base58(peer_id))
            return [int(stream.local_address["tcp"]) for stream in streams]

        return self.dht.run_coroutine(see)

    def compare_roughly(self, tensors: list[torch.Tensor], factor: float) -> None:
        for tensor, base in zip(tensors, self.base, strict=True):
            error = (tensor.detach() - base * factor).norm() / (base * factor).norm()
            if not error <= LOSSY_TOLERANCE:
                raise RuntimeError(f"the average of {tuple(base.shape)} is wrong by {error:.3f} of its norm")

    def inspect(self, survivors: list[int]) -> dict[str, Any]:
        """What the vector holds after a round in which all peers but these died: a digest, and which share of it is
        an average over at least all survivors."""
        dead = [index for index in range(self.peers) if index not in survivors]
        subsets = itertools.chain.from_iterable(itertools.combinations(dead, n) for n in range(len(dead) + 1))
        factors = [statistics.fmean(index + 1 for index in (*survivors, *subset)) for subset in subsets]
        with self.averager.get_tensors() as tensors:
            vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
        base = torch.cat([tensor.flatten() for tensor in self.base])
        averaged = torch.zeros(vector.numel(), dtype=torch.bool)
        for factor in factors:
            averaged |= torch.isclose(vector, base * factor, rtol=1e-4, atol=1e-6)
        digest = hashlib.sha256(vector.numpy().tobytes()).hexdigest()
        return {"digest": digest, "share_averaged": averaged.float().mean().item()}

    def share(self, is_donor: bool) -> None:
        """Hold the state that newcomers should get, or become one."""
        with self.averager.get_tensors() as tensors, torch.no_grad():
            for tensor, base in zip(tensors, self.base, strict=True):
                tensor.copy_(base if is_donor else torch.zeros(()))
        self.averager.allow_state_sharing = is_donor
        deadline = time.monotonic() + FORMATION_LIMIT_SECONDS
        while not is_donor and self._download() is None:
            if time.monotonic() > deadline:
                raise RuntimeError("no donor has been found")

    def _download(self) -> Any:
        try:
            return self.averager.load_state_from_peers(timeout=FORMATION_LIMIT_SECONDS)
        except TimeoutError:
            return None

    def download(self) -> dict[str, Any]:
        """Download the state; returns when it began and ended, and whether the right values have come."""
        began = time.monotonic()
        state = self._download()
        ended = time.monotonic()
        correct = state is not None and all(map(torch.equal, state[1], self.base))
        return {"began": began, "ended": ended, "correct": correct}

    def close(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tensors", type=int, default=0, help="of equal size; 0: shapes of a transformer")
    parser.add_argument("--listen", default="127.0.0.1", metavar="ADDRESS")
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    def make_peer() -> Peer:
        shapes = equal_shapes(args.megabytes, args.tensors) if args.tensors else realistic_shapes(args.megabytes)
        if args.library == "gloo":
            return GlooPeer(args.index, args.peers, shapes)
        return AveragerPeer(args.library, args.index, args.peers, shapes, args.options, args.listen)

    obey(make_peer)


if __name__ == "__main__":
    main()
