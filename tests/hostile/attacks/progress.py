"""Strangers who say something about their progress that is not so. They answer calls, and hold nothing."""

from __future__ import annotations

import asyncio

from shoal.net.transport import MOST
from tests.hostile.attacker import Attacker, FalseTracker

GHOSTS = 3


async def claims_a_million_epochs(me: Attacker) -> None:
    """A stranger. "I am at epoch 10⁶ + yours." Nobody may stop training to look for that epoch's state."""
    await FalseTracker(me, lambda epoch: epoch + 10**6).go_on()


async def calls_the_end_of_an_epoch_far_away(me: Attacker) -> None:
    """A stranger in client mode. "My epoch has ended", of epoch 2⁵³ - 1. Nobody's epoch may end before it is full."""
    await FalseTracker(me, lambda _: MOST - 1, client_mode=True, ends_in=0.0).go_on()


async def ghosts_take_part(me: Attacker) -> None:
    """A stranger under several names. "A client, at your epoch, with no samples." Nobody may wait for them for long."""
    others = [Attacker(await me.make_node(client_mode=True), me.run, me.make_node) for _ in range(GHOSTS)]
    ghosts = [FalseTracker(ghost, samples_accumulated=0, client_mode=True) for ghost in others]
    try:
        await asyncio.gather(
            me.strike_again_and_again(lambda _: asyncio.sleep(0)), *(ghost.go_on() for ghost in ghosts)
        )
    finally:
        await asyncio.gather(*(ghost.node.shutdown() for ghost in others))


async def claims_a_billion_samples(me: Attacker) -> None:
    """A stranger. "I have made 10⁹ samples, a million per second." Epochs may not end after every batch."""
    await FalseTracker(me, samples_accumulated=10**9, samples_per_second=1e6).go_on()
