"""Data for a swarm: a pass that all peers make together, or other samples on each peer."""

import shoal.base.needs_torch  # noqa: F401
from shoal.data.shared_pass import SharedPass
from shoal.data.shuffled import Shuffled, shuffled

__all__ = ["SharedPass", "Shuffled", "shuffled"]
