"""A server: its experts, the thread that computes, and everything that lets other peers find and call them."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.base.closeable import at_the_door
from shoal.base.logs import quoted
from shoal.compression.base import CompressionType
from shoal.compression.serialization import DUMMY_BATCH_SIZE, BatchTensorDescriptor
from shoal.dht import DHT, DHTNode
from shoal.moe import layers
from shoal.moe.backend import ModuleBackend, with_compression
from shoal.moe.checkpoints import LAST, CheckpointSaver, is_directory, load_experts
from shoal.moe.dht_handler import DHTHandlerThread
from shoal.moe.handler import DEFAULT_LIMITS, ConnectionHandler, ExpertLimits
from shoal.moe.uids import UID_DELIMITER, ExpertUID, is_valid_uid
from shoal.serving.runtime import Runtime
from shoal.serving.task_pool import JobPool

logger = logging.getLogger(__name__)

# Uids drawn per expert before the server accepts fewer experts. Chosen.
ATTEMPTS_PER_EXPERT = 10
_BLOCK = re.compile(r"\[(\d+):(\d+)\]")


class Server(threading.Thread):
    """Runs experts for other peers. One thread computes; the network is in the background loop of the process.

    Args:
        dht: this peer's DHT. The server starts it if necessary, and shuts it down at its own shutdown.
        module_backends: the experts by uid.
        num_connection_handlers: accepted for compatibility: one handler serves all calls.
        update_period: seconds from one declaration in the DHT to the next, and from one checkpoint to the next.
        expiration: seconds until a declaration expires; default: twice the period.
        start: start now, and wait until others can call the experts.
        checkpoint_dir: an existing folder for checkpoints; ``None``: no checkpoints.
        limits: what others may ask for.
        kwargs: for :class:`~shoal.serving.runtime.Runtime`: ``device``, ``stats_report_interval``, ….
    """

    def __init__(
        self,
        dht: DHT,
        module_backends: Mapping[ExpertUID, ModuleBackend],
        num_connection_handlers: int = 1,
        update_period: float = 30,
        expiration: float | None = None,
        start: bool = False,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        *,
        limits: ExpertLimits = DEFAULT_LIMITS,
        **kwargs: Any,
    ) -> None:
        super().__init__(name="shoal-experts", daemon=True)
        self.dht, self.module_backends, self.update_period = dht, module_backends, update_period
        self.ready = threading.Event()
        """Set when others can call the experts."""
        self._jobs = JobPool("checkpoints")
        self.runtime = Runtime(self.module_backends, pools=[self._jobs], **kwargs)
        self.conn_handlers = [ConnectionHandler(dht, module_backends, limits=limits)]
        self.dht_handler_thread = DHTHandlerThread(module_backends, dht, update_period, expiration)
        self.checkpoint_saver: CheckpointSaver | None = None
        if checkpoint_dir is not None:
            self.checkpoint_saver = CheckpointSaver(
                module_backends, checkpoint_dir, update_period, run_safely=lambda read: self._jobs.submit(read).result()
            )
        self._failure: BaseException | None = None
        self._has_settled = threading.Event()
        self._ending = threading.RLock()
        self._is_shut_down = self._spares_dht = False
        if start:
            self.run_in_background(await_ready=True)

    # --- life ---------------------------------------------------------------------------------------------------------

    @at_the_door
    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start the server.

        Raises:
            TimeoutError: the server was not ready in time; it continues to start.
        """
        self.start()
        if not await_ready:
            return
        if not self._has_settled.wait(timeout):
            raise TimeoutError(f"the server was not ready within {timeout:g} seconds")
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        was_alive = self.dht.is_alive()
        try:
            if not was_alive:
                self.dht.run_in_background(await_ready=True)
            self.runtime.move_modules()
            for handler in self.conn_handlers:
                handler.run_in_background()
            self.dht_handler_thread.run_in_background()
            if self.checkpoint_saver is not None:
                self.checkpoint_saver.start()
            self._tell_modules()
            self.ready.set()
            self._has_settled.set()
            self.runtime.run()
        except BaseException as e:
            self._failure = e
            if self.ready.is_set():
                logger.exception("the server of experts ends")
            else:
                self._spares_dht = was_alive  # others may use it
        finally:
            self.shutdown()
            self._has_settled.set()

    def _tell_modules(self) -> None:
        logger.info("Server started with %d modules:", len(self.module_backends))
        for name, backend in self.module_backends.items():
            count = sum(each.numel() for each in backend.module.parameters() if each.requires_grad)
            logger.info("%s: %s, %d parameters", name, type(backend.module).__name__, count)

    def shutdown(self) -> None:
        """Withdraw the experts, finish the batch in progress, write the last checkpoints, and shut the DHT down.

        Idempotent.
        """
        with self._ending:
            if self._is_shut_down:
                return
            self._is_shut_down = True
            self.ready.clear()
            self.dht_handler_thread.shutdown()
            for handler in self.conn_handlers:
                handler.shutdown()
            self.runtime.shutdown()
            if self.checkpoint_saver is not None:
                self.checkpoint_saver.shutdown()
            if not self._spares_dht:
                self.dht.shutdown()

    # --- making -------------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        num_experts: int | None = None,
        expert_uids: Sequence[ExpertUID] | None = None,
        expert_pattern: str | None = None,
        expert_cls: str = "ffn",
        hidden_dim: int = 1024,
        optim_cls: Callable[..., torch.optim.Optimizer] | None = torch.optim.Adam,
        scheduler: str = "none",
        num_warmup_steps: int | None = None,
        num_training_steps: int | None = None,
        clip_grad_norm: float | None = None,
        num_handlers: int | None = None,
        min_batch_size: int = 1,
        max_batch_size: int = 4096,
        device: torch.device | str | None = None,
        initial_peers: Sequence[Any] | str = (),
        checkpoint_dir: str | os.PathLike[str] | None = None,
        compression: CompressionType = CompressionType.NONE,
        stats_report_interval: float | None = None,
        custom_module_path: str | os.PathLike[str] | None = None,
        update_period: float = 30,
        expiration: float | None = None,
        *,
        start: bool,
        batch_timeout: float | None = 1.0,
        outputs_compression: CompressionType | None = None,
        grad_compression: CompressionType | None = None,
        expert_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Server:
        """Make experts of one class, and a server for them. For experts of several classes, give the constructor what
        :func:`make_backend` makes.

        Args:
            num_experts: how many experts.
            expert_uids: their uids, instead of a number.
            expert_pattern: of their uids, with numbers that are drawn, such as ``ffn.[0:16].[0:16]``; the second number
                of a block is excluded. Default: ``expert.0``, ``expert.1``, ….
            expert_cls: the name of a class in :data:`~shoal.moe.layers.name_to_block`.
            hidden_dim: the width.
            optim_cls: called with the parameters of each expert; ``None``: the experts do not learn.
            scheduler: ``none``, or ``linear``: the rate rises for ``num_warmup_steps`` and falls until
                ``num_training_steps``.
            clip_grad_norm: the largest norm of the gradients of an expert.
            num_handlers: accepted for compatibility.
            min_batch_size: a batch waits until it has this many rows, at most ``batch_timeout`` seconds.
            max_batch_size: the most rows of a batch.
            device: default: CUDA if there is any.
            initial_peers: as for :class:`~shoal.DHT`.
            checkpoint_dir: an existing folder; experts continue from their last checkpoints there.
            compression: the codec of all floating-point tensors.
            stats_report_interval: seconds from one line of statistics to the next.
            custom_module_path: a Python file that registers classes of experts.
            update_period, expiration: as for the constructor.
            start: start the server, and wait until others can call the experts.
            batch_timeout: see ``min_batch_size``.
            outputs_compression: another codec for outputs.
            grad_compression: another codec for gradients.
            expert_kwargs: further arguments of the class.
            kwargs: for :class:`~shoal.DHT`.

        Raises:
            AssertionError: both a number and uids are given, or none, or there is no such class.
            ValueError: options that contradict each other.
        """
        # The options that both functions have.
        options: dict[str, Any] = {name: each for name, each in locals().items() if name in _BACKEND_OPTIONS}
        if custom_module_path is not None:
            layers.add_custom_models_from_file(custom_module_path)
        is_numbered = num_experts is not None and expert_uids is None
        assert is_numbered or (expert_uids is not None and num_experts is None and expert_pattern is None), (
            "give either expert_uids, or num_experts and perhaps expert_pattern"
        )
        if checkpoint_dir is not None:
            is_directory(checkpoint_dir)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        options |= {"device": device, "timeout": batch_timeout}
        if (identity := kwargs.get("identity_path")) is not None and not Path(identity).exists():
            logger.info("Generating new identity in %s", identity)
        dht = DHT(initial_peers=initial_peers, start=True, **kwargs)
        try:
            addresses = [str(each) for each in dht.get_visible_maddrs()]
            logger.info("Running DHT node on %s, initial peers = %s", addresses, initial_peers)
            if expert_uids is None:
                assert num_experts is not None
                expert_uids = _continued(num_experts, expert_pattern, checkpoint_dir)
                expert_uids += _generate_uids(num_experts - len(expert_uids), expert_pattern, dht, known=expert_uids)
            experts = {uid: make_backend(uid, **options) for uid in expert_uids}
            if checkpoint_dir is not None:
                load_experts(experts, checkpoint_dir)
            return cls(
                dht,
                experts,
                update_period=update_period,
                expiration=expiration,
                start=start,
                checkpoint_dir=checkpoint_dir,
                device=device,
                stats_report_interval=stats_report_interval,
            )
        except BaseException:
            dht.shutdown()
            raise


