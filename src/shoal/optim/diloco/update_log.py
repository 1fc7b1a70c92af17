"""Results of past rounds, which members keep for peers that have missed them.

A peer that lacks a few updates gets their means, which are small beside the outer parameters with their momentum, and
makes these updates itself. A download that takes longer than a slot is made up for in the same way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shoal.averaging import RoundResult
from shoal.averaging.finite import all_finite
from shoal.averaging.state.download import OwnedState
from shoal.base.logs import quoted
from shoal.base.serializer import MSGPackSerializer
from shoal.optim.diloco.version_history import HASH_BYTES, MOST, OuterVersion, hash_of, parse_links

# Members of a round are named by so many bytes of a hash, and there are at most so many bytes of names.
_NAME_BYTES, _MOST_BYTES_OF_NAMES = 8, 2**16
# A round is named by so many bytes at most.
_MOST_BYTES_OF_ROUND = 128
# Bytes that are kept for each byte of the outer parameters: the outer parameters and their momentum have two.
USUAL_SHARE, SHARE_FOR_NEWCOMERS = 2, 8


class LoggedUpdate(NamedTuple):
    """One outer update, for peers that make it later."""

    version: int
    """Of the outer parameters after it."""
    after: bytes
    """The hash of the link that it continues."""
    round_id: bytes
    samples: int
    tensors: tuple[torch.Tensor, ...]
    """The mean, see :func:`packed`."""
    names: bytes = b""
    """Whose messages have counted, see :func:`who_counted`."""

    def counts(self, peer: bytes) -> bool:
        """Whether the message of a peer has counted."""
        name = _name(peer)
        return any(self.names[n : n + _NAME_BYTES] == name for n in range(0, len(self.names), _NAME_BYTES))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def who_counted(result: RoundResult) -> bytes:
    """Short names of the members whose messages are in a result, in a row; the same at all members."""
    weights = zip(result.peers, result.weights, strict=True)
    return b"".join(_name(peer.to_bytes()) for peer, weight in weights if weight)[:_MOST_BYTES_OF_NAMES]


def _name(peer: bytes) -> bytes:
    return hash_of(peer)[:_NAME_BYTES]


def packed(mean: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A copy of a mean that takes less memory, if it can do so without any loss.

    Averages that were sent in half precision fit into it. Of sparse ones the positions and values are enough.
    """
    bits = mean.view(torch.int32)
    positions = bits.nonzero().flatten()  # not of the values: a negative zero is another value than zero
    if 2 * len(positions) * mean.element_size() < mean.numel() * 2:
        return positions.to(torch.int32), mean[positions]
    for narrow in (torch.float16, torch.bfloat16):
        copy = mean.to(narrow)
        if torch.equal(copy.to(torch.float32).view(torch.int32), bits):
            return (copy,)
    return (mean.clone(),)


