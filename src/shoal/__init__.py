"""Train PyTorch models together over the internet, without a server that everybody depends on.

The names below load at first use, so ``import shoal`` itself costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.base import VERSION
from shoal.base.inherited import offer_modules

__version__ = VERSION

# Where each name lives.
_HOMES = {
    "shoal.archive": ("load_archive",),
    "shoal.averaging": ("DecentralizedAverager",),
    "shoal.base.clock": (
        "MAX_DHT_TIME_DISCREPANCY_SECONDS",
        "DHTExpiration",
        "get_dht_time",
    ),
    "shoal.compression": (
        "BFloat16Compression",
        "Blockwise4BitQuantization",
        "BlockwiseQuantization",
        "CompressionBase",
        "CompressionInfo",
        "CompressionType",
        "Float16Compression",
        "NoCompression",
        "PerTensorCompression",
        "Quantile8BitQuantization",
        "RoleAdaptiveCompression",
        "ScaledFloat16Compression",
        "SerializedTensor",
        "SizeAdaptiveCompression",
        "TensorDescriptor",
        "TensorMetadata",
        "TensorRole",
        "TopKCompression",
        "Uniform8BitQuantization",
        "deserialize_tensor_stream",
        "deserialize_torch_tensor",
        "serialize_torch_tensor",
    ),
    "shoal.dht": ("DHT",),
    "shoal.dht.storage": (
        "TimedStorage",
        "ValueWithExpiration",
    ),
    "shoal.base.logs": (
        "get_logger",
        "use_hivemind_log_handler",
    ),
    "shoal.compression.serialization": ("BatchTensorDescriptor",),
    "shoal.base.extras": (
        "amap_in_executor",
        "as_aiter",
        "nested_compare",
        "nested_flatten",
        "nested_map",
        "nested_pack",
    ),
    "shoal.moe": (
        "ModuleBackend",
        "RemoteExpert",
        "RemoteMixtureOfExperts",
        "RemoteSwitchMixtureOfExperts",
        "Server",
        "register_expert_class",
    ),
    "shoal.optim": (
        "DiLoCo",
        "GradScaler",
        "MultiProcessDiLoCo",
        "MultiProcessOptimizer",
        "Optimizer",
        "TrainingAverager",
        "strided_fragments",
    ),
    "shoal.optim.progress.records": ("PerformanceEMA",),
    "shoal.p2p": (
        "P2P",
        "P2PContext",
        "P2PHandlerError",
        "PeerID",
        "PeerInfo",
    ),
    "shoal.base.reactor": (
        "MPFuture",
        "switch_to_uvloop",
    ),
    "shoal.base.serializer": (
        "MSGPackSerializer",
        "SerializerBase",
    ),
    "shoal.base.tasks": ("enter_asynchronously",),
    "shoal.stages.model": ("StagedModel",),
}

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_ROOMS = ("averaging", "compression", "data", "dht", "moe", "optim", "p2p", "utils")

if TYPE_CHECKING:  # the same names once more, for editors and type checkers
    from shoal.archive import load_archive
    from shoal.averaging import DecentralizedAverager
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
    from shoal.compression import (
        BFloat16Compression,
        Blockwise4BitQuantization,
        BlockwiseQuantization,
        CompressionBase,
        CompressionInfo,
        CompressionType,
        Float16Compression,
        NoCompression,
        PerTensorCompression,
        Quantile8BitQuantization,
        RoleAdaptiveCompression,
        ScaledFloat16Compression,
        SerializedTensor,
        SizeAdaptiveCompression,
        TensorDescriptor,
        TensorMetadata,
        TensorRole,
        TopKCompression,
        Uniform8BitQuantization,
        deserialize_tensor_stream,
        deserialize_torch_tensor,
        serialize_torch_tensor,
    )
    from shoal.compression.serialization import BatchTensorDescriptor
    from shoal.dht import DHT
    from shoal.dht.storage import TimedStorage, ValueWithExpiration
    from shoal.moe import (
        ModuleBackend,
        RemoteExpert,
        RemoteMixtureOfExperts,
        RemoteSwitchMixtureOfExperts,
        Server,
        register_expert_class,
    )
    from shoal.optim import (
        DiLoCo,
        GradScaler,
        MultiProcessDiLoCo,
        MultiProcessOptimizer,
        Optimizer,
        TrainingAverager,
        strided_fragments,
    )
    from shoal.optim.progress.records import PerformanceEMA
    from shoal.p2p import P2P, P2PContext, P2PHandlerError, PeerID, PeerInfo
    from shoal.stages.model import StagedModel

__all__ = [
    "DHT",
    "MAX_DHT_TIME_DISCREPANCY_SECONDS",
    "P2P",
    "BFloat16Compression",
    "BatchTensorDescriptor",
    "Blockwise4BitQuantization",
    "BlockwiseQuantization",
    "CompressionBase",
    "CompressionInfo",
    "CompressionType",
    "DHTExpiration",
    "DecentralizedAverager",
    "DiLoCo",
    "Float16Compression",
    "GradScaler",
    "MPFuture",
    "MSGPackSerializer",
    "ModuleBackend",
    "MultiProcessDiLoCo",
    "MultiProcessOptimizer",
    "NoCompression",
    "Optimizer",
    "P2PContext",
    "P2PHandlerError",
    "PeerID",
    "PeerInfo",
    "PerTensorCompression",
    "PerformanceEMA",
    "Quantile8BitQuantization",
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SerializedTensor",
    "SerializerBase",
    "Server",
    "SizeAdaptiveCompression",
    "StagedModel",
    "TensorDescriptor",
    "TensorMetadata",
    "TensorRole",
    "TimedStorage",
    "TopKCompression",
    "TrainingAverager",
    "Uniform8BitQuantization",
    "ValueWithExpiration",
    "amap_in_executor",
    "as_aiter",
    "deserialize_tensor_stream",
    "deserialize_torch_tensor",
    "enter_asynchronously",
    "get_dht_time",
    "get_logger",
    "load_archive",
    "nested_compare",
    "nested_flatten",
    "nested_map",
    "nested_pack",
    "register_expert_class",
    "serialize_torch_tensor",
    "strided_fragments",
    "switch_to_uvloop",
    "use_hivemind_log_handler",
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


offer_modules("shoal.proto")  # shoal itself has no such package
