"""Small public names under their inherited import path. They live in other modules, and load at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.base.inherited import offer_modules

if TYPE_CHECKING:
    from shoal.base.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, DHTExpiration, get_dht_time
    from shoal.base.extras import (
        amap_in_executor,
        as_aiter,
        nested_compare,
        nested_flatten,
        nested_map,
        nested_pack,
    )
    from shoal.base.logs import get_logger, use_hivemind_log_handler
    from shoal.base.reactor import MPFuture, switch_to_uvloop
    from shoal.base.serializer import MSGPackSerializer, SerializerBase
    from shoal.base.tasks import enter_asynchronously
    from shoal.compression import TensorDescriptor
    from shoal.compression.serialization import BatchTensorDescriptor
    from shoal.dht.storage import TimedStorage, ValueWithExpiration
    from shoal.optim.progress.records import PerformanceEMA

__all__ = [
    "MAX_DHT_TIME_DISCREPANCY_SECONDS",
    "BatchTensorDescriptor",
    "DHTExpiration",
    "MPFuture",
    "MSGPackSerializer",
    "PerformanceEMA",
    "SerializerBase",
    "TensorDescriptor",
    "TimedStorage",
    "ValueWithExpiration",
    "amap_in_executor",
    "as_aiter",
    "enter_asynchronously",
    "get_dht_time",
    "get_logger",
    "nested_compare",
    "nested_flatten",
    "nested_map",
    "nested_pack",
    "switch_to_uvloop",
    "use_hivemind_log_handler",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal.utils' has no attribute {name!r}")
    import shoal

    value = globals()[name] = getattr(shoal, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


offer_modules("shoal.utils")
