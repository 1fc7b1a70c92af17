"""Parameters that the processes of a peer share, because of ``fully_shard`` (FSDP2) or tensor parallelism.

Such a parameter is a DTensor: each process holds a *part* of it, a box of its index space. The swarm averages whole
tensors. So the first process has a *stand-in* for each of these parameters, a whole tensor in the memory of the host.
The swarm's optimizer trains the stand-ins. Two kinds of transfers connect them with the parts:

- *gathering*, before a global step: each process puts its part of the gradients into a bucket of zeros. The sum of
  the buckets of all processes arrives at the first one, which adds it to the whole sums on its host.
- *spreading*, after it: the first process sends buckets of new values, and each process takes what belongs to its part.

A bucket is on the device of the process group and holds at most ``BUCKET_BYTES``, for any size of the model. It covers
boxes of one or more whole tensors; a tensor that is too large is cut into several boxes. So no device ever holds more
than its parts and a bucket or two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.optim.consistency import owners_of
from shoal.optim.gradient_accumulator import GradientAccumulator
from shoal.optim.ranks import processes as several
from shoal.optim.setup.devices import is_dtensor, is_sharded_module, local_part

Span = tuple[int, int]
Box = tuple[Span, ...]
"""For each dimension, where it begins and ends."""


@dataclass(frozen=True)
class Share:
    """Which part of a tensor this process holds, and which processes hold the same."""

    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]
    """Ranks in this peer of the processes that hold exactly this box, in order."""


def check_sharded(
    optimizer: Any, changing: Iterable[torch.Tensor], reuse_grad_buffers: bool, options: Mapping[str, Any]
) -> None:
    """Check that the options of a peer fit parameters that its processes share.

    Args:
        optimizer: as the user gives it.
        changing: further tensors that are averaged.
        reuse_grad_buffers, options: see :class:`~shoal.Optimizer`.

    Raises:
        ValueError: they do not.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"the parameters of this {type(optimizer).__name__} are sharded, and the first process steps whole ones on "
            "the CPU: give a function that makes the optimizer, such as optimizer=torch.optim.AdamW, and params="
        )
    if any(map(is_dtensor, changing)):
        raise ValueError(
            "a tensor in extra_tensors=, or one of model= that the optimizer does not have, is sharded: only "
            "parameters of the optimizer may be. Add it to params=, or leave model= out"
        )
    if reuse_grad_buffers:
        raise ValueError("sharded gradients cannot accumulate in place: leave reuse_grad_buffers=True out")
    if options.get("check_state") is not None:
        raise ValueError(
            "check_state= is called in the first process alone, which cannot run a sharded model without the others: "
            "leave it out"
        )