def make_backend(
    uid: ExpertUID,
    expert_cls: str = "ffn",
    hidden_dim: int = 1024,
    *,
    optim_cls: Callable[..., torch.optim.Optimizer] | None = torch.optim.Adam,
    scheduler: str = "none",
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    clip_grad_norm: float | None = None,
    device: torch.device | str = "cpu",
    compression: CompressionType = CompressionType.NONE,
    outputs_compression: CompressionType | None = None,
    grad_compression: CompressionType | None = None,
    expert_kwargs: Mapping[str, Any] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int = 4096,
    **of_pools: Any,
) -> ModuleBackend:
    """Make an expert of a registered class; the arguments are those of :meth:`Server.create`.

    Raises:
        AssertionError: there is no such class, schedule, or the uid is none.
        ValueError: options that contradict each other.
    """
    assert is_valid_uid(uid), f"{quoted(uid)} is not a uid: expected a name and numbers, as in 'ffn.0.12'"
    assert expert_cls in layers.name_to_block, f"no expert class {expert_cls!r}: {', '.join(layers.name_to_block)}"
    known = layers.schedule_name_to_scheduler
    assert scheduler in known, f"no scheduler {scheduler!r}: {', '.join(known)}"
    make_scheduler = known[scheduler]
    if optim_cls is None and (clip_grad_norm is not None or make_scheduler is not None):
        raise ValueError("without an optimizer, leave out clip_grad_norm and scheduler: the experts do not learn")
    if make_scheduler is not None and (num_warmup_steps is None or num_training_steps is None):
        raise ValueError(f"scheduler {scheduler!r} needs num_warmup_steps and num_training_steps")
    module = layers.name_to_block[expert_cls](hidden_dim, **(expert_kwargs or {})).to(device)
    optimizer = None if optim_cls is None else optim_cls(module.parameters())
    schedule = None
    if make_scheduler is not None:
        schedule = make_scheduler(optimizer, num_warmup_steps, num_training_steps)
    if optimizer is not None and clip_grad_norm is not None:
        optimizer = layers.ClippingWrapper(optimizer, clip_grad_norm)
    sample = layers.name_to_input[expert_cls](DUMMY_BATCH_SIZE, hidden_dim)
    samples = sample if isinstance(sample, tuple) else (sample,)
    return ModuleBackend(
        uid,
        module,
        optimizer=optimizer,
        scheduler=schedule,
        args_schema=with_compression(tuple(map(BatchTensorDescriptor.from_tensor, samples)), compression),
        outputs_compression=compression if outputs_compression is None else outputs_compression,
        grad_compression=grad_compression,
        min_batch_size=min_batch_size,
        max_batch_size=max_batch_size,
        **of_pools,
    )


