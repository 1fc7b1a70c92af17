"""The processes of this peer: one, or one per device of the ``Trainer``, started by Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shoal.lightning.flavours import Flavour, flavour_of

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy
else:  # the base class of the user's Lightning is added when a strategy is made
    ParallelStrategy = object

# Seeds of torch have 32 bits.
PEER_SEEDS = 2**32


class LocalProcesses(ParallelStrategy):
    """What a strategy must know about the other processes of its peer, which run on the same machine.

    One of Lightning's own strategies does the work: it starts the processes, lets them meet and exchanges metrics and
    decisions among them. It never sees the model. Other peers are not involved: each writes its own logs and
    checkpoints.
    """

    num_nodes: int = 1
    """Set by the ``Trainer``."""

    def __init__(self) -> None:
        super().__init__()
        # A placeholder: the right one of Lightning's strategies is known once the ``Trainer`` is made.
        self._processes: Any = self._flavour.find("strategies", "SingleDeviceStrategy")("cpu")
        self._data_seed = 0

    @property
    def _flavour(self) -> Flavour:
        return flavour_of(type(self))

    # --- start of the Trainer -----------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        devices = self.parallel_devices or [torch.device("cpu")]
        is_alone = len(devices) * self.num_nodes == 1
        if not is_alone and any(device.type not in ("cpu", "cuda") for device in devices):
            raise self._flavour.misconfigured(
                f"with several processes HivemindStrategy trains on CPU or CUDA devices, not with "
                f"{type(self.accelerator).__name__}: use Trainer(devices=1) in each of several peers"
            )
        if is_alone:
            self._processes = type(self._processes)(devices[0], self.accelerator)
            return
        ddp = self._flavour.find("strategies", "DDPStrategy")
        self._processes = ddp(
            accelerator=self.accelerator, parallel_devices=devices, cluster_environment=self.cluster_environment
        )
        self._processes.num_nodes = self.num_nodes
        self._processes.set_world_ranks()
        self._processes._configure_launcher()

    @property
    def launcher(self) -> Any:
        """What starts the other processes; ``None`` if there are none, or if something else has started them."""
        return self._processes.launcher

    def setup_environment(self) -> None:
        """Let the processes of this peer meet."""
        self._processes.setup_environment()

    def _agree_on_order_of_data(self, peer_id: bytes | None) -> None:
        """Agree on the seed for shuffling: different for each peer, the same in all processes of a peer.

        Args:
            peer_id: of this peer; only the first process knows it, the others pass ``None``.
        """
        own = None if peer_id is None else int.from_bytes(peer_id[-8:], "big") % PEER_SEEDS
        self._data_seed = self.broadcast(own)

    # --- ranks of the processes ---------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether data must be divided among processes."""
        return self.world_size > 1

    @property
    def world_size(self) -> int:
        """Processes of this peer."""
        return int(self._processes.world_size)

    @property
    def global_rank(self) -> int:
        """The rank of this process in its peer; 0 in every peer that is a single process."""
        return int(self._processes.global_rank)

    @property
    def local_rank(self) -> int:
        """The rank of this process on this machine."""
        return int(self._processes.local_rank)

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes logs and checkpoints: one process of every peer does."""
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which part of the data belongs to this process."""
        return {"num_replicas": self.world_size, "rank": self.global_rank, "seed": self._data_seed}

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self._processes.root_device
        return device

    def model_to_device(self) -> None:
        """Move the model to the device of this process."""
        assert self.model is not None
        self.model.to(self.root_device)

    # --- among the processes of this peer -----------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for the processes of this peer, never for other peers."""
        self._processes.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Get the object of process ``src`` of this peer; other peers are not involved."""
        return self._processes.broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce over the processes of this peer only, so metrics are those of this peer."""
        return self._processes.reduce(tensor, *args, **kwargs)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) of the processes of this peer decided for it."""
        return bool(self._processes.reduce_boolean_decision(decision, all))

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        """Stack the tensors of all processes of this peer; with a single process, return the tensor itself."""
        gathered: torch.Tensor = self._processes.all_gather(tensor, group, sync_grads)
        return gathered