def box_of_part(parameter: torch.Tensor) -> Box:
    """The box of a parameter that this process holds; all of it if the parameter is not shared.

    Raises:
        ValueError: it is laid out in an unknown way.
    """
    spans = [(0, size) for size in parameter.shape]
    if not is_dtensor(parameter):
        return tuple(spans)
    layout: Any = parameter
    coordinate = layout.device_mesh.get_coordinate()
    if coordinate is None:  # this process has no part of it
        return tuple((0, 0) for _ in spans)
    cuts = [(axis, placement) for axis, placement in enumerate(layout.placements) if not placement.is_replicate()]
    # A strided cut divides the result of a later axis of the mesh: FSDP2 divides the parts of tensor parallelism.
    for axis, placement in sorted(cuts, key=lambda cut: hasattr(cut[1], "split_factor")):
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ValueError(f"a parameter of shape {tuple(layout.shape)} has the placement {placement}: shard it")
        start, stop = spans[dim]
        size = -(-(stop - start) // layout.device_mesh.size(axis))  # as torch.chunk: the last ones may be smaller
        start = min(stop, start + size * coordinate[axis])
        spans[dim] = start, min(stop, start + size)
    found, expected = tuple(local_part(parameter).shape), tuple(stop - start for start, stop in spans)
    if found != expected and 0 in expected and 0 in found:
        return tuple((0, 0) for _ in spans)
    if found != expected:
        raise ValueError(
            f"a parameter of shape {tuple(layout.shape)} has the placements {layout.placements}, and a part of shape "
            f"{found} in this process, where {expected} was expected: shard it with fully_shard, or leave it whole"
        )
    return tuple(spans)


def held_boxes(processes: several.Processes, parameters: Sequence[torch.Tensor]) -> list[list[Box]]:
    """For each parameter, the boxes of all processes by rank.

    Raises:
        ValueError: the processes of this peer together do not hold a whole parameter.
        ProcessGroupError: another process has ended.
    """
    told = processes.share([box_of_part(parameter) for parameter in parameters])
    held = [list(boxes) for boxes in zip(*told, strict=True)]
    for index, (parameter, boxes) in enumerate(zip(parameters, held, strict=True)):
        found = sum(map(volume, set(boxes)))
        if found != parameter.numel():
            raise ValueError(
                f"the {len(told)} processes of this peer hold {found} of the {parameter.numel()} values of "
                f"parameter {index}: give process_group= all processes that it is sharded over"
            )
    return held


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The part of the gradient that is in this process."""
    if parameter.grad is None or not is_dtensor(parameter.grad):
        return parameter.grad
    layout: Any = parameter
    gradient: Any = layout.grad
    if tuple(gradient.placements) != tuple(layout.placements):  # tensor parallelism leaves partial sums
        gradient = gradient.redistribute(placements=layout.placements)
    return local_part(gradient)


def sharded_modules(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """The modules around these parameters for which ``fully_shard`` was called."""
    _, around = owners_of(parameters, None)
    return [module for module in around if is_sharded_module(module)]


class Shards:
    """The parameters of a peer's model, some of which its processes share.

    All processes call the same methods in the same order.

    Args:
        processes: those of this peer.
        parameters: the user's, in the order of the optimizer.

    Raises:
        ValueError: the processes of this peer together do not hold a whole parameter.
        ProcessGroupError: another process has ended.
    """

    def __init__(self, processes: several.Processes, parameters: Sequence[torch.Tensor]) -> None:
        self._processes, self._parameters = processes, list(parameters)
        self._shares = self._find_shares()
        self._shared = [index for index, parameter in enumerate(parameters) if is_dtensor(parameter)]
        self._trained = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
        self.whole = list(parameters)
        """In the first process, whole parameters: the stand-ins, and parameters that are not shared. In the others, the
        user's parameters."""
        if processes.is_first:
            for index in self._shared:
                layout = parameters[index]
                empty = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
                self.whole[index] = torch.nn.Parameter(empty, layout.requires_grad)
        self._modules = sharded_modules(parameters)
        # The leaves share memory with the parameters, and get their gradients for a moment.
        self._leaves = [local_part(parameters[index]).requires_grad_() for index in self._trained]
        self.accumulator = GradientAccumulator(self._leaves)
        """Sums of the gradients of this process' parts, and of parameters that are not shared."""

    def _find_shares(self) -> list[Share]:
        shares, rank = [], self._processes.rank
        for parameter, boxes in zip(self._parameters, held_boxes(self._processes, self._parameters), strict=True):
            holders = tuple(other for other, box in enumerate(boxes) if box == boxes[rank])
            shares.append(Share(tuple(parameter.shape), boxes[rank], holders))
        return shares

    # --- values -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_values(self) -> None:
        """Bring the values of the parts into the stand-ins."""
        parts = [local_part(self._parameters[index]) for index in self._shared]
        shares = [self._shares[index] for index in self._shared]
        for boxes, bucket in self._buckets(shares, parts):
            for (number, box), room in boxes:
                if shares[number].holders[0] == self._processes.rank:
                    _put_part(room, box, parts[number], shares[number])
            self._processes.reduce_to_first(bucket)
            if self._processes.is_first:
                for (number, box), room in boxes:
                    self.whole[self._shared[number]][_slices(box)].copy_(room)

    @torch.no_grad()
    def spread_values(self) -> None:
        """Bring the values of the first process' whole parameters into the parts, and into the others' copies."""
        # Whole parameters that a module has kept since its last pass would be out of date.
        for module in self._modules:
            module.reshard()
        parts = [local_part(parameter) for parameter in self._parameters]
        for boxes, bucket in self._buckets(self._shares, parts):
            if self._processes.is_first:
                for (number, box), room in boxes:
                    room.copy_(self.whole[number][_slices(box)])
            self._processes.broadcast_from_first(bucket)
            for (number, box), room in boxes:
                if self.whole[number] is not self._parameters[number] or not self._processes.is_first:
                    _take_part(room, box, parts[number], self._shares[number])

    # --- gradients ----------------------------------------------------------------------------------------------------

    def accumulate(self, samples: int, loss_scale: float) -> None:
        """Add the present gradients.

        Args:
            samples: of this batch in all processes together; the mean gradients of all processes have equal weight.
            loss_scale: see :meth:`GradientAccumulator.add`.
        """
        for leaf, index in zip(self._leaves, self._trained, strict=True):
            leaf.grad = local_gradient(self._parameters[index])
        try:
            self.accumulator.add(samples, loss_scale)
        finally:
            for leaf in self._leaves:
                leaf.grad = None

    @torch.no_grad()
    def gather_gradients(self, sums: Sequence[torch.Tensor] = ()) -> None:
        """Add the accumulated gradients to the whole sums of the first process, and start again from zero.

        If several processes hold the same values, their mean counts.

        Args:
            sums: one for each trained parameter, in units of single samples; none in all processes but the first.
        """
        self.accumulator.change_unit(1)
        parts, shares = self.accumulator.buffers, [self._shares[index] for index in self._trained]
        for boxes, bucket in self._buckets(shares, parts):
            for (number, box), room in boxes:
                _put_part(room, box, parts[number], shares[number], 1 / len(shares[number].holders))
            self._processes.reduce_to_first(bucket)
            if self._processes.is_first:
                for (number, box), room in boxes:
                    target = sums[number]
                    target[_slices(box)].add_(room.to(target.device))
        self.accumulator.reset()

    # --- buckets ------------------------------------------------------------------------------------------------------

    def _buckets(
        self, shares: Sequence[Share], parts: Sequence[torch.Tensor]
    ) -> Iterator[tuple[list[tuple[tuple[int, Box], torch.Tensor]], torch.Tensor]]:
        """Buckets of zeros, each with its boxes, their tensors' numbers, and the room for each box in the bucket."""
        for dtype in sorted({part.dtype for part in parts}, key=str):
            limit = max(1, several.BUCKET_BYTES // dtype.itemsize)
            boxes = [
                (number, box)
                for number, (share, part) in enumerate(zip(shares, parts, strict=True))
                if part.dtype == dtype
                for box in _boxes(share.shape, limit)
            ]
            for group in _grouped(boxes, limit):
                sizes = [volume(box) for _, box in group]
                bucket = torch.zeros(sum(sizes), dtype=dtype, device=self._processes.device)
                rooms = [
                    flat.view([stop - start for start, stop in box])
                    for flat, (_, box) in zip(torch.split(bucket, sizes), group, strict=True)
                ]
                yield list(zip(group, rooms, strict=True)), bucket


def _grouped(boxes: Sequence[tuple[int, Box]], limit: int) -> Iterator[list[tuple[int, Box]]]:
    """Groups of boxes with at most ``limit`` values together."""
    group: list[tuple[int, Box]] = []
    size = 0
    for number, box in boxes:
        if group and size + volume(box) > limit:
            yield group
            group, size = [], 0
        group.append((number, box))
        size += volume(box)
    if group:
        yield group


def _boxes(shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most ``limit`` values: by its first dimension, and by the next ones if need be."""
    if math.prod(shape) <= limit:
        if math.prod(shape):
            yield tuple((0, size) for size in shape)
        return
    row = math.prod(shape[1:])
    step = max(1, limit // row)
    for start in range(0, shape[0], step):
        first = start, min(shape[0], start + step)
        for rest in _boxes(shape[1:], limit):
            yield (first, *rest)


def volume(box: Box) -> int:
    """How many values a box has."""
    return math.prod(stop - start for start, stop in box)


def _slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """The box as an index, of a whole tensor or of a part that begins elsewhere."""
    starts = [0] * len(box) if origin is None else [start for start, _ in origin]
    return tuple(slice(start - zero, stop - zero) for (start, stop), zero in zip(box, starts, strict=True))


def _common(one: Box, other: Box) -> Box | None:
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def _put_part(room: torch.Tensor, box: Box, part: torch.Tensor, share: Share, factor: float = 1.0) -> None:
    """Put what a part has of a box into the room for that box."""
    common = _common(box, share.box)
    if common is not None:
        inside = room[_slices(common, box)]
        inside.copy_(part[_slices(common, share.box)])
        if factor != 1:
            inside.mul_(factor)


def _take_part(room: torch.Tensor, box: Box, part: torch.Tensor, share: Share) -> None:
    """Take what belongs to a part out of the room for a box."""
    common = _common(box, share.box)
    if common is not None:
        part[_slices(common, share.box)].copy_(room[_slices(common, box)])