_BACKEND_OPTIONS = inspect.signature(make_backend).parameters


# --- uids -------------------------------------------------------------------------------------------------------------


def _generate_uids(
    num_experts: int,
    expert_pattern: str | None,
    dht: DHT | None,
    attempts_per_expert: int = ATTEMPTS_PER_EXPERT,
    *,
    known: Sequence[ExpertUID] = (),
) -> list[ExpertUID]:
    """Choose uids that no other peer has declared.

    Args:
        expert_pattern: as for :meth:`Server.create`.
        known: uids that are used here already.

    Raises:
        ValueError: the pattern is malformed.
    """
    found: list[ExpertUID] = []
    drawn, left = _candidates(expert_pattern), attempts_per_expert * num_experts
    while len(found) < num_experts and left:
        batch = [*itertools.islice(drawn, min(left, num_experts - len(found)))]
        left -= len(batch)
        new = [uid for uid in dict.fromkeys(batch) if uid not in found and uid not in known]
        taken = dht.run_coroutine(partial(_taken, uids=new)) if dht is not None and new else set()
        found += [uid for uid in new if uid not in taken]
    if len(found) < num_experts:
        logger.warning(
            "found only %d free uids of %d for the pattern %s: this server has fewer experts",
            len(found),
            num_experts,
            expert_pattern,
        )
    return found


