"""A rate that is shared equally by whatever moves at the moment.

Each share that is in debt, because it has taken bytes and not yet paid for them with time, pays off its debt at the
rate divided by the number of shares in debt. A share that takes little is in debt seldom, and so leaves the rest to the
others. Debts are paid when somebody takes more; there are no timers.

Shares of strangers count together as at most as many as there are others in debt: a crowd gets half of the rate, and
takes nothing from anybody where it is small, or alone.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.net.transport import Throttle

LATENESS = 0.05
"""Seconds: a share that comes back this late from its pause loses nothing."""


class FairRate:
    """The whole.

    Args:
        rate: bytes per second; ``None`` = no limit.
        now: the time in seconds.
        count: told of all bytes that are taken.
    """

    def __init__(self, rate: float | None, now: Callable[[], float], count: Callable[[int], object]) -> None:
        self.rate, self.now, self.count = rate, now, count
        self.in_debt: dict[RateShare, None] = {}
        """Those that have not paid yet."""
        self._paid = 0.0
        self._paid_at = now()

    def share(self, is_known: Callable[[], bool] = lambda: True) -> RateShare:
        """A share for somebody new.

        Args:
            is_known: whether it belongs to peers that are no strangers, at this moment.
        """
        return RateShare(self, is_known)

    def weight_of(self, share: RateShare) -> float:
        """How much a share counts among those in debt; 1 unless there are more strangers than others."""
        if share.is_known():
            return 1.0
        known = sum(each.is_known() for each in self.in_debt)
        strangers = len(self.in_debt) - known + (share not in self.in_debt)
        return min(1.0, known / strangers) if known else 1.0

    @property
    def weights(self) -> float:
        """Of all that are in debt."""
        return sum(each.weight for each in self.in_debt)

    def pay(self) -> float:
        """Bytes that a share which was always in debt would have paid for until now."""
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
    """What one share of the rate has taken."""

    def __init__(self, whole: FairRate, is_known: Callable[[], bool]) -> None:
        self._whole, self.is_known = whole, is_known
        self.weight = 1.0
        """How much it counts as long as it is in debt."""
        self.owed = 0.0
        """It is in debt until a share that is always in debt has paid for this many bytes."""
        self.used_at = whole.now()
        """When it has taken something, or was made."""

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
        """Nothing more will be taken: the others share what is left."""
        self._whole.in_debt.pop(self, None)
