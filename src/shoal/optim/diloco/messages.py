"""What peers send each other about updates: messages and their weights, statements, and requests.

A lossy codec sends less than the peer wants to. With *error feedback* the rest is kept, multiplied by a factor, and
added to the next message::

    wanted = feedback * error + difference
    sent = what others decode of the codec's bytes of ``wanted``
    error = wanted - sent, but only where the message has counted

Codecs work on a fixed grid of blocks, so the peer knows before a round what others will decode, no matter which group
it finds and how the group divides the vector. A failed round changes nothing.

Before a round each member states which versions it has (:class:`OuterStatement`). A peer that lacks a few updates asks
others for their means and makes these updates itself; means are small beside the outer parameters and their momentum.
After a download that took longer than a slot, it makes up for the updates since in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from shoal.averaging import RoundResult
from shoal.averaging.finite import all_finite
from shoal.averaging.state.download import OwnedState
from shoal.base.logs import words_of
from shoal.base.serializer import MSGPackSerializer
from shoal.compression import Blockwise4BitQuantization, CompressionBase, CompressionInfo, TensorRole
from shoal.optim.history.journal import HASH_BYTES, MOST, Count, Entry, Hash, Update, hash_of, parse_entries

STATISTICS = b"inner"
"""The name of the part of the state with the statistics of the inner optimizers."""
EXTRA = b"extra"
"""The name of the part with the extra tensors."""

Staleness = Callable[[int], float]
"""Returns the factor for a pseudo-gradient, from its age in versions."""

WEIGHTINGS = ("batch", "samples")

PARAMETERS = "parameters"
AVERAGES = ("pseudo_gradients", PARAMETERS)
"""Values of the option ``average``: what rounds average."""


@dataclass(frozen=True)
class Effort:
    """The inner steps behind a pseudo-gradient that have moved the model, and their samples."""

    steps: int = 0
    samples: int = 0

    def __add__(self, other: Effort) -> Effort:
        return Effort(self.steps + other.steps, self.samples + other.samples)

    def __sub__(self, other: Effort) -> Effort:
        return Effort(self.steps - other.steps, self.samples - other.samples)

    def weight(self, weighting: str) -> float:
        """The weight in the mean.

        A pseudo-gradient is a sum over steps. So every sample counts the same if the weight is the mean batch size,
        samples / steps. ``"samples"`` favours fast peers twice, as is usual in federated averaging.
        """
        if self.steps == 0:
            return 0.0
        return self.samples / self.steps if weighting == "batch" else float(self.samples)


def usual_staleness(versions: int) -> float:
    """The default discount: 1 / √(1 + age)."""
    return 1 / math.sqrt(1 + versions)


def discount(staleness: Staleness, versions: int) -> float:
    """The factor for a pseudo-gradient that is this many versions old; 1 for a fresh one.

    Raises:
        ValueError: the user's function returns no number from 0 to 1.
    """
    if versions == 0:
        return 1.0
    factor = float(staleness(versions))
    if not 0 <= factor <= 1:
        raise ValueError(f"staleness must return a factor from 0 to 1, but for {versions} versions it gave {factor}")
    return factor


def default_feedback(codec: CompressionBase) -> float:
    """The feedback factor that suits a codec. The fewer values it sends, the older the error becomes."""
    if codec.sparse:
        return 0.95
    return 1.0 if isinstance(codec, Blockwise4BitQuantization) else 0.0


@dataclass
class Contribution:
    """This peer's work for the next update of a fragment, since its last message that counted."""

    codec: CompressionBase
    """The codec of messages."""
    feedback: float = 0.0
    """The share of :attr:`error` that is added to the next message; 0: no error is kept."""
    effort: Effort = Effort()
    age: int = 0
    """By how many versions the outer parameters have advanced since then."""
    is_fresh: bool = False
    """This peer has just joined, and has not been in a slot of this fragment from the beginning."""
    error: torch.Tensor | None = None
    """What counted messages have left out; ``None``: nothing."""

    def count(self, samples: int) -> None:
        """An inner step has been made with this many samples; 0: it has not moved the model."""
        if samples:
            self.effort += Effort(1, samples)

    def miss(self, versions: int) -> None:
        """The outer parameters have advanced by this many versions without this work, if there is any."""
        self.age += versions if self.effort.steps else 0

    @torch.no_grad()
    def write(self, vector: torch.Tensor, factor: float = 1.0) -> torch.Tensor | None:
        """Make a message of a difference. Nothing else changes until the message has counted.

        Args:
            vector: the difference, finite float32 values on the CPU. It becomes the message.
            factor: the discount of an old message. What it takes away does not count as left out.

        Returns:
            What the message leaves out, to become :attr:`error` if it counts; ``None``: no error is kept.
        """
        if not self.feedback:
            if factor != 1:
                vector.mul_(factor)
            return None
        if self.error is not None:
            # Not fused, as everywhere in rounds: fused operations round differently on different machines.
            vector.add_(self.error * self.feedback)
        left = vector.clone()
        if factor != 1:
            vector.mul_(factor)
        _, sent = self.codec.compress_and_decode(vector, CompressionInfo.from_tensor(vector, role=TensorRole.GRADIENT))
        return left.sub_(sent if factor in (0, 1) else sent.div(factor))

    def forget(self) -> None:
        """What this peer has done is lost."""
        self.effort, self.age, self.error = Effort(), 0, None


