"""The inherited interface, held as tables: import paths, signatures with defaults, members, constants, errors.

``import shoal as hivemind`` must keep working for what is listed. What shoal adds stands in ``test_public_api.py``.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.interface import check_signature, find

pytestmark = pytest.mark.oldest

NAMES = {
    "shoal": """
        RemoteExpert RemoteMixtureOfExperts RemoteSwitchMixtureOfExperts moe ModuleBackend Server register_expert_class
        DHT DecentralizedAverager Optimizer GradScaler TrainingAverager __version__
        averaging compression dht optim p2p utils
        CompressionBase CompressionInfo TensorRole NoCompression Float16Compression ScaledFloat16Compression
        BFloat16Compression Uniform8BitQuantization Quantile8BitQuantization BlockwiseQuantization
        Blockwise4BitQuantization SizeAdaptiveCompression RoleAdaptiveCompression PerTensorCompression
        P2P P2PContext P2PHandlerError PeerID PeerInfo
        get_dht_time DHTExpiration ValueWithExpiration TimedStorage MAX_DHT_TIME_DISCREPANCY_SECONDS PerformanceEMA
        MSGPackSerializer SerializerBase TensorDescriptor BatchTensorDescriptor MPFuture get_logger
        use_hivemind_log_handler nested_flatten nested_pack nested_map nested_compare as_aiter amap_in_executor
        enter_asynchronously switch_to_uvloop
    """,
    "shoal.dht": """
        DHT DHTNode DHTID DHTValue DHTExpiration DHTKey Subkey DEFAULT_NUM_WORKERS CompositeValidator
        RecordValidatorBase
    """,
    "shoal.dht.dht": "DHT",
    "shoal.dht.node": "Blacklist DHTNode",
    "shoal.dht.routing": "DHTID DHTKey RoutingTable",
    "shoal.dht.storage": """
        DHTID DHTLocalStorage DictionaryDHTValue TimedStorage HeapEntry ValueWithExpiration DHTValue Subkey
    """,
    "shoal.dht.protocol": "DHTProtocol ValidationError",
    "shoal.dht.validation": "DHTRecord RecordValidatorBase CompositeValidator",
    "shoal.dht.crypto": "SignatureValidator Ed25519SignatureValidator RSASignatureValidator",
    "shoal.dht.schema": "SchemaValidator BytesWithPublicKey conbytes",
    "shoal.dht.traverse": "",
    "shoal.averaging": "DecentralizedAverager",
    "shoal.averaging.averager": "DecentralizedAverager",
    "shoal.averaging.round": "AllreduceException AveragingMode BannedException",
    "shoal.averaging.control": "AveragingStage StepControl",
    "shoal.averaging.group_info": "GroupInfo",
    "shoal.averaging.key_manager": "GroupKeyManager",
    "shoal.averaging.load_balancing": "load_balance_peers",
    "shoal.averaging.matchmaking": "MatchmakingException",
    "shoal.averaging.partition": "AllreduceException BannedException DEFAULT_PART_SIZE_BYTES",
    "shoal.compression": """
        CompressionBase CompressionInfo TensorRole NoCompression Float16Compression ScaledFloat16Compression
        BFloat16Compression Uniform8BitQuantization Quantile8BitQuantization BlockwiseQuantization
        Blockwise4BitQuantization SizeAdaptiveCompression RoleAdaptiveCompression PerTensorCompression
        serialize_torch_tensor deserialize_torch_tensor deserialize_tensor_stream
    """,
    "shoal.compression.adaptive": "AdaptiveCompressionBase",
    "shoal.compression.quantization": "Uniform8BitQuantization Quantile8BitQuantization BlockwiseQuantization",
    "shoal.compression.serialization": "serialize_torch_tensor deserialize_torch_tensor deserialize_tensor_stream",
    "shoal.moe": "RemoteExpert RemoteMixtureOfExperts RemoteSwitchMixtureOfExperts declare_experts get_experts",
    "shoal.moe.client": "RemoteExpert RemoteMixtureOfExperts RemoteSwitchMixtureOfExperts",
    "shoal.moe.client.beam_search": "MoEBeamSearcher",
    "shoal.moe.client.expert": """
        DUMMY RemoteExpert batch_create_remote_experts create_remote_experts expert_backward expert_forward
        get_server_stub
    """,
    "shoal.moe.client.moe": "RemoteMixtureOfExperts",
    "shoal.moe.client.remote_expert_worker": "RemoteExpertWorker",
    "shoal.moe.client.switch_moe": "RemoteSwitchMixtureOfExperts",
    "shoal.moe.expert_uid": """
        Coordinate ExpertInfo ExpertPrefix ExpertUID FLAT_EXPERT Score UID_DELIMITER is_valid_prefix is_valid_uid
        split_uid
    """,
    "shoal.moe.server": """
        ModuleBackend Server background_server declare_experts get_experts register_expert_class
    """,
    "shoal.moe.server.checkpoints": "CheckpointSaver store_experts load_experts is_directory",
    "shoal.moe.server.connection_handler": "ConnectionHandler",
    "shoal.moe.server.dht_handler": "DHTHandlerThread declare_experts get_experts",
    "shoal.moe.server.layers": """
        name_to_block name_to_input schedule_name_to_scheduler register_expert_class add_custom_models_from_file
    """,
    "shoal.moe.server.layers.lr_schedule": "get_linear_schedule_with_warmup",
    "shoal.moe.server.layers.optim": "OptimizerWrapper ClippingWrapper",
    "shoal.moe.server.module_backend": "ModuleBackend",
    "shoal.moe.server.runtime": "Runtime StatsReporter",
    "shoal.moe.server.server": "Server background_server _generate_uids",
    "shoal.moe.server.task_pool": "TaskPool TaskPoolBase Task",
    "shoal.optim": "Optimizer GradScaler TrainingAverager",
    "shoal.optim.grad_scaler": "GradScaler",
    "shoal.optim.training_averager": "TrainingAverager",
    "shoal.optim.power_sgd_averager": "PowerSGDGradientAverager",
    "shoal.optim.power_ef_averager": "PowerEFGradientAverager",
    "shoal.optim.optimizer": "Optimizer",
    "shoal.optim.grad_averager": "GradientAverager GradientAveragerFactory",
    "shoal.optim.state_averager": "TrainingStateAverager ZERO_GRAD_SET_TO_NONE_DEFAULT LRSchedulerBase",
    "shoal.optim.progress_tracker": (
        "ProgressTracker LocalTrainingProgress GlobalTrainingProgress TrainingProgressSchema"
    ),
    "shoal.p2p": "P2P P2PContext PeerID PeerInfo P2PDaemonError P2PHandlerError ServicerBase StubBase",
    "shoal.p2p.p2p_daemon": "DEFAULT_MAX_MSG_SIZE P2P P2PContext",
    "shoal.p2p.p2p_daemon_bindings.control": """
        DEFAULT_MAX_MSG_SIZE MAX_UNARY_PAYLOAD_SIZE P2PDaemonError P2PHandlerError
    """,
    "shoal.p2p.p2p_daemon_bindings.datastructures": "PeerID PeerInfo",
    "shoal.p2p.servicer": "ServicerBase StubBase",
    "shoal.proto.auth_pb2": "AccessToken",
    "shoal.proto.runtime_pb2": "CompressionType",
    "shoal.utils": """
        get_dht_time DHTExpiration MAX_DHT_TIME_DISCREPANCY_SECONDS ValueWithExpiration TimedStorage PerformanceEMA
        MSGPackSerializer SerializerBase TensorDescriptor BatchTensorDescriptor MPFuture get_logger
        use_hivemind_log_handler nested_flatten nested_pack nested_map nested_compare as_aiter amap_in_executor
        enter_asynchronously switch_to_uvloop
    """,
    "shoal.utils.asyncio": """
        anext iter_as_aiter as_aiter azip achain aenumerate asingle await_cancelled cancel_and_wait amap_in_executor
        aiter_with_timeout attach_event_on_finished enter_asynchronously switch_to_uvloop
    """,
    "shoal.utils.auth": "AuthorizerBase TokenAuthorizerBase AuthRole AuthRPCWrapper AccessToken",
    "shoal.utils.crypto": """
        PrivateKey PublicKey Ed25519PrivateKey Ed25519PublicKey RSAPrivateKey RSAPublicKey
    """,
    "shoal.utils.limits": "increase_file_limit",
    "shoal.utils.logging": """
        always_log_caller get_logger use_hivemind_log_handler HandlerMode TextStyle
    """,
    "shoal.utils.math": "orthogonalize_ get_flatten_greedy_dims",
    "shoal.utils.mpfuture": "ALL_STATES MPFuture InvalidStateError CancelledError TimeoutError",
    "shoal.utils.multiaddr": "Multiaddr ProtocolLookupError",
    "shoal.utils.nested": "nested_flatten nested_pack nested_map nested_compare",
    "shoal.utils.networking": "choose_ip_address log_visible_maddrs LOCALHOST",
    "shoal.utils.performance_ema": "PerformanceEMA",
    "shoal.utils.serializer": "MSGPackSerializer SerializerBase",
    "shoal.utils.streaming": "split_for_streaming combine_from_streaming",
    "shoal.utils.tensor_descr": "DUMMY_BATCH_SIZE TensorDescriptor BatchTensorDescriptor",
    "shoal.utils.timed_storage": """
        TimedStorage ValueWithExpiration HeapEntry DHTExpiration get_dht_time MAX_DHT_TIME_DISCREPANCY_SECONDS
    """,
}
"""Not here because it is out of scope: protobuf messages, futures across processes."""

SIGNATURES = {
    # --- the table
    "shoal.DHT": """
        initial_peers=None, *, start, p2p=None, daemon=True, num_workers=4, record_validators=(), shutdown_timeout=3,
        await_ready=True, **kwargs
    """,
    "shoal.DHT.run_in_background": "self, await_ready=True, timeout=None",
    "shoal.DHT.wait_until_ready": "self, timeout=None",
    "shoal.DHT.get": "self, key, latest=False, return_future=False, **kwargs",
    "shoal.DHT.store": "self, key, value, expiration_time, subkey=None, return_future=False, **kwargs",
    "shoal.DHT.run_coroutine": "self, coro, return_future=False",
    "shoal.DHT.add_validators": "self, record_validators",
    "shoal.DHT.get_visible_maddrs": "self, latest=False",
    "shoal.DHT.replicate_p2p": "self",
    "shoal.DHT.is_alive": "self",
    "shoal.DHT.shutdown": "self",
    "shoal.DHT.terminate": "self",
    "shoal.DHT.join": "self, timeout=None",
    "shoal.dht.DHTNode.create": """
        *, p2p=None, node_id=None, initial_peers=None, bucket_size=20, num_replicas=5, depth_modulo=5,
        parallel_rpc=None, wait_timeout=3, refresh_timeout=None, bootstrap_timeout=None, cache_locally=True,
        cache_nearest=1, cache_size=None, cache_refresh_before_expiry=5, cache_on_store=True, reuse_get_requests=True,
        num_workers=4, chunk_size=16, blacklist_time=5.0, backoff_rate=2.0, client_mode=False, record_validator=None,
        authorizer=None, ensure_bootstrap_success=True, strict=True, **kwargs
    """,
    "shoal.dht.DHTNode.get": "self, key, latest=False, **kwargs",
    "shoal.dht.DHTNode.get_many": "self, keys, sufficient_expiration_time=None, **kwargs",
    "shoal.dht.DHTNode.get_many_by_id": """
        self, key_ids, sufficient_expiration_time=None, num_workers=None, beam_size=None, return_futures=False
    """,
    "shoal.dht.DHTNode.store": "self, key, value, expiration_time, subkey=None, **kwargs",
    "shoal.dht.DHTNode.store_many": """
        self, keys, values, expiration_time, subkeys=None, exclude_self=False, await_all_replicas=True, **kwargs
    """,
    "shoal.dht.DHTNode.find_nearest_nodes": """
        self, queries, k_nearest=None, beam_size=None, num_workers=None, node_to_peer_id=None, exclude_self=False
    """,
    "shoal.dht.DHTNode.get_visible_maddrs": "self, latest=False",
    "shoal.dht.DHTNode.shutdown": "self",
    "shoal.dht.DHTID.generate": "source=None, nbits=255",
    "shoal.dht.DHTID.xor_distance": "self, other",
    "shoal.dht.DHTID.longest_common_prefix_length": "*ids",
    "shoal.dht.DHTID.to_bytes": "self",
    "shoal.dht.DHTID.from_bytes": "raw",
    "shoal.utils.ValueWithExpiration": "value, expiration_time",
    "shoal.dht.storage.HeapEntry": "expiration_time, key",
    "shoal.utils.TimedStorage": "maxsize=None",
    "shoal.utils.TimedStorage.store": "self, key, value, expiration_time",
    "shoal.utils.TimedStorage.get": "self, key",
    "shoal.utils.TimedStorage.items": "self",
    "shoal.utils.TimedStorage.top": "self",
    "shoal.utils.TimedStorage.clear": "self",
    "shoal.utils.TimedStorage.freeze": "self",
    "shoal.dht.storage.DictionaryDHTValue": "maxsize=None",
    "shoal.dht.storage.DHTLocalStorage": "maxsize=None",
    "shoal.dht.storage.DHTLocalStorage.store": "self, key, value, expiration_time, subkey=None",
    "shoal.dht.storage.DHTLocalStorage.store_subkey": "self, key, subkey, value, expiration_time",
    "shoal.dht.DHTRecord": "key, subkey, value, expiration_time",
    "shoal.dht.RecordValidatorBase.validate": "self, record",
    "shoal.dht.RecordValidatorBase.sign_value": "self, record",
    "shoal.dht.RecordValidatorBase.strip_value": "self, record",
    "shoal.dht.RecordValidatorBase.merge_with": "self, other",
    "shoal.dht.CompositeValidator": "validators=()",
    "shoal.dht.CompositeValidator.extend": "self, validators",
    "shoal.dht.crypto.RSASignatureValidator": "private_key=None",
    "shoal.dht.schema.SchemaValidator": "schema, allow_extra_keys=True, prefix=None",
    "shoal.dht.schema.conbytes": "*, regex=None, **kwargs",
    # --- servers of experts
    "shoal.ModuleBackend": """
        name, module, *, optimizer=None, scheduler=None, args_schema=None, kwargs_schema=None, outputs_schema=None,
        **kwargs
    """,
    "shoal.ModuleBackend.forward": "self, *inputs",
    "shoal.ModuleBackend.backward": "self, *inputs",
    "shoal.ModuleBackend.on_backward": "self, batch_size",
    "shoal.ModuleBackend.state_dict": "self",
    "shoal.ModuleBackend.load_state_dict": "self, state_dict",
    "shoal.ModuleBackend.get_info": "self",
    "shoal.ModuleBackend.get_pools": "self",
    "shoal.Server": """
        dht, module_backends, num_connection_handlers=1, update_period=30, expiration=None, start=False,
        checkpoint_dir=None, **kwargs
    """,
    "shoal.Server.create": """
        num_experts=None, expert_uids=None, expert_pattern=None, expert_cls="ffn", hidden_dim=1024,
        optim_cls=torch.optim.Adam, scheduler="none", num_warmup_steps=None, num_training_steps=None,
        clip_grad_norm=None, num_handlers=None, min_batch_size=1, max_batch_size=4096, device=None, initial_peers=(),
        checkpoint_dir=None, compression=shoal.CompressionType.NONE, stats_report_interval=None,
        custom_module_path=None, update_period=30, expiration=None, *, start, **kwargs
    """,
    "shoal.Server.run_in_background": "self, await_ready=True, timeout=None",
    "shoal.Server.shutdown": "self",
    "shoal.Server.join": "self, timeout=None",
    "shoal.moe.background_server": "*args, shutdown_timeout=5, **kwargs",
    "shoal.register_expert_class": "name, sample_input",
    "shoal.moe.server.server._generate_uids": "num_experts, expert_pattern, dht, attempts_per_expert=10",
    "shoal.moe.server.connection_handler.ConnectionHandler": """
        dht, module_backends, *, balanced=True, shutdown_timeout=3, start=False
    """,
    "shoal.moe.server.dht_handler.DHTHandlerThread": "module_backends, dht, update_period=30, expiration=None",
    "shoal.moe.server.runtime.Runtime": """
        module_backends, prefetch_batches=64, sender_threads=1, device=None, stats_report_interval=None
    """,
    "shoal.moe.server.runtime.Runtime.process_batch": "self, pool, batch_index, *batch",
    "shoal.moe.server.task_pool.TaskPool": """
        process_func, max_batch_size, name, min_batch_size=1, timeout=None, pool_size=None, prefetch_batches=1,
        daemon=True, start=False
    """,
    "shoal.moe.server.task_pool.TaskPool.submit_task": "self, *args",
    "shoal.moe.server.checkpoints.CheckpointSaver": "module_backends, checkpoint_dir, update_period",
    "shoal.moe.server.checkpoints.store_experts": "experts, checkpoint_dir",
    "shoal.moe.server.checkpoints.load_experts": "experts, checkpoint_dir",
    "shoal.moe.server.layers.add_custom_models_from_file": "path",
    "shoal.moe.server.layers.optim.ClippingWrapper": "optim, clip_grad_norm",
    "shoal.moe.server.layers.optim.OptimizerWrapper": "optim",
    "shoal.moe.server.layers.lr_schedule.get_linear_schedule_with_warmup": """
        optimizer, num_warmup_steps, num_training_steps
    """,
    # --- peers
    "shoal.P2P.create": """
        initial_peers=None, *, announce_maddrs=None, host_maddrs=None, identity_path=None, idle_timeout=30,
        startup_timeout=15, check_if_identity_free=True, no_listen=False, **of_a_daemon
    """,
    # bindings of a daemon, so out of scope: replicate, *_protobuf_handler, *_binary_stream_handler, *_raw_data
    "shoal.P2P.generate_identity": "identity_path",
    "shoal.P2P.is_identity_taken": "identity_path, *, initial_peers, **of_a_daemon",
    "shoal.P2P.get_visible_maddrs": "self, latest=False",
    "shoal.P2P.list_peers": "self",
    "shoal.P2P.wait_for_at_least_n_peers": "self, n_peers, attempts=3, delay=1",
    "shoal.P2P.shutdown": "self",
    "shoal.PeerID": "peer_id_bytes",
    "shoal.PeerID.from_base58": "text",
    "shoal.PeerID.from_identity": "data",
    "shoal.PeerInfo": "peer_id, addrs",
    "shoal.P2PContext": "handle_name, local_id, remote_id",
    "shoal.utils.multiaddr.Multiaddr": "address",
    "shoal.utils.multiaddr.Multiaddr.encapsulate": "self, other",
    "shoal.utils.multiaddr.Multiaddr.decapsulate": "self, other",
    "shoal.utils.multiaddr.Multiaddr.split": "self, maxsplit=-1",
    "shoal.utils.multiaddr.Multiaddr.join": "*addresses",
    "shoal.p2p.ServicerBase.add_p2p_handlers": "self, p2p, wrapper=None, *, namespace=None, balanced=False",
    "shoal.p2p.ServicerBase.remove_p2p_handlers": "self, p2p, *, namespace=None",
    "shoal.p2p.ServicerBase.get_stub": "p2p, peer, *, namespace=None",
    # --- averaging
    "shoal.DecentralizedAverager": """
        averaged_tensors, dht, *, start, prefix, target_group_size=None, min_group_size=2, initial_group_bits="",
        min_matchmaking_time=5.0, request_timeout=3.0, averaging_alpha=1.0, part_size_bytes=524288,
        allreduce_timeout=None, next_chunk_timeout=None, sender_timeout=None, reducer_timeout=None,
        compression=NoCompression(), state_compression=NoCompression(), tensor_infos=None, bandwidth=None,
        min_vector_size=0, auxiliary=False, allow_state_sharing=None, declare_state_period=30, client_mode=None,
        daemon=True, shutdown_timeout=5
    """,
    "shoal.DecentralizedAverager.step": """
        self, gather=None, scheduled_time=None, weight=None, timeout=None, allow_retries=True, require_trigger=False,
        wait=True
    """,
    "shoal.DecentralizedAverager.run_in_background": "self, await_ready=True, timeout=None",
    "shoal.DecentralizedAverager.wait_until_ready": "self, timeout=None",
    "shoal.DecentralizedAverager.load_state_from_peers": "self, wait=True, timeout=None",
    "shoal.DecentralizedAverager.get_current_state": "self",
    "shoal.DecentralizedAverager.get_tensors": "self",
    "shoal.DecentralizedAverager.get_group_bits": "self, wait=True",
    "shoal.DecentralizedAverager.set_group_bits": "self, group_bits, wait=True",
    "shoal.DecentralizedAverager.is_alive": "self",
    "shoal.DecentralizedAverager.shutdown": "self",
    "shoal.averaging.control.StepControl.allow_allreduce": "self",
    "shoal.averaging.control.StepControl.get_timeout": "self",
    "shoal.averaging.control.StepControl.result": "self, timeout=None",
    "shoal.averaging.control.StepControl.exception": "self, timeout=None",
    "shoal.averaging.control.StepControl.cancel": "self",
    "shoal.averaging.load_balancing.load_balance_peers": "vector_size, bandwidths, min_size=0",
    "shoal.averaging.key_manager.GroupKeyManager": "dht, prefix, initial_group_bits, target_group_size",
    "shoal.averaging.key_manager.GroupKeyManager.declare_averager": """
        self, group_key, peer_id, expiration_time, looking_for_group=True
    """,
    "shoal.averaging.key_manager.GroupKeyManager.get_averagers": "self, group_key, only_active",
    # --- compression
    "shoal.CompressionInfo": "key, descriptor, role=shoal.TensorRole.UNSPECIFIED, part_index=0, part_size=None",
    "shoal.CompressionInfo.from_tensor": "tensor, key=None, descriptor=None, **kwargs",
    "shoal.CompressionInfo.get_part": "self, part_index, part_size",
    "shoal.CompressionBase.compress": "self, tensor, info, allow_inplace=False",
    "shoal.CompressionBase.extract": "self, serialized_tensor",
    "shoal.CompressionBase.estimate_compression_ratio": "self, info",
    "shoal.CompressionBase.compress_and_decode": "self, tensor, info, allow_inplace=False",
    "shoal.ScaledFloat16Compression": "",
    "shoal.Float16Compression": "",
    "shoal.BFloat16Compression": "",
    "shoal.Uniform8BitQuantization": "",
    "shoal.Quantile8BitQuantization": "",
    "shoal.BlockwiseQuantization": "",
    "shoal.Blockwise4BitQuantization": "",
    "shoal.compression.SizeAdaptiveCompression": "threshold, less, greater_equal",
    "shoal.compression.RoleAdaptiveCompression": """
        *, activation=None, parameter=None, gradient=None, optimizer=None, default=None
    """,
    "shoal.compression.PerTensorCompression": "tensor_compressions",
    "shoal.compression.serialize_torch_tensor": """
        tensor, compression_type=shoal.compression.CompressionType.NONE, info=None, allow_inplace=False, **kwargs
    """,
    "shoal.compression.deserialize_torch_tensor": "serialized_tensor",
    # --- optimisation
    "shoal.Optimizer": """
        *, dht, run_id, target_batch_size, optimizer, batch_size_per_step=None, params=None, scheduler=None,
        matchmaking_time=15.0, averaging_timeout=60.0, allreduce_timeout=None, next_chunk_timeout=None,
        load_state_timeout=600.0, reuse_grad_buffers=False, offload_optimizer=None, delay_optimizer_step=None,
        delay_grad_averaging=False, delay_state_averaging=True, average_state_every=1, use_local_updates=False,
        client_mode=None, auxiliary=False, grad_compression=NoCompression(), grad_averager_factory=None,
        grad_averager=GradientAverager.get_factory(), use_ext_grad_buffer=None,
        state_averaging_compression=NoCompression(), load_state_compression=NoCompression(),
        average_opt_statistics=(), extra_tensors=(), averager_opts=None, tracker_opts=None, performance_ema_alpha=0.1,
        shutdown_timeout=5, verbose=False
    """,
    "shoal.Optimizer.step": "self, closure=None, batch_size=None, grad_scaler=None",
    "shoal.Optimizer.zero_grad": "self, set_to_none=True",
    "shoal.Optimizer.load_state_from_peers": "self, **kwargs",
    "shoal.Optimizer.is_synchronized_with_peers": "self",
    "shoal.Optimizer.state_dict": "self",
    "shoal.Optimizer.load_state_dict": "self, state_dict",
    "shoal.Optimizer.add_param_group": "self, param_group",
    "shoal.Optimizer.is_alive": "self",
    "shoal.Optimizer.shutdown": "self",
    "shoal.optim.grad_averager.GradientAverager": """
        parameters, *, dht, prefix, reuse_grad_buffers=False, accumulate_grads_on=None, client_mode=None, warn=True,
        averaged_grads=(), **kwargs
    """,
    "shoal.optim.grad_averager.GradientAverager.get_factory": "**kwargs",
    "shoal.optim.grad_averager.GradientAverager.accumulate_grads_": "self, batch_size",
    "shoal.optim.grad_averager.GradientAverager.schedule_step": "self, scheduled_time=None, **kwargs",
    "shoal.optim.grad_averager.GradientAverager.step": """
        self, weight=None, reset_accumulators=True, control=None, timeout=None, wait=True, **kwargs
    """,
    "shoal.optim.grad_averager.GradientAverager.load_accumulators_into_averager_": "self",
    "shoal.optim.grad_averager.GradientAverager.reset_accumulated_grads_": "self",
    "shoal.optim.grad_averager.GradientAverager.use_averaged_gradients": "self",
    "shoal.optim.grad_averager.GradientAverager.notify_used_averaged_gradients": "self",
    "shoal.optim.power_sgd_averager.PowerSGDGradientAverager": """
        parameters, averager_rank, *, dht, prefix, reuse_grad_buffers=False, accumulate_grads_on=None,
        client_mode=None, warn=True, min_compression_ratio=0.5, averaged_grads=None, **kwargs
    """,
    "shoal.optim.power_ef_averager.PowerEFGradientAverager": """
        parameters, averager_rank, *, dht, prefix, reuse_grad_buffers=False, accumulate_grads_on=None,
        client_mode=None, warn=True, min_compression_ratio=0.5, averaged_grads=None, grad_averaging_interval=10,
        min_comprasion_ratio=None, **kwargs
    """,
    "shoal.GradScaler": """
        init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True
    """,
    "shoal.GradScaler.unscale_": "self, optimizer",
    "shoal.GradScaler.step": "self, optimizer, *args, **kwargs",
    "shoal.GradScaler.update": "self, new_scale=None",
    "shoal.GradScaler.are_grads_finite": "self, optimizer, use_cached=False",
    "shoal.GradScaler.running_global_step": "self",
    "shoal.TrainingAverager": """
        opt, *, average_parameters, average_gradients, average_opt_statistics=(), extra_tensors=(),
        parameter_names=None, initialize_optimizer=True, **kwargs
    """,
    "shoal.TrainingAverager.step": "self, data_lock=None, wait=True, **kwargs",
    "shoal.TrainingAverager.local_tensors": "self",
    "shoal.optim.state_averager.TrainingStateAverager": """
        *, dht, optimizer, params=None, scheduler=None, initialize_optimizer=None, offload_optimizer=False,
        custom_gradients=False, reuse_tensors=None, delta_rule_averaging=False, performance_ema_alpha=0.1,
        sync_epoch_when_averaging=False, parameter_names=None, average_opt_statistics=(), extra_tensors=(),
        status_loglevel=10, **kwargs
    """,
    "shoal.optim.state_averager.TrainingStateAverager.step": """
        self, wait_for_delayed_updates=None, apply_delayed_updates=True, increment_epoch=False, optimizer_step=False,
        zero_grad=False, delay_optimizer_step=False, averaging_round=False, delay_averaging=None,
        averaging_control=None, wait_for_trigger=None, grad_scaler=None, set_to_none=True, averaging_opts=None
    """,
    "shoal.optim.progress_tracker.ProgressTracker": """
        dht, prefix, target_batch_size, *, client_mode=None, min_refresh_period=0.5, max_refresh_period=10,
        default_refresh_period=3, expected_drift_peers=3, expected_drift_rate=0.2, performance_ema_alpha=0.1,
        metadata_expiration=60.0, status_loglevel=10, private_key=None, daemon=True, start
    """,
    "shoal.optim.progress_tracker.ProgressTracker.report_local_progress": """
        self, local_epoch, samples_accumulated, update_global_samples=True
    """,
    "shoal.optim.progress_tracker.ProgressTracker.update_epoch": "self, new_epoch=None",
    "shoal.optim.progress_tracker.ProgressTracker.pause_updates": "self",
    "shoal.optim.progress_tracker.ProgressTracker.is_alive": "self",
    "shoal.optim.progress_tracker.ProgressTracker.shutdown": "self, timeout=None",
    "shoal.optim.progress_tracker.LocalTrainingProgress": """
        *, peer_id, epoch, samples_accumulated, samples_per_second, time, client_mode
    """,
    "shoal.optim.progress_tracker.GlobalTrainingProgress": """
        epoch, samples_accumulated, target_batch_size, num_peers, num_clients, eta_next_epoch, next_fetch_time
    """,
    "shoal.PerformanceEMA": "alpha=0.1, eps=1e-20, paused=False",
    "shoal.PerformanceEMA.update": "self, task_size, interval=None",
    # --- experts
    "shoal.moe.declare_experts": "dht, uids, expiration_time, wait=True",
    "shoal.moe.get_experts": "dht, uids, expiration_time=None, return_future=False",
    "shoal.RemoteExpert": "expert_info, p2p",
    "shoal.moe.client.expert.create_remote_experts": "infos, dht, return_future=False",
    "shoal.moe.client.expert.batch_create_remote_experts": "infos, dht, return_future=False",
    "shoal.moe.client.expert.get_server_stub": "p2p, peer_id",
    "shoal.moe.client.remote_expert_worker.RemoteExpertWorker.run_coroutine": "coro, return_future=False",
    "shoal.moe.client.beam_search.MoEBeamSearcher": """
        dht, uid_prefix, grid_size, num_workers=None, negative_caching=True, cache_expiration=300, **kwargs
    """,
    "shoal.moe.client.beam_search.MoEBeamSearcher.get_initial_beam": "self, scores, beam_size, return_future=False",
    "shoal.moe.client.beam_search.MoEBeamSearcher.get_active_successors": """
        self, prefixes, grid_size=None, return_future=False
    """,
    "shoal.moe.client.beam_search.MoEBeamSearcher.find_best_experts": """
        self, grid_scores, beam_size, return_future=False
    """,
    "shoal.moe.client.beam_search.MoEBeamSearcher.batch_find_best_experts": """
        self, batch_grid_scores, beam_size, return_future=False
    """,
    "shoal.RemoteMixtureOfExperts": """
        *, in_features, grid_size, dht, uid_prefix, k_best, k_min=1, forward_timeout=None, timeout_after_k_min=None,
        backward_k_min=1, backward_timeout=None, detect_anomalies=False, allow_zero_outputs=False, **dht_kwargs
    """,
    "shoal.RemoteMixtureOfExperts.compute_expert_scores": "self, grid_scores, batch_experts",
    "shoal.RemoteSwitchMixtureOfExperts": """
        *, grid_size, utilization_alpha=0.9, grid_dropout=1.0, jitter_eps=0.01, k_best=1, k_min=0, backward_k_min=0,
        allow_zero_outputs=True, **kwargs
    """,
    # --- utilities
    "shoal.MSGPackSerializer.dumps": "obj",
    "shoal.MSGPackSerializer.loads": "buf",
    "shoal.MSGPackSerializer.ext_serializable": "type_code",
    "shoal.utils.nested.nested_flatten": "structure",
    "shoal.utils.nested.nested_pack": "flat, structure",
    "shoal.utils.nested.nested_map": "function, *structures",
    "shoal.utils.nested.nested_compare": "first, second",
    "shoal.MPFuture.result": "self, timeout=None",
    "shoal.MPFuture.exception": "self, timeout=None",
    "shoal.MPFuture.set_result": "self, result",
    "shoal.MPFuture.set_exception": "self, exception",
    "shoal.MPFuture.add_done_callback": "self, fn",
    "shoal.MPFuture.reset_backend": "",
    "shoal.utils.asyncio.iter_as_aiter": "iterable",
    "shoal.utils.asyncio.as_aiter": "*items",
    "shoal.utils.asyncio.azip": "*iterables",
    "shoal.utils.asyncio.achain": "*iterables",
    "shoal.utils.asyncio.aenumerate": "iterable",
    "shoal.utils.asyncio.asingle": "iterable",
    "shoal.utils.asyncio.await_cancelled": "awaitable",
    "shoal.utils.asyncio.amap_in_executor": "function, *iterables, max_prefetch=1, executor=None",
    "shoal.utils.asyncio.aiter_with_timeout": "iterable, timeout",
    "shoal.utils.asyncio.attach_event_on_finished": "iterable, event",
    "shoal.utils.asyncio.enter_asynchronously": "context",
    "shoal.utils.asyncio.switch_to_uvloop": "",
    "shoal.utils.streaming.split_for_streaming": "serialized_tensor, chunk_size_bytes=2**16",
    "shoal.utils.streaming.combine_from_streaming": "stream",
    "shoal.TensorDescriptor": """
        size, dtype=torch.float32, layout=torch.strided, device=None, requires_grad=False, pin_memory=False,
        compression=shoal.compression.CompressionType.NONE
    """,
    "shoal.TensorDescriptor.from_tensor": "tensor",
    "shoal.TensorDescriptor.numel": "self",
    "shoal.TensorDescriptor.make_zeros": "self, *, device=None",
    "shoal.BatchTensorDescriptor": "*instance_size, **kwargs",
    "shoal.BatchTensorDescriptor.from_tensor": "tensor",
    "shoal.BatchTensorDescriptor.make_zeros": "self, *batch_size, device=None",
    "shoal.utils.math.orthogonalize_": "matrix, eps=1e-8",
    "shoal.utils.math.get_flatten_greedy_dims": "tensor, max_ndim=2",
    "shoal.utils.crypto.RSAPrivateKey.process_wide": "",
    "shoal.utils.crypto.RSAPrivateKey.sign": "self, data",
    "shoal.utils.crypto.RSAPrivateKey.get_public_key": "self",
    "shoal.utils.crypto.RSAPrivateKey.to_bytes": "self",
    "shoal.utils.crypto.RSAPublicKey.verify": "self, data, signature",
    "shoal.utils.crypto.RSAPublicKey.to_bytes": "self",
    "shoal.utils.crypto.RSAPublicKey.from_bytes": "data",
    "shoal.utils.auth.TokenAuthorizerBase": "local_private_key=None",
    "shoal.utils.auth.TokenAuthorizerBase.get_token": "self",
    "shoal.utils.auth.TokenAuthorizerBase.is_token_valid": "self, access_token",
    "shoal.utils.auth.TokenAuthorizerBase.does_token_need_refreshing": "self, access_token",
    "shoal.utils.auth.AuthRPCWrapper": "stub, role, authorizer",
    "shoal.utils.logging.get_logger": "name=None",
    "shoal.utils.logging.use_hivemind_log_handler": "where",
    "shoal.utils.limits.increase_file_limit": "new_soft=2**15, new_hard=2**15",
    "shoal.utils.networking.choose_ip_address": """
        maddrs, prefer_global=True, protocol_priority=("ip4", "ip6")
    """,
    "shoal.utils.networking.log_visible_maddrs": "visible_maddrs, only_p2p=False",
}
"""What callers may pass, in which order, and what happens if they do not. Private additions must have defaults."""

MEMBERS = {
    "shoal.DHT": "peer_id client_mode kwargs initial_peers pid",
    "shoal.dht.DHTNode": """
        node_id peer_id protocol blacklist cache_refresh_queue pending_get_requests is_alive
    """,
    "shoal.dht.protocol.DHTProtocol": """
        storage cache routing_table record_validator p2p client_mode wait_timeout call_ping call_store call_find
    """,
    "shoal.DecentralizedAverager": """
        allow_state_sharing state_sharing_priority peer_id client_mode mode prefix bandwidth request_timeout
        matchmaking_kwargs allreduce_kwargs total_size schema_hash serializer last_updated
    """,
    "shoal.averaging.control.StepControl": """
        stage triggered began_allreduce scheduled_time weight deadline allow_retries data_for_gather
        done cancelled add_done_callback __await__
    """,
    "shoal.averaging.group_info.GroupInfo": "group_size __contains__",
    "shoal.optim.grad_averager.GradientAverager": "parameters local_samples_accumulated local_times_accumulated",
    "shoal.optim.progress_tracker.ProgressTracker": """
        global_epoch global_progress local_progress performance_ema estimated_next_update_time ready_to_update_epoch
        fetched_global_progress_this_epoch
    """,
    "shoal.Optimizer": "local_epoch local_progress use_local_updates use_gradient_averaging param_groups state opt",
    "shoal.RemoteExpert": "uid peer_id stub info",
    "shoal.RemoteMixtureOfExperts": "info proj beam_search",
    "shoal.RemoteSwitchMixtureOfExperts": "grid_utilization",
    "shoal.moe.expert_uid.ExpertInfo": "uid peer_id",
    "shoal.P2P": "peer_id is_alive",
    "shoal.PeerID": "to_bytes to_base58 pretty to_string from_base58 from_identity __lt__ __hash__ __eq__ __str__",
    "shoal.utils.multiaddr.Multiaddr": """
        to_bytes values protocols keys items split join encapsulate decapsulate value_for_protocol __getitem__
        __contains__ __eq__ __hash__
    """,
    "shoal.PeerInfo": "peer_id addrs",
    "shoal.P2PContext": "handle_name local_id remote_id",
    "shoal.PerformanceEMA": """
        samples_per_second ema_seconds_per_sample num_updates reset_timer pause update_threadsafe
    """,
    "shoal.utils.TimedStorage": "store get items top clear freeze __contains__ __len__ __delitem__ __bool__",
    "shoal.dht.DHTID": "MIN MAX HASH_NBYTES xor_distance longest_common_prefix_length to_bytes from_bytes __bytes__",
    "shoal.utils.ValueWithExpiration": "value expiration_time __getitem__ __iter__ __eq__",
    "shoal.dht.storage.HeapEntry": "expiration_time key __lt__",
    "shoal.dht.RecordValidatorBase": "validate sign_value strip_value priority merge_with",
    "shoal.dht.crypto.RSASignatureValidator": "local_public_key priority merge_with",
    "shoal.dht.CompositeValidator": "extend",
    "shoal.CompressionBase": "compression_type",
    "shoal.MPFuture": "result exception done cancelled cancel running set_result set_exception __await__ reset_backend",
    "shoal.TensorDescriptor": "size dtype layout device requires_grad pin_memory compression shape",
    "shoal.utils.crypto.RSAPrivateKey": "from_bytes",
    "shoal.utils.auth.AuthorizerBase": "sign_request validate_request sign_response validate_response",
    "shoal.utils.auth.AuthRole": "CLIENT SERVICER",
    "shoal.utils.logging.TextStyle": "RESET BOLD",
}
"""Methods, properties and attributes that users read."""

VALUES = {
    "shoal.averaging.control.AveragingStage": {
        "IDLE": 0,
        "LOOKING_FOR_GROUP": 1,
        "AWAITING_TRIGGER": 2,
        "RUNNING_ALLREDUCE": 3,
        "FINISHED": 4,
    },
    "shoal.averaging.round.AveragingMode": {"NODE": 0, "CLIENT": 1, "AUX": 2},
    "shoal.compression.CompressionType": {
        "NONE": 0,
        "MEANSTD_16BIT": 1,
        "FLOAT16": 2,
        "QUANTILE_8BIT": 3,
        "UNIFORM_8BIT": 4,
        "BLOCKWISE_8BIT": 5,
        "BFLOAT16": 6,
        "BLOCKWISE_4BIT": 7,
    },
    "shoal.averaging.partition": {"DEFAULT_PART_SIZE_BYTES": 2**19},
    "shoal.moe.expert_uid": {"UID_DELIMITER": ".", "FLAT_EXPERT": -1},
    "shoal.utils": {"MAX_DHT_TIME_DISCREPANCY_SECONDS": 3},
    "shoal.dht.DHTID": {"MIN": 0, "MAX": 2**160, "HASH_NBYTES": 20},
    "shoal.dht": {"DEFAULT_NUM_WORKERS": 4},
    "shoal.MSGPackSerializer": {"_TUPLE_CODE": 0x40},
    "shoal.utils.logging.HandlerMode": {
        "IN_HIVEMIND": "in_hivemind",
        "NOWHERE": "nowhere",
        "IN_ROOT_LOGGER": "in_root_logger",
    },
    "shoal.utils.networking": {"LOCALHOST": "127.0.0.1"},
}

ERRORS = {
    "shoal.p2p.P2PDaemonError": "shoal.errors.ShoalError",
    "shoal.p2p.P2PHandlerError": "shoal.errors.ShoalError",
    "shoal.dht.protocol.ValidationError": "shoal.errors.ShoalError",
    "shoal.averaging.partition.AllreduceException": "shoal.errors.ShoalError",
    "shoal.averaging.partition.BannedException": "shoal.averaging.partition.AllreduceException",
    "shoal.averaging.matchmaking.MatchmakingException": "shoal.errors.ShoalError",
    "shoal.utils.multiaddr.ProtocolLookupError": "LookupError",
    "shoal.utils.mpfuture.InvalidStateError": "concurrent.futures.InvalidStateError",
    "shoal.utils.mpfuture.TimeoutError": "TimeoutError",
}
"""What one may catch each error as."""


SAME = {
    "shoal.utils.crypto.RSAPrivateKey": "shoal.dht.crypto.Ed25519PrivateKey",
    "shoal.utils.crypto.RSAPublicKey": "shoal.dht.crypto.Ed25519PublicKey",
    "shoal.dht.crypto.RSASignatureValidator": "shoal.dht.crypto.SignatureValidator",
    "shoal.dht.protocol.ValidationError": "shoal.errors.ValidationError",
    "shoal.utils.DHTExpiration": "shoal.dht.DHTExpiration",
    "shoal.utils.TimedStorage": "shoal.dht.storage.TimedStorage",
    "shoal.utils.multiaddr.Multiaddr": "shoal.p2p.Multiaddr",
}
"""Two names of one thing."""


@pytest.mark.parametrize("module", NAMES)
def test_names_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert not missing, f"{module} lacks {missing}"


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    check_signature(path, SIGNATURES[path])


@pytest.mark.parametrize("path", MEMBERS)
def test_members(path: str) -> None:
    cls = find(path)
    constructors = [vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base)]
    set_by_constructors = [inspect.unwrap(constructor).__code__.co_names for constructor in constructors]
    known = set(dir(cls)).union(*set_by_constructors, *(vars(base).get("__annotations__", {}) for base in cls.__mro__))
    missing = set(MEMBERS[path].split()) - known
    assert not missing, f"{path} lacks {sorted(missing)}"


@pytest.mark.parametrize("path", VALUES)
def test_values(path: str) -> None:
    for name, value in VALUES[path].items():
        found = getattr(find(path), name)
        assert getattr(found, "value", found) == value


@pytest.mark.parametrize("path", ERRORS)
def test_errors_can_be_caught_as(path: str) -> None:
    for base in ERRORS[path].split():
        assert issubclass(find(path), find(base)), f"{path} is no {base}"


@pytest.mark.parametrize("path", SAME)
def test_two_names_of_one_thing(path: str) -> None:
    assert find(path) is find(SAME[path])


def test_all_names_of_utilities_and_compression_are_at_the_top_level_too() -> None:
    for module in ("shoal.utils", "shoal.compression"):
        listed = NAMES[module].split()
        assert set(find(module).__all__) >= set(listed)
        for name in listed:
            assert getattr(find("shoal"), name) is getattr(find(module), name), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        find("shoal.utils.nothing")


def test_extension_codes_of_what_travels_packed() -> None:
    dictionary, batch = find("shoal.dht.storage.DictionaryDHTValue"), find("shoal.BatchTensorDescriptor")
    codes = find("shoal.MSGPackSerializer")._ext_type_codes
    assert (codes[0x50], codes[0x51]) == (dictionary, batch)


def test_works_under_the_other_name() -> None:
    """Each line in a state as after a fresh start of the interpreter: rooms load at first use."""
    script = """
        import sys, torch
        for line in '''
            hivemind.DHT, hivemind.Optimizer, hivemind.DecentralizedAverager
            hivemind.averaging.control.StepControl
            hivemind.optim.grad_averager.GradientAverager
            hivemind.dht.node.DHTNode
            hivemind.compression.Float16Compression()
            hivemind.utils.get_dht_time()
            hivemind.get_dht_time()
        '''.split("\\n"):
            import shoal as hivemind
            exec(line.strip())
            for loaded in [m for m in sys.modules if m == "shoal" or m.startswith("shoal.")]:
                del sys.modules[loaded]
    """
    subprocess.run([sys.executable, "-W", "error::Warning:shoal", "-c", dedent(script)], check=True, timeout=60)
