"""Peers that hold a stage each, as archives see them: no microbatch passes."""

from __future__ import annotations

import threading

import torch

from shoal import Optimizer, get_dht_time
from shoal.stages.directory import StageDirectory, StageRecord, name_of_stage
from tests.archive.states import RUN

STAGES = 3


def make_stage(number: int, seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed + number)
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6) if number == 1 else torch.nn.Tanh())


class StagePeer:
    """A peer that holds one stage, and trains it alone on random data. Its record is in the directory of stages."""

    def __init__(self, dht, number: int, seed: int = 0) -> None:
        self.dht, self.number, self.module = dht, number, make_stage(number, seed)
        self.opt = Optimizer(
            dht=dht,
            run_id=name_of_stage(RUN, number),
            target_batch_size=16,
            optimizer=torch.optim.Adam(self.module.parameters(), lr=0.05),
            model=self.module,
            matchmaking_time=5.0,
        )
        self.directory = dht.run_coroutine(self._declare)

    async def _declare(self, _, node) -> StageDirectory:
        directory = StageDirectory(node, node.p2p, RUN, STAGES)
        await directory.declare(self._record)
        return directory

    @property
    def _record(self) -> StageRecord:
        # A new time is news, which is written at once.
        return StageRecord(stage=self.number, epoch=self.opt.local_epoch, rate=1.0, since=get_dht_time())

    def train_until(self, epoch: int) -> None:
        rng, pause = torch.Generator().manual_seed(self.number), threading.Event()
        while self.opt.local_epoch < epoch:
            self.opt.zero_grad()
            self.module(torch.randn(8, 6, generator=rng)).square().mean().backward()
            self.opt.step(batch_size=8)
            pause.wait(0.02)
        self.declare()

    def declare(self) -> None:
        self.dht.run_coroutine(lambda *_: self.directory.declare(self._record))

    def kill(self) -> None:
        """Nobody is told."""
        self.dht.shutdown()
        self.opt.shutdown()

    def shutdown(self) -> None:
        self.opt.shutdown()
        self.dht.run_coroutine(lambda *_: self.directory.stop())