# --- updates ----------------------------------------------------------------------------------------------------------

# A member of a round is named by this many bytes of a hash. Chosen: no two members of a run share a name. An update
# holds at most this many bytes of names: those of 8,192 members.
_NAME_BYTES, _MOST_BYTES_OF_NAMES = 8, 2**16


def has_counted(update: Update, peer: bytes) -> bool:
    """Whether the message of a peer counted in an update."""
    name = _name(peer)
    return any(update.names[n : n + _NAME_BYTES] == name for n in range(0, len(update.names), _NAME_BYTES))


def who_counted(result: RoundResult) -> bytes:
    """The short names, concatenated, of the members whose messages are in a result; the same at all members."""
    weights = zip(result.peers, result.weights, strict=True)
    return b"".join(_name(peer.to_bytes()) for peer, weight in weights if weight)[:_MOST_BYTES_OF_NAMES]


def _name(peer: bytes) -> bytes:
    return hash_of(peer)[:_NAME_BYTES]


def packed(mean: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A lossless copy of a mean that takes less memory, if possible.

    Averages that were sent in half precision fit into it. Sparse ones are kept as positions and values.
    """
    bits = mean.view(torch.int32)
    positions = bits.nonzero().flatten()  # of the bits, because a negative zero must survive
    if 2 * len(positions) * mean.element_size() < mean.numel() * 2:
        return positions.to(torch.int32), mean[positions]
    for narrow in (torch.float16, torch.bfloat16):
        copy = mean.to(narrow)
        if torch.equal(copy.to(torch.float32).view(torch.int32), bits):
            return (copy,)
    return (mean.clone(),)


def unpacked(tensors: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """The mean that :func:`packed` was given, bit by bit.

    Raises:
        ValueError: this is no mean of that many values.
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


# --- before a round ---------------------------------------------------------------------------------------------------


class OuterStatement(msgspec.Struct, frozen=True):
    """A member's statement about its outer parameters before a round."""

    entries: tuple[Entry, ...]
    steps: Count = 0
    """Inner steps behind its contribution, and their samples."""
    samples: Count = 0
    expected: Count = 1
    """How many members it expects, itself included."""
    digest: Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES)] = b""
    """A hash of the bits of its newest outer parameters; empty if they are not compared in this round."""
    done: Count = 0
    """What it has done in the slot: inner steps, or samples if slots are counted in samples."""
    known: Entry | None = None
    """The newest version that it has heard of in a group and still lacks; ``None``: it lacks none."""

    def dump(self) -> Any:
        """The statement as plain values."""
        return msgspec.to_builtins(self, builtin_types=(bytes,))

    @classmethod
    def parse(cls, value: object) -> OuterStatement | None:
        """Read a member's statement; ``None`` if it is malformed."""
        try:
            said = msgspec.convert(value, cls)
            parse_entries(said.entries)
            return said
        except (msgspec.ValidationError, ValueError):
            return None


