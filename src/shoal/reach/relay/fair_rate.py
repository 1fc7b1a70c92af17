"""A rate that is shared equally by all circuits that carry data at the moment.

A share is in debt while it has taken bytes and not yet paid for them with time. It pays off its debt at the rate
divided by the number of shares in debt. A share that takes little is seldom in debt, and so leaves the rest to the
others. Debts are settled when any share takes more; there are no timers.

The shares of strangers together weigh at most as much as all others in debt. So a crowd of strangers gets half of the
rate; it gets its full share if it is small, or alone.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.net.transport import Throttle

LATENESS = 0.05
"""A share that returns from its pause up to this many seconds late loses nothing. Chosen: an event loop may be busy."""


class FairRate:
    """The whole rate, from which shares are taken.

    Args:
        rate: bytes per second; ``None`` = no limit.
        now: the time in seconds.
        count: called with the number of bytes whenever some are taken.
    """

    def __init__(self, rate: float | None, now: Callable[[], float], count: Callable[[int], object]) -> None:
        self.rate, self.now, self.count = rate, now, count
        self.in_debt: dict[RateShare, None] = {}
        """Shares in debt."""
        self._paid = 0.0
        self._paid_at = now()

    def share(self, is_known: Callable[[], bool] = lambda: True) -> RateShare:
        """Make a new share.

        Args:
            is_known: whether its peers are known at this moment, rather than strangers.
        """
        return RateShare(self, is_known)

    def weight_of(self, share: RateShare) -> float:
        """The weight of a share among those in debt; 1 unless there are more strangers than others."""
        if share.is_known():
            return 1.0
        known = sum(each.is_known() for each in self.in_debt)
        strangers = len(self.in_debt) - known + (share not in self.in_debt)
        return min(1.0, known / strangers) if known else 1.0

    @property
    def weights(self) -> float:
        """The total weight of all shares in debt."""
        return sum(each.weight for each in self.in_debt)

    def pay(self) -> float:
        """Settle debts; returns the bytes that a share that was always in debt would have paid for until now."""
        assert self.rate is not None
        now = self.now()
        seconds, self._paid_at = now - self._paid_at, now
        while self.in_debt:
            debtor = min(self.in_debt, key=lambda share: share.owed)
            needed = (debtor.owed - self._paid) * self.weights / self.rate
            if needed > seconds:
                break
            self._paid, seconds = max(self._paid, debtor.owed), seconds - max(0.0, needed)
            del self.in_debt[debtor]
        self._paid += seconds * self.rate / (self.weights or 1.0)
        return self._paid


class RateShare(Throttle):
    """One share of the rate."""

    def __init__(self, whole: FairRate, is_known: Callable[[], bool]) -> None:
        self._whole, self.is_known = whole, is_known
        self.weight = 1.0
        """Its weight while it is in debt."""
        self.owed = 0.0
        """It is in debt until :meth:`FairRate.pay` returns this many bytes."""
        self.used_at = whole.now()
        """When it last took bytes, or was made."""

    def take(self, nbytes: int) -> float:
        whole = self._whole
        self.used_at = whole.now()
        whole.count(nbytes)
        if whole.rate is None:
            return 0.0
        paid = whole.pay()
        late = LATENESS * whole.rate / (whole.weights or 1.0)
        self.weight = whole.weight_of(self)
        self.owed = max(self.owed, paid - late) + nbytes / self.weight
        if self.owed <= paid:
            return 0.0
        whole.in_debt[self] = None
        return (self.owed - paid) * whole.weights / whole.rate

    def close(self) -> None:
        """End the share; the others divide the rate among them."""
        self._whole.in_debt.pop(self, None)
