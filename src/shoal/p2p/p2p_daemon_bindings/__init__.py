"""Names of peers and of errors, under the import paths that users know (no daemon is behind them)."""

from shoal.p2p.p2p_daemon_bindings import control, datastructures

__all__ = ["control", "datastructures"]
