"""Data for a swarm: a pass that all peers make together, or different samples on each peer.

A data set is cut into chunks, and these are counted in blocks. In reading order: :mod:`~.chunks` has the records that
peers write into the DHT, and what a peer knows of all chunks: which are done, and which peer holds which of the others.
:mod:`~.leases` claims chunks and renews what it holds, in the background loop. :mod:`~.shared_pass` gives the training
loop batches of these chunks, and notes when they are done. :mod:`~.kept` reads and writes what is done, for archives.
:mod:`~.shuffled` has orders of samples, and the simple way without a pass.
"""

import shoal.base.needs_torch  # noqa: F401
from shoal.data.shared_pass import SharedPass
from shoal.data.shuffled import Shuffled, shuffled

__all__ = ["SharedPass", "Shuffled", "shuffled"]
