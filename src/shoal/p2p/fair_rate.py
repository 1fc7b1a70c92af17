"""A rate that is shared equally by whatever moves at the moment.

Each share that is in debt, because it has taken bytes and not yet paid for them with time, pays off its debt at the
rate divided by the number of shares in debt. A share that takes little is in debt seldom, and so leaves the rest to the
others. Debts are paid when somebody takes more; there are no timers.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.p2p.transport import Throttle

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
        self.in_debt: dict[Share, None] = {}
        self._paid = 0.0
        self._paid_at = now()

    def share(self) -> Share:
        """A share for somebody new."""
        return Share(self)

    def pay(self) -> float:
        """Bytes that a share which was always in debt would have paid for until now."""
        assert self.rate is not None
        now = self.now()
        seconds, self._paid_at = now - self._paid_at, now
        while self.in_debt:
            debtor = min(self.in_debt, key=lambda share: share.owed)
            needed = (debtor.owed - self._paid) * len(self.in_debt) / self.rate
            if needed > seconds:
                break
            self._paid, seconds = max(self._paid, debtor.owed), seconds - max(0.0, needed)
            del self.in_debt[debtor]
        self._paid += seconds * self.rate / max(1, len(self.in_debt))
        return self._paid


class Share(Throttle):
    """What one of those who share a rate has taken."""

    def __init__(self, whole: FairRate) -> None:
        self._whole = whole
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
        late = LATENESS * whole.rate / max(1, len(whole.in_debt))
        self.owed = max(self.owed, paid - late) + nbytes
        if self.owed <= paid:
            return 0.0
        whole.in_debt[self] = None
        return (self.owed - paid) * len(whole.in_debt) / whole.rate

    def close(self) -> None:
        """Nothing more will be taken: the others share what is left."""
        self._whole.in_debt.pop(self, None)
