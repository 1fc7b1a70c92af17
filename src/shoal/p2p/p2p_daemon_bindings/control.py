"""What can go wrong between peers, under the import path that users know."""

from shoal.errors import P2PDaemonError, P2PHandlerError

__all__ = ["P2PDaemonError", "P2PHandlerError"]
