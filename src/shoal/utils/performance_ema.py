"""How fast a peer works, under the import path that users know."""

from shoal.optim.performance_ema import PerformanceEMA

__all__ = ["PerformanceEMA"]
