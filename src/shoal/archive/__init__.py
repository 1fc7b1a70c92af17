"""Archives: the state of a run in files, from which it continues when all of its peers are gone.

In reading order: an archiver (:mod:`~.keeping`) is a peer that does not train; from time to time it downloads the state
as a newcomer does. :mod:`~.contents` gives each tensor its name, and :mod:`~.store` writes the tensors to a folder. The
:mod:`~.manifest` is written last, and an archive without one does not count. :mod:`~.reviving` serves an archive to
newcomers, as a donor that does not train. :mod:`~.loading` loads it into a model and an optimizer.
"""

import shoal.base.needs_torch  # noqa: F401
from shoal.archive.loading import load_archive
from shoal.archive.store import Archive, Store

__all__ = ["Archive", "Store", "load_archive"]
