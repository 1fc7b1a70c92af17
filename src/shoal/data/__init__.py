"""Data for a swarm: a pass that all peers make together, or different samples on each peer.

A data set is cut into chunks, and chunks are grouped into blocks. In reading order: :mod:`~.chunks` has the records
that peers write into the DHT, and what a peer knows about all chunks: which are done, and which peers hold others.
:mod:`~.leases` claims chunks and renews its leases, in the background loop. :mod:`~.shared_pass` gives the training
loop batches of these chunks, and notes when they are done. :mod:`~.kept` reads and writes a pass for archives.
:mod:`~.shuffled` has orders of samples, and the simple way without a shared pass.
"""

import shoal.base.needs_torch  # noqa: F401
from shoal.data.shared_pass import SharedPass
from shoal.data.shuffled import Shuffled, shuffled

__all__ = ["SharedPass", "Shuffled", "shuffled"]
