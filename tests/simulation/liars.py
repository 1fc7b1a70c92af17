"""Trainers that lie about their progress. Their gradients are as good as anybody's."""

from __future__ import annotations

import msgspec

from tests.simulation.training import Trainer


class Boaster(Trainer):
    """Claims a thousand times as many samples as it has."""

    def report(self) -> None:
        self.tracker.report_local_progress(self.epoch, 1000 * self.samples)


class Prophet(Trainer):
    """Claims to be far ahead."""

    def report(self) -> None:
        super().report()
        board = self.tracker.board
        board.own = msgspec.structs.replace(board.own, epoch=self.epoch + 10**6)


class Hasty(Trainer):
    """Says after each batch that the epoch is over."""

    def report(self) -> None:
        super().report()
        self.tracker.declare_epoch_over()
