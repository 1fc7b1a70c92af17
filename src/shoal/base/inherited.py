"""Import paths that existing programs use, for names that live elsewhere: one table instead of a file for each path.

A package with such paths calls :func:`offer_modules`, which makes them importable. Their names load at first use.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAMES_BY_HOME: dict[str, dict[str, str]] = {
    "shoal.averaging.group_info": {"shoal.averaging.control": "GroupInfo"},
    "shoal.averaging.key_manager": {"shoal.averaging.groups.keys": "GroupKeyManager"},
    "shoal.averaging.load_balancing": {"shoal.averaging.round.parts": "load_balance_peers"},
    "shoal.averaging.matchmaking": {"shoal.errors": "MatchmakingException"},
    "shoal.averaging.partition": {
        "shoal.averaging.round.parts": "DEFAULT_PART_SIZE_BYTES",
        "shoal.errors": "AllreduceException BannedException",
    },
    "shoal.moe.client": {
        "shoal.moe.expert": "RemoteExpert",
        "shoal.moe.mixture": "RemoteMixtureOfExperts",
        "shoal.moe.switch": "RemoteSwitchMixtureOfExperts",
    },
    "shoal.moe.client.beam_search": {"shoal.moe.beam_search": "MoEBeamSearcher"},
    "shoal.moe.client.expert": {
        "shoal.moe.expert": (
            "DUMMY RemoteExpert batch_create_remote_experts create_remote_experts expert_backward expert_forward "
            "get_server_stub"
        ),
    },
    "shoal.moe.client.moe": {"shoal.moe.mixture": "RemoteMixtureOfExperts _RemoteCallMany"},
    "shoal.moe.client.remote_expert_worker": {"shoal.moe.expert": "RemoteExpertWorker"},
    "shoal.moe.client.switch_moe": {"shoal.moe.switch": "RemoteSwitchMixtureOfExperts"},
    "shoal.moe.expert_uid": {
        "shoal.moe.uids": (
            "Coordinate ExpertInfo ExpertPrefix ExpertUID FLAT_EXPERT Score UID_DELIMITER is_valid_prefix "
            "is_valid_uid split_uid"
        ),
    },
    "shoal.moe.server": {
        "shoal.moe.backend": "ModuleBackend",
        "shoal.moe.background": "background_server",
        "shoal.moe.declare": "declare_experts get_experts",
        "shoal.moe.expert_server": "Server",
        "shoal.moe.layers": "register_expert_class",
    },
    "shoal.moe.server.checkpoints": {
        "shoal.moe.checkpoints": "CheckpointSaver is_directory load_experts store_experts",
    },
    "shoal.moe.server.connection_handler": {"shoal.moe.handler": "ConnectionHandler"},
    "shoal.moe.server.dht_handler": {
        "shoal.moe.declare": "declare_experts get_experts",
        "shoal.moe.dht_handler": "DHTHandlerThread",
    },
    "shoal.moe.server.layers": {
        "shoal.moe.layers": (
            "add_custom_models_from_file name_to_block name_to_input register_expert_class schedule_name_to_scheduler"
        ),
    },
    "shoal.moe.server.layers.lr_schedule": {"shoal.moe.layers": "get_linear_schedule_with_warmup"},
    "shoal.moe.server.layers.optim": {"shoal.moe.layers": "ClippingWrapper OptimizerWrapper"},
    "shoal.moe.server.module_backend": {"shoal.moe.backend": "ModuleBackend"},
    "shoal.moe.server.runtime": {"shoal.serving.runtime": "Runtime StatsReporter"},
    "shoal.moe.server.server": {
        "shoal.moe.background": "background_server",
        "shoal.moe.expert_server": "Server _generate_uids",
    },
    "shoal.moe.server.task_pool": {"shoal.serving.task_pool": "Task TaskPool TaskPoolBase"},
    "shoal.p2p.p2p_daemon": {
        "shoal.base.extras": "DEFAULT_MAX_MSG_SIZE",
        "shoal.p2p.p2p": "P2P",
        "shoal.net.service": "P2PContext",
    },
    "shoal.p2p.p2p_daemon_bindings": {},
    "shoal.p2p.p2p_daemon_bindings.control": {
        "shoal.errors": "P2PDaemonError P2PHandlerError",
        "shoal.base.extras": "DEFAULT_MAX_MSG_SIZE MAX_UNARY_PAYLOAD_SIZE",
    },
    "shoal.p2p.p2p_daemon_bindings.datastructures": {"shoal.peers.identity": "PeerID PeerInfo"},
    "shoal.p2p.servicer": {"shoal.net.service": "ServicerBase StubBase"},
    "shoal.proto": {},
    "shoal.proto.auth_pb2": {"shoal.dht.authorization": "AccessToken"},
    "shoal.proto.runtime_pb2": {"shoal.compression.base": "CompressionType"},
    "shoal.utils.asyncio": {
        "shoal.base.extras": (
            "achain aenumerate aiter_with_timeout amap_in_executor anext as_aiter asingle attach_event_on_finished "
            "azip iter_as_aiter"
        ),
        "shoal.base.reactor": "switch_to_uvloop",
        "shoal.base.tasks": "await_cancelled cancel_and_wait enter_asynchronously",
    },
    "shoal.utils.auth": {
        "shoal.dht.authorization": (
            "AccessToken AuthRPCWrapper AuthRole AuthorizedRequest AuthorizedResponse AuthorizerBase "
            "TokenAuthorizerBase"
        ),
    },
    "shoal.utils.crypto": {
        "shoal.dht.crypto": "Ed25519PrivateKey Ed25519PublicKey PrivateKey PublicKey RSAPrivateKey RSAPublicKey",
    },
    "shoal.utils.limits": {"shoal.net.limits": "increase_file_limit"},
    "shoal.utils.logging": {
        "shoal.base.logs": "HandlerMode TextStyle always_log_caller get_logger use_hivemind_log_handler",
    },
    "shoal.utils.math": {"shoal.optim.low_rank": "get_flatten_greedy_dims orthogonalize_"},
    "shoal.utils.mpfuture": {
        "concurrent.futures": "CancelledError InvalidStateError TimeoutError",
        "shoal.base.reactor": "ALL_STATES MPFuture",
    },
    "shoal.utils.multiaddr": {"shoal.peers.multiaddr": "Multiaddr ProtocolLookupError"},
    "shoal.utils.nested": {"shoal.base.extras": "nested_compare nested_flatten nested_map nested_pack"},
    "shoal.utils.networking": {"shoal.net.own_addresses": "LOCALHOST choose_ip_address log_visible_maddrs"},
    "shoal.utils.performance_ema": {"shoal.optim.progress.records": "PerformanceEMA"},
    "shoal.utils.serializer": {"shoal.base.serializer": "MSGPackSerializer SerializerBase"},
    "shoal.utils.streaming": {"shoal.compression.serialization": "combine_from_streaming split_for_streaming"},
    "shoal.utils.tensor_descr": {
        "shoal.compression.serialization": "DUMMY_BATCH_SIZE BatchTensorDescriptor",
        "shoal.compression.base": "TensorDescriptor",
    },
    "shoal.utils.timed_storage": {
        "shoal.base.clock": "DHTExpiration MAX_DHT_TIME_DISCREPANCY_SECONDS get_dht_time",
        "shoal.dht.storage": "HeapEntry TimedStorage ValueWithExpiration",
    },
}


class InheritedModule(ModuleType):
    """A module whose names live in other modules.

    Args:
        name: its import path.
        names_by_home: its names, separated by spaces, by the path of the module where they live.
    """

    def __init__(self, name: str, names_by_home: dict[str, str]) -> None:
        super().__init__(name, "Names that live elsewhere, under the import path that users know.")
        self.__spec__ = ModuleSpec(name, None)
        self._homes = {each: home for home, names in names_by_home.items() for each in names.split()}
        self.__all__ = sorted(self._homes)

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(self._homes[name]), name)
        setattr(self, name, value)  # later look-ups bypass this method
        return value

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self.__all__])


def offer_modules(package: str) -> None:
    """Make the table's modules inside a package importable; call it while the package is being imported.

    Args:
        package: its import path, which may itself be in the table.
    """
    for path, names_by_home in _NAMES_BY_HOME.items():
        if path == package or path.startswith(f"{package}."):
            above, _, name = path.rpartition(".")
            module = sys.modules[path] = InheritedModule(path, names_by_home)
            setattr(sys.modules[above], name, module)
