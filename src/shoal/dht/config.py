"""The settings of a node of the DHT."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.logs import setting

# Default number of requests in flight of one search; the environment may set it.
DEFAULT_NUM_WORKERS = int(setting("DHT_NUM_WORKERS", "4"))


@dataclass(frozen=True)
class NodeConfig:
    """The settings of a node. There are many, because the parameters of :meth:`DHTNode.create` are inherited."""

    bucket_size: int = 20
    """Most nodes in a bucket of the routing table, most neighbors in an answer, and nodes asked before giving up."""
    num_replicas: int = 5
    """How many nodes should hold a record."""
    depth_modulo: int = 5
    """Buckets far from the own id stop splitting at depths divisible by this."""
    parallel_rpc: int | None = None
    """Most calls in flight of the whole node; ``None`` = no limit."""
    wait_timeout: float = 3.0
    """Seconds after which a call counts as unanswered. After a quarter of this time, a search continues without a
    silent node, unless most of the nodes that should hold the record are as slow."""
    refresh_timeout: float | None = None
    """Buckets without news for this many seconds are refreshed by a search; ``None`` = never."""
    bootstrap_timeout: float | None = None
    """Seconds for the whole join; ``None`` = ``wait_timeout``."""
    cache_locally: bool = True
    """Keep a copy of each record that a get finds."""
    cache_nearest: int = 1
    """Give a copy of each record found to this many of the nearest nodes that did not have it."""
    cache_size: int | None = None
    """Most records in the cache; ``None`` = no limit."""
    cache_refresh_before_expiry: float = 5.0
    """Fetch cached records that are in use again this many seconds before they expire; 0 = never."""
    cache_on_store: bool = True
    """Keep a copy of each record that this node stores."""
    reuse_get_requests: bool = True
    """Searches for the same key at the same time share the first result."""
    num_workers: int = DEFAULT_NUM_WORKERS
    """Requests in flight of one search, until it has reached the nearest nodes."""
    chunk_size: int = 16
    """Most keys in one find request of a get, and in one refresh of the cache."""
    blacklist_time: float = 5.0
    """Seconds for which searches skip a peer that did not answer; 0 = never skip."""
    backoff_rate: float = 2.0
    """Each further failure in a row multiplies that time by this factor."""
    ensure_bootstrap_success: bool = True
    """Fail if no initial peer answers, and let one that answers check that this node can be reached."""
    strict: bool = True
    """Fail if the peers do not agree about the time, or if this node cannot be reached although ``force_reachability``
    says that it is public; otherwise only warn."""

    def __post_init__(self) -> None:
        for name in ("bucket_size", "num_replicas", "depth_modulo", "num_workers", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
