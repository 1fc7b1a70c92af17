"""A peer of several processes, with :class:`~shoal.optim.diloco.diloco.DiLoCo`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.errors import ReactorError
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragments import divide
from shoal.optim.diloco.inner import InnerOptimizers, without_statistics
from shoal.optim.diloco.messages import PARAMETERS
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.gradient_accumulator import GradientAccumulator
from shoal.optim.joint_optimizer import uncompiled
from shoal.optim.ranks.processes import Command, Processes, ProcessMessage
from shoal.optim.ranks.several_processes import SeveralProcesses
from shoal.optim.ranks.sharded_diloco import FollowingDiLoCo, LeadingDiLoCo, ProcessDiLoCo
from shoal.optim.ranks.shards import held_boxes, local_gradient, sharded_modules, volume
from shoal.optim.setup.devices import is_dtensor, local_part
from shoal.optim.setup.training_setup import listed, main_parameters, with_parameters
from shoal.optim.setup.training_state import OWN

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shoal.dht import DHT


class MultiProcessDiLoCo(SeveralProcesses):
    """Makes one peer of several processes that train the same model, each with its own batches.

    The processes belong to one group of ``torch.distributed`` and call the same methods in the same order. In each step
    the first one gets the gradients of all, weighted by samples, makes the inner step, and sends the parameters to the
    others. Only it has a :class:`~shoal.DiLoCo`, with outer parameters and statistics, and talks to the swarm. To the
    swarm this is one peer with the samples of all processes.

    Gradients need not be averaged among the processes before, so the model needs no ``DistributedDataParallel`` around
    it. With one, call ``backward`` in its ``no_sync()``. Clip gradients with a hook of ``opt``, because only there they
    are those of all processes: ``optimizer.opt.register_step_pre_hook(clip)``.

    A step in which the gradients of one process overflow is made with those of the others.

    The processes may also share the model, with ``fully_shard`` (FSDP2). Then each process makes inner steps with its
    part, has outer parameters of it, and exchanges it with the process of the same rank in other peers. So all peers
    must have equally many processes, each of them a DHT of its own, and ``optimizer`` must be a function, given with
    ``params``. No process ever holds the whole model. ``docs/sharded.md`` has a program, and says what this takes.

    Args:
        dht: DHT of the first process; ``None`` in the others. If they share the model, each has one.
        optimizer, params, scheduler, batch_size_per_step, extra_tensors: as for :class:`~shoal.DiLoCo`, the same in all
            processes. ``batch_size_per_step`` counts samples of one process.
        process_group: default: all processes.
        options: further options of :class:`~shoal.DiLoCo`.

    Raises:
        ValueError: there is no process group, models differ, or options contradict each other, or do not go together
            with parameters that are sharded.
        ProcessGroupError: another process has ended.
    """

    def __init__(self, *, optimizer: Any, params: Any = None, **options: Any) -> None:
        if options.get("reuse_grad_buffers"):
            raise ValueError("DiLoCo steps with each batch, so nothing accumulates: leave reuse_grad_buffers=True out")
        params = listed(params)
        main = self._main_parameters(optimizer, params)
        if any(map(is_dtensor, main)):
            self._share(main, optimizer, params or [], **options)
        else:
            super().__init__(optimizer=optimizer, params=params, **options)

    _part: ProcessDiLoCo | None = None
    """In each process, what has its part of the model, if the processes share it."""
    # In all processes together.
    _samples_of_step = 0
    # The model holds the outer parameters until the outermost context ends.
    _is_in_context = False

    @staticmethod
    def _main_parameters(optimizer: Any, params: Any) -> Sequence[torch.Tensor]:
        given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        return [parameter for each in given for parameter in main_parameters(each, params, may_be_sharded=True)]

    def _prepare_to_follow(self, optimizer: Any, params: Any, scheduler: Any) -> None:
        self._own = InnerOptimizers(optimizer, params, scheduler)

    def _join(self, **options: Any) -> None:
        del options["reuse_grad_buffers"]
        self.swarm = DiLoCo(**options)
        trained = [p for group in self.swarm.param_groups for p in group["params"] if p.requires_grad]
        self._accumulator = GradientAccumulator(trained)

    def _step_swarm(self, total: int, scaler: GradScaler | None) -> None:
        if total > 0:
            self._samples_of_step = total
            self._fetch_gradients()
            self._use_mean_gradients()
            if scaler is not None:
                scaler.note_global_step()
        self.swarm.step(batch_size=total)

    @property
    def _speed(self) -> float:
        counts_steps = self.swarm.schedule.sync_every is not None
        return super()._speed * (self._samples_of_step if counts_steps else 1)

    # --- the same in all processes ------------------------------------------------------------------------------------

    @property
    def _inner(self) -> Any:
        return self._part or self.swarm or self._own

    @property
    def _inner_optimizers(self) -> InnerOptimizers:
        training = self._part or self.swarm
        return self._own if training is None else training.inner

    @property
    def opt(self) -> torch.optim.Optimizer:
        """In the first process, the optimizer that makes the inner steps; in the others, one that never does. If they
        share the model, each has one that steps its part.

        Of several ones the first one.
        """
        return self._inner_optimizers.optimizers[0]

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedule of each inner optimizer; empty if there are none."""
        return self._inner_optimizers.schedulers

    @property
    def scheduler(self) -> Any | None:
        """The first of them; ``None`` if there is none."""
        return self.schedulers[0] if self.schedulers else None

    def _followed_schedules(self) -> Sequence[Any]:
        return self.schedulers

    @property
    def position(self) -> int:
        """Where schedules of the inner learning rate stand."""
        return self.news.position if self.swarm is None else int(self.swarm.position)

    @property
    def state(self) -> Any:
        """Statistics of the inner optimizers; only the first process has any, unless they share the model."""
        return {key: value for each in self._inner_optimizers.optimizers for key, value in each.state.items()}

    @state.setter
    def state(self, _: Any) -> None:
        """Ignored: the base class sets an empty state, but the state is that of the inner optimizers."""

    # --- outer parameters ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use_outer_parameters(self) -> Iterator[None]:
        """Inside this context the model holds the outer parameters, in all processes."""
        if self._is_in_context:
            yield
            return
        self.show_outer_parameters()
        self._is_in_context = True
        try:
            yield
        finally:
            self._is_in_context = False
            self.show_own_parameters()

    def show_outer_parameters(self) -> None:
        """Put the outer parameters into the model, in all processes, until :meth:`show_own_parameters`."""
        if self.swarm is None:
            self._follow()
            return
        with self._deciding():
            self.swarm.show_outer_parameters()

    def show_own_parameters(self) -> None:
        """Put this peer's own parameters back into the model, in all processes."""
        if self.swarm is None:
            self._follow()
            return
        with self._deciding():
            self.swarm.show_own_parameters()

    def finish_background_work(self) -> None:
        """Training has ended: the model gets the outer parameters, in all processes."""
        self.show_outer_parameters()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of the first process, see :meth:`shoal.DiLoCo.state_dict`; save it only there. If the processes share
        the model, all must call this, and each saves the state of its own part."""
        if self._part is None:
            return super().state_dict()
        if self.swarm is None:
            self._follow()
            state = self._part.state_dict()
        else:
            with self._deciding():
                state = self.swarm.state_dict()
        state[OWN]["part"] = [self._processes.rank, self._processes.size, self._sharding]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the first process' :meth:`state_dict`; all processes must call this with the same state.

        If they share the model, each must call it with its own state.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        if self._part is not None:
            self._load_part(self._part, state_dict)
            return
        if self.swarm is None:
            schedules = (state_dict.get(OWN) or {}).get("schedulers")
            self._own.load_state_dict(without_statistics(state_dict), schedules)
            self._follow()
            return
        with self._deciding():
            self.swarm.load_state_dict(state_dict)

    def _load_part(self, part: ProcessDiLoCo, state_dict: Mapping[str, Any]) -> None:
        own, error, version = state_dict.get(OWN) or {}, None, None
        expected = [self._processes.rank, self._processes.size, self._sharding]
        try:
            if "outer" in own:
                if (saved := own.get("part")) != expected:
                    whose, here = (
                        "a peer that is not sharded" if each is None else f"process {each[0]} of {each[1]} ({each[2]})"
                        for each in (saved, expected)
                    )
                    raise ValueError(
                        f"the checkpoint is of {whose}, and this is {here}: load in each process what a process of the "
                        "same rank has saved, with as many processes and the same sharding"
                    )
                version = part.version_of(own["outer"])
        except ValueError as e:
            error = e
        versions = self._processes.tell_all((None if error is None else str(error), version))
        if error is not None:
            raise error
        for rank, (reason, _) in enumerate(versions):
            if reason is not None:
                raise ValueError(f"process {rank} of this peer has no checkpoint that fits: {reason}")
        if any(other != version for _, other in versions):
            raise ValueError(
                "the checkpoints of the processes of this peer are of different moments: load those that were saved "
                "together"
            )
        failure = None
        try:
            part.load_state_dict(state_dict)
        except Exception as e:
            failure = e
        self._processes.add_up(0, failure)
        if self.swarm is None:
            self._follow(None, failure)
        else:
            with self._deciding():
                pass

    # --- processes that share the model -------------------------------------------------------------------------------

    def _share(
        self,
        main: Sequence[torch.Tensor],
        optimizer: Any,
        params: list[Any],
        *,
        dht: DHT | None,
        fragments: int | Sequence[Iterable[torch.Tensor]] = 1,
        batch_size_per_step: int | None = None,
        process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        """The constructor, if the processes share the model."""
        check_options(optimizer, options)
        processes, self._parameters = Processes(process_group, main[0].device), main
        self._processes, self.batch_size_per_step = processes, batch_size_per_step
        self._has_told_of_sizes, self._is_shut_down, self.reuse_grad_buffers = False, False, False
        self.steps_each_batch = True  # a scaler unscales its gradients before they are clipped
        self.news = ProcessMessage(Command.CARRY_ON)
        self.swarm = None
        if not processes.agree_on([len(main), sum(parameter.numel() for parameter in main)]):
            raise ValueError("the processes of this peer train models of different sizes")
        self._sharding = describe_sharding(processes, main)
        if without := [rank for rank, (has_dht,) in enumerate(processes.hear_all([dht is not None])) if not has_dht]:
            raise ValueError(
                "the processes of this peer share the model, so each of them exchanges its own part: give each one a "
                f"DHT of its own, also process {without[0]}"
            )
        self._modules = sharded_modules(main)
        # They share memory with the parameters, and get their gradients for a moment.
        self._leaves = [local_part(parameter).requires_grad_(parameter.requires_grad) for parameter in main]
        leaf_of = {id(parameter): leaf for parameter, leaf in zip(main, self._leaves, strict=True)}
        error = None
        try:
            trained = [parameter for parameter in main if parameter.requires_grad and parameter.numel()]
            options["fragments"] = [[leaf_of[id(p)] for p in each] for each in divide(main, trained, fragments)]
            options |= {"dht": dht, "optimizer": optimizer, "params": with_parameters(params, self._leaves)}
            if processes.is_first:
                self._part = self.swarm = LeadingDiLoCo(processes, self._sharding, main, **options)
            else:
                self._part = FollowingDiLoCo(processes, **options)
            check_elementwise(self.opt)
        except Exception as e:
            error = e
        try:
            processes.add_up(0, error)
            if self.swarm is None:
                self._follow(None, error)
            else:
                with self._deciding():
                    self.swarm.agree()
        except BaseException:
            if self._part is not None:
                self._part.shutdown()
            raise
        self._become_torch_optimizer(has_others=True)

    @uncompiled
    def step(
        self, closure: Callable[[], Any] | None = None, batch_size: int | None = None, grad_scaler: Any = None
    ) -> Any:
        """Make an inner step with the gradients of all processes, then do what the first process decides.

        See :meth:`shoal.DiLoCo.step`. All processes must call it.
        """
        if self._part is None:
            return super().step(closure, batch_size, grad_scaler)
        if self._is_shut_down:
            raise ReactorError("this optimizer is shut down and trains with nobody any more: make a new one")
        error, loss, scaler, samples, is_finite = None, None, None, 0, True
        try:
            samples, scaler = self._check_step(batch_size, grad_scaler)
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if samples and scaler is not None:
                is_finite = scaler.unscale_batch(self, ends=True)
        except Exception as e:
            # The others wait for this process, so tell them first; the error is raised below.
            error = e
        told = self._processes.hear_all([samples, is_finite, error is not None])
        counts, total = [count for count, _, _ in told], 0
        if all(finite and not has_failed for _, finite, has_failed in told):
            total = sum(counts)
            self._warn_of_sizes(counts)
        elif scaler is not None:
            scaler.note_overflow(self)
        before = self._part.inner_steps
        try:
            if total and error is None:
                try:
                    for leaf, parameter in zip(self._leaves, self._parameters, strict=True):
                        leaf.grad = local_gradient(parameter)
                except Exception as e:
                    error = e
            self._processes.add_up(0, error)
            if self.swarm is None:
                self._follow(scaler, error)
            else:
                with self._deciding():
                    self._samples_of_step = total or self._samples_of_step
                    self.swarm.step(batch_size=total)
        finally:
            for leaf in self._leaves:
                leaf.grad = None
        if scaler is not None and self._part.inner_steps > before:
            scaler.note_global_step()
        return loss

    def load_state_from_peers(self, **kwargs: Any) -> bool:
        """Download the state of another peer; all processes get it.

        Args:
            kwargs: see :meth:`shoal.DiLoCo.load_state_from_peers`.

        Returns:
            Whether there was a donor whose state fits and is not older than this one.
        """
        if not isinstance(self._part, FollowingDiLoCo):
            return super().load_state_from_peers(**kwargs)
        self._part.has_taken_over = False
        self._follow()
        return self._part.has_taken_over

    def _what_changed(self) -> tuple[bool, bool]:
        return super()._what_changed() if self._part is None else (False, False)

    def _obey(self, word: ProcessMessage, scaler: GradScaler | None) -> None:
        if isinstance(self._part, FollowingDiLoCo):
            self._processes.obey(self._part.obey)
        else:
            super()._obey(word, scaler)

    def _use_news(self) -> None:
        super()._use_news()
        if isinstance(self._part, FollowingDiLoCo):
            self._part.follow(self.news.epoch)
        if self._part is not None:
            # Whole parameters that a module has kept since its last pass would be out of date.
            for module in self._modules:
                module.reshard()

    def shutdown(self) -> None:
        """Leave the run. Idempotent; processes need not call it at the same time."""
        if self._part is None:
            super().shutdown()
        else:
            self._is_shut_down = True
            self._part.shutdown()


# What steps a matrix as a whole.
_LOOKS_AT_WHOLE = ("Adafactor", "Muon", "Shampoo", "SOAP", "LAMB", "LARS")


def check_options(optimizer: Any, options: Mapping[str, Any]) -> None:
    """Check that the options of a peer go together with parameters that its processes share.

    Raises:
        ValueError: they do not.
    """
    if not callable(optimizer) or isinstance(optimizer, (torch.optim.Optimizer, Sequence)):
        raise ValueError(
            "the parameters are sharded, and each process steps its part: give one function that makes the optimizer, "
            "such as optimizer=torch.optim.AdamW, and params="
        )
    if options.get("auxiliary"):
        raise ValueError("an auxiliary peer has no batches: one process is enough for it")
    if options.get("fragment_sync_delay", 0) != 0:
        raise ValueError(
            f"fragment_sync_delay={options['fragment_sync_delay']!r}: the processes of a sharded peer exchange their "
            "parts together, while training stands still. Leave it out"
        )
    if options.get("average") == PARAMETERS:
        raise ValueError("average='parameters' is not for sharded models, whose parts must have one version")
    if options.get("guard", "members") != "members" or options.get("aggregation") is not None:
        raise ValueError(
            "guard='open' and aggregation= judge whole messages, of which no process of a sharded peer has all: leave "
            "them out"
        )
    if options.get("check_state") is not None:
        raise ValueError(
            "check_state= is called in the first process alone, which cannot run a sharded model without the others: "
            "leave it out"
        )
    for name in ("model", "extra_tensors"):
        if options.get(name) is not None and len([*options[name].parameters()] if name == "model" else options[name]):
            raise ValueError(
                f"{name}= is not for sharded models: only parameters of the optimizer are exchanged. Leave it out"
            )
    if found := {"quorum", "target_group_size"} & (options.get("averager_opts") or {}).keys():
        raise ValueError(
            f"{found.pop()} in averager_opts: all parts of a sharded model must be averaged over the same peers: leave "
            "it out"
        )


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer may step parts of parameters.

    Raises:
        ValueError: it needs whole ones.
    """
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _LOOKS_AT_WHOLE:
            raise ValueError(
                f"{kind.__name__} looks at whole parameters, and each process has only parts: use an optimizer that "
                "treats each value by itself, such as AdamW, Adam, SGD or Lion"
            )


def describe_sharding(processes: Processes, parameters: Sequence[torch.Tensor]) -> str:
    """Names how the processes divide the parameters; peers that divide them otherwise have another name.

    Raises:
        ValueError: several processes have the same values.
    """
    held = held_boxes(processes, parameters)
    for number, (parameter, boxes) in enumerate(zip(parameters, held, strict=True)):
        full = [box for box in boxes if volume(box)]
        if len(set(full)) < len(full):
            what = "is sharded, and has copies" if is_dtensor(parameter) else "is not sharded, so that it is"
            raise ValueError(
                f"parameter {number}, of shape {tuple(parameter.shape)}, {what} in several processes, which would "
                "exchange it several times: shard all parameters with fully_shard, over a mesh of one dimension"
            )
    layouts: list[Any] = list(parameters)
    placements = {repr(placement) for layout in layouts for placement in layout.placements}
    digest = hashlib.sha256(repr(held).encode()).hexdigest()[:16]
    return f"{', '.join(sorted(placements))}, parts {digest}"
