"""A model that no single peer holds: each has some of its layers, and microbatches travel from peer to peer."""

import shoal.base.needs_torch  # noqa: F401
from shoal.stages.boundary import LowRankBoundary

__all__ = ["LowRankBoundary"]