def unpacked(tensors: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """The mean again, to the bit.

    Raises:
        ValueError: this is no mean of so many values.
    """
    match tensors:
        case [dense] if dense.shape == (length,) and dense.dtype in (torch.float16, torch.bfloat16, torch.float32):
            mean = dense.to(torch.float32, copy=True)
        case [positions, values] if (
            positions.dtype == torch.int32
            and values.dtype == torch.float32
            and positions.dim() == 1
            and positions.shape == values.shape
            and (not len(positions) or 0 <= int(positions.min()) <= int(positions.max()) < length)
        ):
            mean = torch.zeros(length, dtype=torch.float32, device="cpu")
            mean[positions.long()] = values
        case _:
            raise ValueError(f"no mean of {length} values")
    if not all_finite(mean):
        raise ValueError("a mean has values that are not finite")
    return mean


class KeptResults:
    """The latest results of one fragment. Its owner sees to it that two threads do not use it at the same time.

    Args:
        length: of the fragment.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._kept: deque[LoggedUpdate] = deque()
        self.serves_newcomers: Callable[[], bool] = lambda: False
        """Whether peers are downloading the outer parameters of this one: they will want what comes after these."""

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._kept)

    def add(self, update: LoggedUpdate) -> None:
        """Keep an update."""
        if self._kept and self._kept[-1].version != update.version - 1:
            self._kept.clear()
        self._kept.append(update)
        share = SHARE_FOR_NEWCOMERS if self.serves_newcomers() else USUAL_SHARE
        while len(self._kept) > 1 and self.nbytes > share * 4 * self._length:
            self._kept.popleft()

    def clear(self) -> None:
        """Forget all: this peer goes on from other outer parameters."""
        self._kept.clear()

    def since(self, version: int) -> list[LoggedUpdate]:
        """All updates that come after this version; none if the first of them is not known any more."""
        found = [each for each in self._kept if each.version > version]
        return found if found and found[0].version == version + 1 else []


# --- what peers ask each other ----------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """What a peer asks others for, of one fragment."""

    version: int
    """All updates that come after this one."""
    known: OuterVersion | None = None
    """The newest one of which groups have told. Who has nothing after ``version`` then refuses, so that it has no vote.
    Who does not keep the updates any more gives its outer parameters, if they are of this version or came after it.
    """


OuterParameters = tuple[Any, list[torch.Tensor]]
"""Outer parameters with all that belongs to them, see :meth:`FragmentUpdates.dump`."""


def request_for(wanted: Mapping[int, Wanted]) -> bytes:
    """The name of a part of the state: what is wanted, by fragment."""
    return MSGPackSerializer.dumps([[fragment, *each] for fragment, each in sorted(wanted.items())])


def parse_request(part: bytes, fragments: int) -> dict[int, Wanted]:
    """Read what :func:`request_for` has made. Nothing is asked for by what makes no sense."""
    try:
        listed = MSGPackSerializer.loads(part)
    except ValueError:
        return {}
    wanted: dict[int, Wanted] = {}
    for each in listed if isinstance(listed, (list, tuple)) else ():
        match each:
            case [int(fragment), int(version), heard] if 0 <= fragment < fragments and 0 <= version <= MOST:
                try:
                    wanted[fragment] = Wanted(version, None if heard is None else parse_links([heard])[0])
                except ValueError:
                    continue
    return wanted


def answer(
    found: Mapping[int, Iterable[LoggedUpdate]], whole: Mapping[int, OuterParameters] | None = None
) -> OwnedState:
    """Updates of some fragments, and the outer parameters of others, as a part of the state."""
    listed = [(fragment, each) for fragment, kept in sorted(found.items()) for each in kept]
    updates = [[n, *each[:4], each.names, len(each.tensors)] for n, each in listed]
    states = [[n, metadata, len(tensors)] for n, (metadata, tensors) in sorted((whole or {}).items())]
    tensors = [tensor for _, each in listed for tensor in each.tensors]
    tensors += [tensor for _, (_, own) in sorted((whole or {}).items()) for tensor in own]
    return OwnedState({"updates": updates, "states": states}, tensors)


def parse_answer(
    metadata: Any, tensors: Sequence[torch.Tensor], fragments: int
) -> tuple[dict[int, list[LoggedUpdate]], dict[int, OuterParameters]]:
    """Read what :func:`answer` has made.

    Returns:
        For some fragments, updates that follow each other; for others, outer parameters that are still to be checked.

    Raises:
        ValueError: it makes no sense.
    """
    updates, states = (metadata.get(name) if isinstance(metadata, Mapping) else None for name in ("updates", "states"))
    if not isinstance(updates, (list, tuple)) or not isinstance(states, (list, tuple)):
        raise ValueError(f"no updates: {quoted(metadata)}")
    left, found, whole = list(tensors), dict[int, list[LoggedUpdate]](), dict[int, OuterParameters]()
    for each in updates:
        match each:
            case [int(fragment), int(version), bytes(after), bytes(of), int(samples), bytes(names), 1 | 2 as count] if (
                0 <= fragment < fragments
                and 0 < version <= MOST
                and 0 <= samples <= MOST
                and len(of) <= _MOST_BYTES_OF_ROUND
                and len(after) == HASH_BYTES
                and len(names) <= _MOST_BYTES_OF_NAMES
                and count <= len(left)
            ):
                kept = LoggedUpdate(version, after, of, samples, tuple(left[:count]), names)
                del left[:count]
                found.setdefault(fragment, []).append(kept)
            case _:
                raise ValueError(f"no update: {quoted(each)}")
    for each in states:
        match each:
            case [int(fragment), own, int(count)] if 0 <= fragment < fragments and 0 < count <= len(left):
                whole[fragment] = own, left[:count]
                del left[:count]
            case _:
                raise ValueError(f"no outer parameters: {quoted(each)}")
    for kept_of_one in found.values():
        if any(later.version != earlier.version + 1 for earlier, later in itertools.pairwise(kept_of_one)):
            raise ValueError("updates must follow each other")
    return found, whole
