"""What an archive holds: the tensors of a state under their names, and how to reassemble the state.

The state of an :class:`~shoal.Optimizer` is a list of tensors: parameters, extra tensors, buffers of averagers, and the
statistics of the optimizer. The state of :class:`~shoal.DiLoCo` has flat vectors, one for each fragment: outer
parameters, then statistics of the outer optimizer; after these come the statistics of inner optimizers. A flat vector
is cut at the borders of its parameters, so that each has its name and shape. Gaps between parameters are kept, too, so
that the vector can be restored bit for bit.

Names come from a peer, and may be anything. They are keys inside files, never parts of paths. Tensors of the model keep
their names; if shoal needs a name that is taken, it chooses another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.averaging.finite import first_not_finite
from shoal.averaging.state.download import State
from shoal.base.logs import one_line, quoted
from shoal.compression.base import plain_name

PREFIXES = {"Optimizer": "{}_state_averager", "DiLoCo": "{}_outer_averager"}
"""By kind of optimizer: the prefix of the averager that serves its state, with a place for the name of the run."""
EPOCHS = {"Optimizer": "epoch", "DiLoCo": "slot"}
"""By kind of optimizer: the name under which its state has the epoch of the run."""
MODEL, TRAINING = "model", "training"
"""The two kinds of files: the tensors of the model by their names there, and all else that training needs."""
_LONGEST_NAME = 500  # chosen
# The safetensors format reserves this name for its metadata.
_RESERVED_NAME = "__metadata__"
# Parameters without names get numbers, as many as a donor claims. Chosen: more than any model has.
_MOST_PARAMETERS = 2**20


@dataclass(frozen=True)
class Piece:
    """A tensor that is stored under a name of its own."""

    name: str
    part: str
    tensor: torch.Tensor
    is_whole: bool = True
    """Whether it is a tensor of the state; otherwise it is a part of a flat vector."""


def epoch_of(kind: str, metadata: Any) -> int:
    """The epoch of a state.

    Raises:
        ValueError: it has none.
    """
    epoch = metadata.get(EPOCHS[kind]) if isinstance(metadata, Mapping) else None
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise ValueError(f"the state has no valid {EPOCHS[kind]}: {quoted(epoch)}")
    return epoch


def take_apart(kind: str, state: State) -> list[list[Piece]]:
    """The pieces of each tensor of a state, in order. Only a flat vector has several.

    Raises:
        ValueError: the state is malformed, or has values that are not finite, so that newcomers would refuse it.
    """
    metadata, tensors = state
    epoch_of(kind, metadata)
    try:
        named = list((_of_optimizer if kind == "Optimizer" else _of_diloco)(metadata, tensors))
    except (LookupError, TypeError, AttributeError, OverflowError, RuntimeError) as e:  # what torch raises, too
        raise ValueError(f"the state of the {kind} is malformed: {one_line(repr(e))}") from e
    if not all(named):
        raise ValueError(f"the state of the {kind} has an empty fragment")
    _make_names_differ(named)
    pieces = [piece for each in named for piece in each]
    names = {piece.name for piece in pieces}
    if len(names) < len(pieces) or max(map(len, names), default=0) > _LONGEST_NAME:
        raise ValueError("names of tensors in the state are too long, or occur twice")
    if _RESERVED_NAME in names:
        raise ValueError(f"a tensor of the state is named {_RESERVED_NAME!r}, which no file of tensors can have")
    if (bad := first_not_finite([piece.tensor for piece in pieces])) is not None:
        raise ValueError(f"values of {quoted(pieces[bad].name)} are NaN or infinite")
    return named


@dataclass(frozen=True)
class CheckedState:
    """A state of a run, or of one of its stages, that was checked and can be stored."""

    run: str
    kind: str
    state: State
    pieces: list[list[Piece]]
    written: str = ""
    """If it comes from an earlier archive: when that was written."""

    @classmethod
    def of(cls, run: str, kind: str, state: State, written: str = "") -> CheckedState:
        """Check a state.

        Raises:
            ValueError: as :func:`take_apart`.
        """
        return cls(run, kind, state, take_apart(kind, state), written)

    @property
    def epoch(self) -> int:
        return epoch_of(self.kind, self.state.metadata)

    @property
    def named(self) -> bool:
        """Whether the parameters have names; otherwise they have numbers."""
        names = self.state.metadata.get("names")
        return bool(names.get("parameters") if self.kind == "Optimizer" and isinstance(names, Mapping) else names)


def with_epoch(kind: str, state: State, epoch: int) -> State:
    """The same state as one of another epoch: what training continues from in place of a state that is lost."""
    return State({**state.metadata, EPOCHS[kind]: epoch}, state.tensors)


def _make_names_differ(named: Sequence[list[Piece]]) -> None:
    """Rename each tensor outside the model whose name is taken."""
    taken = {piece.name for each in named for piece in each if piece.part == MODEL}
    for each in named:
        for place, piece in enumerate(each):
            name = piece.name
            if piece.part != MODEL:
                while name in taken and len(name) <= _LONGEST_NAME:
                    name = f"shoal.{name}"
                each[place] = replace(piece, name=name)
                taken.add(name)


def _of_optimizer(metadata: Any, tensors: Sequence[torch.Tensor]) -> Iterator[list[Piece]]:
    counts, names = metadata["tensors"], metadata["names"]
    parameters, extra, buffers = (_count(counts[kind]) for kind in ("parameters", "extra", "buffers"))
    statistics = metadata["optimizer_metadata"]["names"]
    if parameters + extra + buffers + len(statistics) != len(tensors):
        raise ValueError(f"the state has {len(tensors)} tensors, but its metadata says otherwise")
    of_parameters = _names_or_numbers(names["parameters"], parameters)
    unnamed = extra - len(names["extra"])
    for index, tensor in enumerate(tensors):
        number = index - parameters
        if index < parameters:
            name, part = of_parameters[index], MODEL
        elif unnamed <= number < extra:
            name, part = plain_name(str(names["extra"][number - unnamed])), MODEL
        elif number < extra:
            name, part = f"extra.{number}", TRAINING
        elif number < extra + buffers:
            name, part = f"buffer.{number - extra}", TRAINING
        else:
            name, part = _name_of_statistic(statistics[number - extra - buffers], of_parameters), TRAINING
        yield [Piece(name, part, tensor)]


def _of_diloco(metadata: Any, tensors: Sequence[torch.Tensor]) -> Iterator[list[Piece]]:
    layouts = [each["layout"] for each in metadata["fragments"]]
    names = _names_or_numbers(metadata["names"], 1 + max(_count(number) for each in layouts for number, _, _ in each))
    left = iter(tensors)
    for number, (fragment, layout) in enumerate(zip(metadata["fragments"], layouts, strict=True)):
        vector = next(left)
        yield list(_cut(vector, layout, names, f"fragment.{number}", None))
        statistics = fragment["optimizer"]["names"]
        if _count(fragment["tensors"]) != 1 + len(statistics):
            raise ValueError("the statistics of a fragment have no names")
        for path in statistics:
            tensor, of = next(left), f"outer.{number}.{str(path).rpartition('/')[2]}"
            if tensor.shape == vector.shape:
                yield list(_cut(tensor, layout, names, of, of))
            else:
                yield [Piece(of, TRAINING, tensor)]
    for number, inner in enumerate(metadata.get("inner") or ()):
        for path in inner["names"]:
            # The second and later optimizers do not tell which parameters of the model are theirs.
            of = _name_of_statistic(path, names if number == 0 else ())
            yield [Piece(of if number == 0 else f"{of}.{number}", TRAINING, next(left))]
    if any(True for _ in left):
        raise ValueError("the state has more tensors than it says")


def _cut(
    vector: torch.Tensor, layout: Sequence[Any], names: Sequence[str], filling: str, of: str | None
) -> Iterator[Piece]:
    """Cut a flat vector into its parameters and the gaps between them.

    Args:
        layout: for each parameter in order: its number, its offset and its shape.
        filling: names the gaps.
        of: the statistic that the vector holds; ``None`` = the parameters themselves.
    """
    end = 0
    for number, offset, shape in [*layout, (-1, len(vector), [])]:
        if not end <= offset <= len(vector):
            raise ValueError(f"a parameter cannot begin at {quoted(offset)}")
        if offset > end:
            yield Piece(f"{filling}.filling.{end}", TRAINING, vector[end:offset], is_whole=False)
        if number < 0:
            return
        end = offset + math.prod(map(_count, shape))
        name = names[number] if of is None else f"{of}.{names[number]}"
        yield Piece(name, MODEL if of is None else TRAINING, vector[offset:end].view(shape), is_whole=False)


def _name_of_statistic(path: Any, names: Sequence[str]) -> str:
    """The name of a statistic, such as ``statistic.exp_avg.layer.weight`` for the path ``/3/exp_avg``."""
    number, _, what = str(path).removeprefix("/").partition("/")
    known = number.isdecimal() and int(number) < len(names)
    return f"statistic.{what}.{names[int(number)] if known else number}"


def _names_or_numbers(names: Any, count: int) -> list[str]:
    """The names of parameters, or their numbers if they have none."""
    if not 0 <= count <= _MOST_PARAMETERS:
        raise ValueError(f"a state cannot have {count} parameters")
    if not names:
        return list(map(str, range(count)))
    if len(names) < count or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the state has {len(names)} names for {count} parameters")
    return list(map(plain_name, names))


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{quoted(value)} is not a number of at least 0")
    return value


Order = list[str | list[str]]
"""For each tensor of a state, the name under which it is stored; for a flat vector, the names of its pieces."""


def order_of(pieces: Sequence[Sequence[Piece]]) -> Order:
    """The order that :func:`put_together` needs besides the tensors."""
    return [each[0].name if each[0].is_whole else [piece.name for piece in each] for each in pieces]


def put_together(order: Order, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Reassemble the tensors of a state from those that are stored under names.

    Raises:
        ValueError: a named tensor is missing, or would be used twice (so the state is never larger than what is
            stored); or pieces of a flat vector differ in their type.
    """
    used = set[str]()

    def take(name: str) -> torch.Tensor:
        if name not in tensors or name in used:
            raise ValueError(f"the tensor {quoted(name)} is {'used twice' if name in used else 'not there'}")
        used.add(name)
        return tensors[name]

    def join(names: Sequence[str]) -> torch.Tensor:
        pieces = [take(name).reshape(-1) for name in names]
        if len({piece.dtype for piece in pieces}) != 1:
            raise ValueError(f"a flat vector has no pieces, or pieces of several types: {quoted(list(names))}")
        return torch.cat(pieces)

    return [take(names) if isinstance(names, str) else join(names) for names in order]