async def _taken(dht: DHT, node: DHTNode, *, uids: Sequence[ExpertUID]) -> set[ExpertUID]:
    """The uids that other peers have declared."""
    own = node.peer_id.to_base58()
    records = await node.get_many(uids)
    return {uid for uid, each in records.items() if each is not None and each.value is not None and each.value != own}


def _candidates(pattern: str | None) -> Iterator[ExpertUID]:
    if pattern is None:
        yield from (f"expert{UID_DELIMITER}{number}" for number in itertools.count())
    blocks = [_block(block, str(pattern)) for block in str(pattern).split(UID_DELIMITER)]
    while True:
        yield UID_DELIMITER.join(b if isinstance(b, str) else str(random.randrange(b.start, b.stop)) for b in blocks)


def _block(block: str, pattern: str) -> str | range:
    match = _BLOCK.fullmatch(block)
    if match is None and not set("[]:") & set(block):
        return block
    numbers = range(0) if match is None else range(int(match[1]), int(match[2]))
    if not numbers:
        raise ValueError(
            f"expert_pattern {pattern!r} has a block {block!r}: write text, or [from:to] for a number below `to`"
        )
    return numbers


def _fits(uid: ExpertUID, pattern: str | None) -> bool:
    """Whether a pattern might draw this uid."""
    blocks = [_block(block, str(pattern)) for block in ("expert.[0:1]" if pattern is None else pattern).split(".")]
    parts = uid.split(UID_DELIMITER)
    return len(parts) == len(blocks) and all(
        part == block if isinstance(block, str) else part.isdecimal() and (pattern is None or int(part) in block)
        for part, block in zip(parts, blocks, strict=True)
    )


def _continued(num_experts: int, pattern: str | None, checkpoint_dir: str | os.PathLike[str] | None) -> list[ExpertUID]:
    """The uids of the checkpoints in a folder.

    Raises:
        ValueError: there are more than ``num_experts``.
    """
    if checkpoint_dir is None:
        return []
    folders = sorted(each.parent.name for each in Path(checkpoint_dir).glob(f"*/{LAST}"))
    uids = [name for name in folders if is_valid_uid(name) and _fits(name, pattern)]
    if len(uids) > num_experts:
        raise ValueError(
            f"{str(checkpoint_dir)!r} has checkpoints of {len(uids)} experts, and num_experts is {num_experts}: raise "
            "it, or move checkpoints away"
        )
    return uids