def has_other_bits(statements: Sequence[OuterStatement | None], own: int, clients: Collection[int] = ()) -> bool:
    """Whether a member's outer parameters have the same version as those of most others, but other bits.

    In a tie, the members with the smaller digest are right. Bits that only clients have are never right.

    Args:
        statements: of all members, in order.
        own: position of the member.
        clients: positions of members from which nobody can download anything.
    """
    mine = statements[own]
    if mine is None or not mine.digest:
        return False
    newest = mine.entries[-1]
    told = [
        (n, each.digest) for n, each in enumerate(statements) if each and each.digest and each.entries[-1] == newest
    ]
    counts, to_be_had = Counter(digest for _, digest in told), {digest for n, digest in told if n not in clients}
    return mine.digest != min(counts, key=lambda digest: (digest not in to_be_had, -counts[digest], digest))


# --- what peers ask each other ----------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """What a peer asks others for, of one fragment."""

    version: int
    """It asks for all updates after this one."""
    known: Entry | None = None
    """The newest update that it has heard of in groups. If it is given, a donor that has nothing after ``version``
    refuses, and so has no vote."""


def request_for(wanted: Mapping[int, Wanted]) -> bytes:
    """The name of a part of the state: what is wanted, by fragment."""
    return MSGPackSerializer.dumps([[fragment, *each] for fragment, each in sorted(wanted.items())])


def parse_request(part: bytes, fragments: int) -> dict[int, Wanted]:
    """Decode the bytes of :func:`request_for`. A malformed request asks for nothing."""
    try:
        listed = msgspec.convert(MSGPackSerializer.loads(part), list[tuple[Count, Count, Entry | None]])
    except (msgspec.ValidationError, ValueError):
        return {}
    return {fragment: Wanted(version, known) for fragment, version, known in listed if fragment < fragments}


class _Described(NamedTuple):
    """An update of a fragment, without its tensors."""

    fragment: Count
    version: Annotated[int, msgspec.Meta(ge=1, le=MOST)]
    after: Hash
    round_id: Annotated[bytes, msgspec.Meta(max_length=128)]  # a hash, or the id of a peer with two numbers
    samples: Count
    names: Annotated[bytes, msgspec.Meta(max_length=_MOST_BYTES_OF_NAMES)]
    tensors: Annotated[int, msgspec.Meta(ge=1, le=2)]
    """How many tensors it has."""


class _Found(msgspec.Struct):
    updates: list[_Described]


def answer(found: Mapping[int, Iterable[Update]]) -> OwnedState:
    """Updates of some fragments as a part of the state."""
    listed = [(fragment, each) for fragment, kept in sorted(found.items()) for each in kept]
    updates = [_Described(n, *each[:4], each.names, len(each.tensors)) for n, each in listed]
    tensors = [tensor for _, each in listed for tensor in each.tensors]
    return OwnedState(msgspec.to_builtins(_Found(updates), builtin_types=(bytes,)), tensors)


def parse_answer(metadata: Any, tensors: Sequence[torch.Tensor], fragments: int) -> dict[int, list[Update]]:
    """Decode what :func:`answer` returned: for some fragments, consecutive updates.

    Raises:
        ValueError: it is malformed.
    """
    try:
        described = msgspec.convert(metadata, _Found).updates
    except msgspec.ValidationError as e:
        raise ValueError(f"no updates: {words_of(e)}") from e
    left, found = list(tensors), dict[int, list[Update]]()
    for n, version, after, round_id, samples, names, count in described:
        if n >= fragments or count > len(left):
            raise ValueError(f"no update of {fragments} fragments, with {count} of {len(left)} tensors: fragment {n}")
        found.setdefault(n, []).append(Update(version, after, round_id, samples, tuple(left[:count]), names))
        del left[:count]
    for kept_of_one in found.values():
        if any(later.version != earlier.version + 1 for earlier, later in itertools.pairwise(kept_of_one)):
            raise ValueError("updates must follow each other")
    return found
