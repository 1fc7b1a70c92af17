"""A layer that sends each sample to the experts of a grid that its gate rates best, and mixes their answers.

::

    input ─► gate (``proj``) ─► scores per dimension ─► beam search ─► experts of each sample
      │                              │                                        │
      └── rows of each expert ───────┼─── one request per expert ◄────────────┘
                                     ▼
                     softmax over the experts that answered ─► weighted sum of their outputs

An expert that fails, or does not answer in time, has no weight, and is avoided for a while. If a sample is left with
too few answers, all samples are sent once more, to experts that are not avoided.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from shoal.base.backoff import Backoffs
from shoal.base.extras import nested_flatten, nested_pack
from shoal.base.logs import Seldom
from shoal.base.tasks import cancel_and_wait
from shoal.dht import DHT
from shoal.errors import ProtocolError
from shoal.moe.beam_search import MoEBeamSearcher
from shoal.moe.expert import (
    DUMMY,
    RemoteExpert,
    RemoteExpertWorker,
    Schemas,
    Tensors,
    expert_backward,
    expert_forward,
    expert_info,
    flat_inputs,
    once,
)
from shoal.moe.uids import UID_DELIMITER, ExpertInfo, ExpertPrefix
from shoal.p2p import PeerID

T = TypeVar("T")
logger = logging.getLogger(__name__)
warn_seldom = Seldom(logger.warning)

ASKED_FOR_SCHEMAS = 8
"""How many experts are asked at once what the experts of a grid take. Chosen: one living server is enough."""
# An expert that has failed is avoided for so long, in seconds. Chosen: records of a dead server expire after a minute.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0


class RemoteMixtureOfExperts(nn.Module):
    """A mixture of the experts of a grid.

    Args:
        in_features: the width of the input.
        grid_size: how many numbers each dimension of the grid has.
        dht: a DHT of the swarm.
        uid_prefix: the uids of all experts begin with it, such as ``ffn.``.
        k_best: how many experts each sample is sent to.
        k_min: how many answers each sample needs at least.
        forward_timeout: most seconds for the answers; ``None``: each server may be silent for a minute.
        timeout_after_k_min: how many seconds to wait for more answers, once each sample has ``k_min`` of them.
        backward_k_min: how many gradients are needed at least, of all that are expected.
        backward_timeout: as ``forward_timeout``.
        detect_anomalies: refuse inputs and gradients that are not finite, and ignore experts that return such outputs.
        allow_zero_outputs: the output of a sample without any answer is zero, not an error.
        dht_kwargs: settings of :class:`MoEBeamSearcher`.
    """

    def __init__(
        self,
        *,
        in_features: int,
        grid_size: Sequence[int],
        dht: DHT,
        uid_prefix: ExpertPrefix,
        k_best: int,
        k_min: int = 1,
        forward_timeout: float | None = None,
        timeout_after_k_min: float | None = None,
        backward_k_min: int = 1,
        backward_timeout: float | None = None,
        detect_anomalies: bool = False,
        allow_zero_outputs: bool = False,
        **dht_kwargs: Any,
    ) -> None:
        super().__init__()
        if k_best < 1:
            raise ValueError(f"k_best must be positive, got {k_best}")
        if not 0 <= k_min <= k_best:
            raise ValueError(f"k_min must be from 0 to k_best, the number of experts that are asked: {k_min}, {k_best}")
        self._failures = failures = Backoffs(_FIRST_PAUSE, _LONGEST_PAUSE, time.monotonic)
        self.dht, self.grid_size = dht, tuple(grid_size)
        self.beam_search = MoEBeamSearcher(dht, uid_prefix, grid_size, is_usable=failures.is_due, **dht_kwargs)
        self.k_best, self.k_min, self.backward_k_min = k_best, k_min, backward_k_min
        self.forward_timeout, self.backward_timeout = forward_timeout, backward_timeout
        self.timeout_after_k_min = timeout_after_k_min
        self.detect_anomalies, self.allow_zero_outputs = detect_anomalies, allow_zero_outputs
        self.proj = nn.Linear(in_features, sum(grid_size))
        self._schemas: Schemas | None = None

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The weighted outputs of the experts, nested as theirs.

        Args:
            input: the first input of the experts, from which the gate chooses them. Between the first dimension, the
                samples, and the last there may be others, over which the gate averages.
            args: further inputs of the experts.
            kwargs: their keyword inputs.

        Raises:
            TimeoutError: a sample has fewer than ``k_min`` answers.
            RuntimeError: no experts were found, or a sample has no answer.
            ValueError: anomalies are to be detected, and the input has one.
        """
        grid_scores = self.proj(averaged(input)).split(self.grid_size, dim=-1)
        experts, mask, outputs = self._ask_experts(grid_scores, input, args, kwargs)
        scores = self.compute_expert_scores(grid_scores, experts)
        # Rows without answers are replaced, because the softmax of nothing is not a number.
        counted = torch.where(mask.any(-1, keepdim=True), scores.masked_fill(~mask, -math.inf), 0.0)
        weights = torch.softmax(counted, dim=-1) * mask
        return nested_pack([weighted(each, weights) for each in outputs], self.info["outputs_schema"])

    def compute_expert_scores(
        self, grid_scores: Sequence[torch.Tensor], batch_experts: Sequence[Sequence[RemoteExpert]]
    ) -> torch.Tensor:
        """The scores of the experts of each sample, as the gate can be trained by.

        Args:
            grid_scores: for each dimension a tensor of shape (samples, numbers).
            batch_experts: the experts of each sample.

        Returns:
            A tensor of shape (samples, most experts), filled up with minus infinity.
        """
        values, exists = self.values_of(grid_scores, batch_experts)
        return values.sum(0).masked_fill(~exists, -math.inf)

    def values_of(
        self, grid_values: Sequence[torch.Tensor], batch_experts: Sequence[Sequence[RemoteExpert]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the gate has for the numbers of each expert.

        Returns:
            A tensor of shape (dimensions, samples, most experts), and where there is an expert.
        """
        numbers, exists = self.numbers_of(batch_experts)
        numbers, exists = numbers.to(grid_values[0].device), exists.to(grid_values[0].device)
        return torch.stack([values.gather(1, each) for values, each in zip(grid_values, numbers, strict=True)]), exists

    def numbers_of(self, batch_experts: Sequence[Sequence[RemoteExpert]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of experts as a tensor of shape (dimensions, samples, most experts), and where there is one."""
        most = max(map(len, batch_experts), default=0)
        prefix, nothing = self.beam_search.uid_prefix, [0] * len(self.grid_size)
        numbers = []
        for experts in batch_experts:
            uids = [expert.uid.removeprefix(prefix).split(UID_DELIMITER) for expert in experts]
            numbers.append([[int(number) for number in uid] for uid in uids] + [nothing] * (most - len(experts)))
        shape = len(batch_experts), most, len(self.grid_size)
        counts = torch.tensor([len(experts) for experts in batch_experts], dtype=torch.int64, device="cpu")
        exists = counts[:, None] > torch.arange(most, device="cpu")
        return torch.tensor(numbers, dtype=torch.int64, device="cpu").reshape(shape).permute(2, 0, 1), exists

    @property
    def info(self) -> Schemas:
        """What the experts of the grid take and return. One of them is asked for it once.

        Raises:
            RuntimeError: no experts were found, or none of them answers.
        """
        if self._schemas is None:
            found: Any = self.beam_search.find_best_experts([[0.0] * n for n in self.grid_size], ASKED_FOR_SCHEMAS)
            self._learn_schemas(found)
        assert self._schemas is not None
        return self._schemas

    def _learn_schemas(self, experts: Collection[RemoteExpert]) -> None:
        if not experts:
            raise RuntimeError(
                f"no experts found with the prefix {self.beam_search.uid_prefix!r}: is a server running?"
            )
        groups = [_Group(expert, [0], [0]) for expert in [*experts][:ASKED_FOR_SCHEMAS]]
        # One answer is enough.
        waiting = _collect(groups, map(_schemas_of, groups), [1], None, 0.0)
        found, missed = RemoteExpertWorker.run_coroutine(waiting)
        if not found:
            raise RuntimeError(f"none of the experts that were found answers: {_told(groups, missed)}")
        self._schemas = next(iter(found.values()))

    def _ask_experts(
        self, grid_scores: Sequence[torch.Tensor], input: torch.Tensor, args: Any, kwargs: Any
    ) -> tuple[list[list[RemoteExpert]], torch.Tensor, tuple[torch.Tensor, ...]]:
        """Find the experts of each sample, and call them.

        Returns:
            The experts, and what :class:`_RemoteCallMany` returns.
        """
        if input.ndim < 2 or not len(input):
            raise ValueError(
                "a mixture of experts takes an input of shape (samples, …, features), with at least one sample, got "
                f"{tuple(input.shape)}"
            )
        on_cpu = [each.detach().cpu() for each in grid_scores]
        if any(each.isnan().any() for each in on_cpu):
            raise ValueError("inputs of a mixture of experts must be finite, and so must be its gate, ``proj``")
        inputs, timeout, began = ((input, *args), kwargs), self.forward_timeout, time.monotonic()
        try:
            return self._find_and_call(on_cpu, inputs, timeout)
        except TimeoutError:
            # Those that have failed are avoided from now on, and there may be others.
            left = None if timeout is None else timeout - (time.monotonic() - began)
            if left is not None and left <= 0:
                raise
            return self._find_and_call(on_cpu, inputs, left)

    def _find_and_call(
        self, grid_scores: Sequence[torch.Tensor], inputs: tuple[Any, Any], timeout: float | None
    ) -> tuple[list[list[RemoteExpert]], torch.Tensor, tuple[torch.Tensor, ...]]:
        experts: Any = self.beam_search.batch_find_best_experts(grid_scores, self.k_best)
        distinct = dict.fromkeys(expert for some in experts for expert in some)
        if self._schemas is None or not (distinct or self.allow_zero_outputs):
            self._learn_schemas(distinct)
        try:
            mask, *outputs = _RemoteCallMany.apply(  # type: ignore[no-untyped-call]
                *(DUMMY, experts, self.k_min, self.backward_k_min, self.timeout_after_k_min, timeout),
                *(self.backward_timeout, self.detect_anomalies, self.allow_zero_outputs, self.info),
                *flat_inputs(self.info, *inputs),
            )
        finally:
            for expert in distinct:
                if expert.has_answered is not None:
                    note = self._failures.succeed if expert.has_answered else self._failures.fail
                    note(ExpertInfo(expert.uid, expert.peer_id))
        return experts, mask, (*outputs,)


def averaged(input: torch.Tensor) -> torch.Tensor:
    """The input for the gate: the mean over all dimensions but the first and the last."""
    return input.mean(dim=tuple(range(1, input.ndim - 1))) if input.ndim > 2 else input


def weighted(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of outputs, of shape (samples, experts, …), over the experts."""
    shaped = weights.reshape(*weights.shape, *[1] * (outputs.ndim - 2))
    return (outputs * (shaped.to(outputs.dtype) if outputs.is_floating_point() else shaped)).sum(1)


# --- many calls at once -----------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Rows that are sent to one expert in one request."""

    expert: RemoteExpert
    samples: list[int]
    slots: list[int]
    """The place of the expert among those of the sample."""


async def _schemas_of(group: _Group) -> Schemas:
    return await expert_info(group.expert.uid, group.expert.stub, group.expert.timeout)


def _groups(experts_per_sample: Sequence[Sequence[RemoteExpert]], most_rows: int) -> list[_Group]:
    by_expert: dict[tuple[str, PeerID | None], _Group] = {}
    full: list[_Group] = []
    for sample, experts in enumerate(experts_per_sample):
        for slot, expert in enumerate(experts):
            key = expert.uid, expert.peer_id
            group = by_expert.setdefault(key, _Group(expert, [], []))
            group.samples.append(sample)
            group.slots.append(slot)
            if len(group.samples) >= most_rows:
                full.append(by_expert.pop(key))
    return [*full, *by_expert.values()]


async def _collect(
    groups: Sequence[_Group],
    calls: Iterable[Coroutine[Any, Any, T]],
    needed: Sequence[int],
    timeout: float | None,
    timeout_when_enough: float | None,
) -> tuple[dict[int, T], dict[int, str]]:
    """Wait for answers.

    Args:
        groups: the rows that are sent.
        calls: send them, and return the answers.
        needed: how many answers each sample needs.
        timeout: most seconds to wait.
        timeout_when_enough: most seconds to wait for others, once each sample has the answers that it needs.

    Returns:
        The answers that came, by the place of their group, and why others did not.
    """
    now = asyncio.get_running_loop().time
    ends_at = math.inf if timeout is None else now() + timeout
    places = {asyncio.ensure_future(call): place for place, call in enumerate(calls)}
    lacking, pending = Counter({sample: count for sample, count in enumerate(needed) if count > 0}), {*places}
    found: dict[int, T] = {}
    missed: dict[int, str] = {}
    try:
        while pending:
            if not lacking and timeout_when_enough is not None:
                ends_at = min(ends_at, now() + timeout_when_enough)
            left = None if ends_at == math.inf else max(0.0, ends_at - now())
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in sorted(done, key=places.__getitem__):
                place, error = places[task], task.exception()
                if error is None:
                    found[place] = task.result()
                    lacking -= Counter(groups[place].samples)  # keeps those above zero
                else:
                    missed[place] = f"{type(error).__name__}: {error}"
        missed |= {places[task]: "no answer in time" for task in pending}
    finally:
        await cancel_and_wait(*places)
    return found, missed


def _told(groups: Sequence[_Group], missed: Mapping[int, str]) -> str:
    """Log why answers did not come; returns the first cause for an error."""
    causes = []
    for place, cause in sorted(missed.items()):
        expert = groups[place].expert
        causes.append(f"expert {expert.uid} of peer {expert.peer_id}: {cause}")
        warn_seldom("no answer from expert %s of peer %s: %s", expert.uid, expert.peer_id, cause, about=expert.uid)
    return causes[0] if causes else "no experts were found"


def _check_finite(what: str, tensors: Iterable[torch.Tensor]) -> None:
    for each in tensors:
        if each.is_floating_point() and not each.isfinite().all():
            raise ValueError(f"{what} of a mixture of experts must be finite, got values that are not")


class _RemoteCallMany(torch.autograd.Function):
    """Calls different experts for each sample, and trains those that have answered."""

    @staticmethod
    def forward(
        ctx: Any,
        dummy: torch.Tensor,
        experts_per_sample: Sequence[Sequence[RemoteExpert]],
        k_min: int,
        backward_k_min: int,
        timeout_after_k_min: float | None,
        forward_timeout: float | None,
        backward_timeout: float | None,
        detect_anomalies: bool,
        allow_zero_outputs: bool,
        info: Schemas,
        *flat_inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Call the experts of each sample.

        Returns:
            A mask of shape (samples, most experts), true where there is an answer, and each output as a tensor of shape
            (samples, most experts, …), zero where there is none.
        """
        batch, most = len(experts_per_sample), max(map(len, experts_per_sample), default=0)
        if any(len(each) != batch for each in flat_inputs):
            raise ValueError(f"all inputs must have {batch} samples, got {[len(each) for each in flat_inputs]}")
        inputs = [each.detach().cpu() for each in flat_inputs]
        if detect_anomalies:
            _check_finite("inputs", inputs)
        groups = _groups(experts_per_sample, info["max_batch_size"])
        rows = [[each[group.samples] for each in inputs] for group in groups]

        async def call(group: _Group, rows: Tensors) -> list[torch.Tensor]:
            expert = group.expert
            timeout = expert.timeout if forward_timeout is None else None  # else all calls together have a limit
            outputs = await expert_forward(expert.uid, rows, info, expert.stub, timeout)
            if any(len(each) != len(group.samples) for each in outputs):
                raise ProtocolError(f"it returned other numbers of rows than {len(group.samples)}")
            if detect_anomalies:
                _check_finite("outputs", outputs)
            return outputs

        asked = [len(experts) for experts in experts_per_sample]
        needed = [min(k_min, count) for count in asked]
        waiting = _collect(groups, map(call, groups, rows), needed, forward_timeout, timeout_after_k_min)
        answers, missed = RemoteExpertWorker.run_coroutine(waiting)
        mask = torch.zeros(batch, most, dtype=torch.bool, device="cpu")
        kinds = _kinds([(_kind(tensors), len(groups[place].samples)) for place, tensors in answers.items()], info)
        outputs = [torch.zeros(batch, most, *shape, dtype=dtype, device="cpu") for shape, dtype in kinds]
        answered = []
        for place, tensors in sorted(answers.items()):
            if _kind(tensors) != kinds:
                missed[place] = "its outputs have other shapes than those of others"
                continue
            answered.append(groups[place])
            mask[groups[place].samples, groups[place].slots] = True
            for output, tensor in zip(outputs, tensors, strict=True):
                output[groups[place].samples, groups[place].slots] = tensor.detach()
        for group in groups:
            group.expert.has_answered = False
        for group in answered:
            group.expert.has_answered = True
        _check_enough(mask.sum(1).tolist(), asked, k_min, allow_zero_outputs, _told(groups, missed))
        ctx.groups, ctx.info, ctx.kinds = answered, info, kinds
        ctx.options = backward_k_min, timeout_after_k_min, backward_timeout, detect_anomalies
        ctx.save_for_backward(*flat_inputs)
        device = flat_inputs[0].device
        mask, outputs = mask.to(device), [each.to(device) for each in outputs]
        ctx.mark_non_differentiable(mask, *[each for each in outputs if not each.is_floating_point()])
        return mask, *outputs

    @staticmethod
    def backward(ctx: Any, grad_mask: torch.Tensor, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        backward_k_min, timeout_after_k_min, backward_timeout, detect_anomalies = ctx.options
        groups: list[_Group] = ctx.groups
        inputs = [each.detach().cpu() for each in ctx.saved_tensors]
        grads = [each.detach().cpu() for each in grad_outputs]
        if detect_anomalies:
            _check_finite("gradients", grads)
        tensors_of = []
        for _, samples, slots in groups:
            grad_rows = [
                each[samples, slots]
                if dtype.is_floating_point
                else torch.zeros(len(samples), *shape, dtype=dtype, device="cpu")
                for each, (shape, dtype) in zip(grads, ctx.kinds, strict=True)
            ]
            tensors_of.append(([each[samples] for each in inputs], grad_rows))

        async def call(group: _Group, tensors: tuple[Tensors, Tensors]) -> list[torch.Tensor]:
            expert = group.expert
            timeout = expert.timeout if backward_timeout is None else None
            return await expert_backward(expert.uid, *tensors, ctx.info, expert.stub, timeout)

        expected = Counter(sample for group in groups for sample in group.samples)
        needed = [min(backward_k_min, expected[sample]) for sample in range(len(inputs[0]))]
        waiting = _collect(groups, map(call, groups, tensors_of), needed, backward_timeout, timeout_after_k_min)
        answers, missed = RemoteExpertWorker.run_coroutine(waiting)
        cause = _told(groups, missed)
        count = sum(len(groups[place].samples) for place in answers)
        if groups and count < backward_k_min:
            raise TimeoutError(f"{count} gradients of experts came, but backward_k_min={backward_k_min}: {cause}")
        totals = [torch.zeros_like(each) for each in inputs]
        for place, tensors in sorted(answers.items()):
            rows = torch.tensor(groups[place].samples, device="cpu")
            for total, tensor in zip(totals, tensors, strict=True):
                if total.is_floating_point():
                    total.index_add_(0, rows, tensor.detach().to(total.dtype))
        there = [total.to(each.device) for total, each in zip(totals, ctx.saved_tensors, strict=True)]
        return *[None] * 10, *once(there)


Kinds = tuple[tuple[torch.Size, torch.dtype], ...]
"""The shape of one row of each output, and its type."""


def _kind(tensors: Tensors) -> Kinds:
    return tuple((each.shape[1:], each.dtype) for each in tensors)


def _kinds(answers: Iterable[tuple[Kinds, int]], info: Schemas) -> Kinds:
    """Shapes and types of the outputs: those of most samples, or as the schema says if no expert has answered.

    Samples count, not experts: memory is taken for all samples, and a few bad experts must not choose how much.
    """
    samples: Counter[Kinds] = Counter()
    for kind, count in answers:
        samples[kind] += count
    if samples:
        return max(samples, key=samples.__getitem__)
    return tuple((torch.Size(each.size[1:]), each.dtype) for each in nested_flatten(info["outputs_schema"]))


def _check_enough(
    counts: Sequence[int], asked: Sequence[int], k_min: int, allow_zero_outputs: bool, cause: str
) -> None:
    """Check how many of the experts that were asked have answered for each sample.

    Raises:
        TimeoutError: they are too few.
        RuntimeError: there is none, although none is needed.
    """
    pairs = [*zip(counts, asked, strict=True)]
    short = sum(count < min(k_min, most) for count, most in pairs)
    if short and (sum(counts) < k_min or not allow_zero_outputs):
        raise TimeoutError(
            f"{short} of {len(pairs)} samples have fewer than k_min={k_min} answers of experts; the first failure: "
            f"{cause}"
        )
    without = sum(not count and most > 0 for count, most in pairs)
    if without and not allow_zero_outputs:
        raise RuntimeError(
            f"{without} of {len(pairs)} samples have no answer of an expert: {cause}; with allow_zero_outputs=True "
            "their outputs would be zero"
        )
