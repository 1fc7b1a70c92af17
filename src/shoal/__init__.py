"""Train PyTorch models together over the internet, without a server that everybody depends on.

The names below are loaded when they are first used, so that ``import shoal`` itself costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "shoal.averaging": ("DecentralizedAverager",),
    "shoal.clock": (
        "MAX_DHT_TIME_DISCREPANCY_SECONDS",
        "DHTExpiration",
        "get_dht_time",
    ),
    "shoal.compression": (
        "CompressionBase",
        "CompressionInfo",
        "CompressionType",
        "Float16Compression",
        "NoCompression",
        "PerTensorCompression",
        "RoleAdaptiveCompression",
        "SizeAdaptiveCompression",
        "TensorDescriptor",
        "TensorRole",
        "deserialize_torch_tensor",
        "serialize_torch_tensor",
    ),
    "shoal.dht": ("DHT",),
    "shoal.dht.storage": (
        "TimedStorage",
        "ValueWithExpiration",
    ),
    "shoal.optim": ("Optimizer",),
    "shoal.optim.performance_ema": ("PerformanceEMA",),
    "shoal.p2p": (
        "P2P",
        "P2PContext",
        "P2PHandlerError",
        "PeerID",
        "PeerInfo",
    ),
    "shoal.serializer": (
        "MSGPackSerializer",
        "SerializerBase",
    ),
}
"""Where each name lives."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_ROOMS = ("averaging", "compression", "dht", "optim", "p2p", "utils")

if TYPE_CHECKING:  # the same names once more, for editors and type checkers
    from shoal.averaging import DecentralizedAverager
    from shoal.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, DHTExpiration, get_dht_time
    from shoal.compression import (
        CompressionBase,
        CompressionInfo,
        CompressionType,
        Float16Compression,
        NoCompression,
        PerTensorCompression,
        RoleAdaptiveCompression,
        SizeAdaptiveCompression,
        TensorDescriptor,
        TensorRole,
        deserialize_torch_tensor,
        serialize_torch_tensor,
    )
    from shoal.dht import DHT
    from shoal.dht.storage import TimedStorage, ValueWithExpiration
    from shoal.optim import Optimizer
    from shoal.optim.performance_ema import PerformanceEMA
    from shoal.p2p import P2P, P2PContext, P2PHandlerError, PeerID, PeerInfo
    from shoal.serializer import MSGPackSerializer, SerializerBase

__all__ = [
    "DHT",
    "MAX_DHT_TIME_DISCREPANCY_SECONDS",
    "P2P",
    "CompressionBase",
    "CompressionInfo",
    "CompressionType",
    "DHTExpiration",
    "DecentralizedAverager",
    "Float16Compression",
    "MSGPackSerializer",
    "NoCompression",
    "Optimizer",
    "P2PContext",
    "P2PHandlerError",
    "PeerID",
    "PeerInfo",
    "PerTensorCompression",
    "PerformanceEMA",
    "RoleAdaptiveCompression",
    "SerializerBase",
    "SizeAdaptiveCompression",
    "TensorDescriptor",
    "TensorRole",
    "TimedStorage",
    "ValueWithExpiration",
    "deserialize_torch_tensor",
    "get_dht_time",
    "serialize_torch_tensor",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"shoal.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF, *_ROOMS])
