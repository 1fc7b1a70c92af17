"""Low-rank arithmetic, under the import path that users know."""

from shoal.optim.low_rank import get_flatten_greedy_dims, orthogonalize_

__all__ = ["get_flatten_greedy_dims", "orthogonalize_"]
