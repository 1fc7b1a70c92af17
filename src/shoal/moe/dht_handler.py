"""Keeps the experts of a server listed in the DHT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from functools import partial

from shoal.base.clock import get_dht_time
from shoal.base.closeable import Facade
from shoal.base.logs import Seldom
from shoal.base.reactor import AwaitableFuture, Portal
from shoal.dht.dht import DHT
from shoal.moe.declare import declare, withdraw
from shoal.moe.uids import ExpertUID

logger = logging.getLogger(__name__)

# The most seconds that withdrawing the records takes. Chosen.
WITHDRAW_SECONDS = 5.0


class DHTHandlerThread(Facade):
    """Declares experts periodically, and withdraws the declarations at shutdown. Lives in the background loop.

    Args:
        module_backends: the experts by uid.
        dht: a DHT of this peer.
        update_period: seconds from one declaration to the next.
        expiration: seconds until one expires; default: twice the period, at least three seconds.
    """

    def __init__(
        self,
        module_backends: Collection[ExpertUID],
        dht: DHT,
        update_period: float = 30,
        expiration: float | None = None,
    ) -> None:
        self.module_backends, self.dht = module_backends, dht
        self.update_period = update_period
        self.expiration = max(2 * update_period, 3) if expiration is None else expiration
        self._portal = Portal("DHTHandlerThread")
        self._portal.on_close(self._withdraw)
        self._declared: AwaitableFuture[None] | None = None
        self._declared_until = 0.0
        self._warn_seldom = Seldom(logger.warning)

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Begin.

        Args:
            await_ready: wait until the experts are declared, or that has failed.
        """
        if self._declared is None:
            self._declared = self._portal.submit(self._declare())
            self._portal.submit(self._declare_again())
        if await_ready:
            self._declared.result(timeout)

    start = run_in_background

    async def _declare_again(self) -> None:
        while True:
            await asyncio.sleep(self.update_period)
            await self._declare()

    async def _declare(self) -> None:
        uids, until = [*self.module_backends], get_dht_time() + self.expiration
        if not uids:
            return
        try:
            self._declared_until = until
            stored = await self.dht.run_coroutine(partial(declare, uids=uids, until=until), return_future=True)
        except Exception as e:
            logger.warning("could not declare %d experts, trying again in %g s: %s", len(uids), self.update_period, e)
            return
        refused = [uid for uid in uids if not stored[uid]]
        if refused:
            self._warn_seldom(
                "could not declare %s: another server may have declared the same; callers would reach that one",
                ", ".join(refused[:5]),
            )

    async def _withdraw(self) -> None:
        if self._declared_until and self.dht.is_alive():
            withdrawing = partial(withdraw, uids=[*self.module_backends], until=self._declared_until)
            async with asyncio.timeout(WITHDRAW_SECONDS):
                await self.dht.run_coroutine(withdrawing, return_future=True)

    def is_alive(self) -> bool:
        return self._declared is not None and not self._portal.closed

    def shutdown(self) -> None:
        """Withdraw the declarations. Idempotent."""
        self._portal.close(WITHDRAW_SECONDS + 1)

    def join(self, timeout: float | None = None) -> None:
        """Does nothing: :meth:`shutdown` waits."""
