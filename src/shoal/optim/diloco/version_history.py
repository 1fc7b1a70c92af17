"""Which outer updates are behind a peer's outer parameters, and whose parameters go on if members of a round differ.

A *chain* has a link for each version: a hash of the link before and of the round that made the update. Two peers are of
one *lineage* if the newest link of one is among the latest links of the other. So a peer that only lacks the newest
updates is told from one that trains another model.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shoal.averaging.majorities import PEERS_PER_LIAR
from shoal.base.logs import quoted
from shoal.compression.base import bytes_of

HASH_BYTES = 16
# A message tells no more links than this, whatever its sender has.
MOST_LINKS = 64
# In groups of at most so many members, one is enough to say that there is a version that no member has.
MOST_WHO_TRUST_ONE = 3
MOST = 2**62
"""No version and no number of samples is larger, whatever members claim."""


class OuterVersion(NamedTuple):
    """One version of outer parameters."""

    version: int
    hash: bytes
    samples: int
    """How many samples all updates up to this one are made of."""


def hash_of(*data: bytes | memoryview) -> bytes:
    """A short hash of bytes in a row."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for each in data:
        digest.update(each)
    return digest.digest()


def next_link(last: OuterVersion, round_id: bytes, samples: int) -> OuterVersion:
    """The link that continues another one, see :meth:`VersionHistory.extend`."""
    return OuterVersion(last.version + 1, hash_of(last.hash, round_id), min(MOST, last.samples + samples))


class VersionHistory:
    """The latest links of one fragment's outer parameters.

    Args:
        links: the latest ones, in order; at least one.
        length: how many are kept.
    """

    def __init__(self, links: Iterable[OuterVersion], length: int) -> None:
        self._links = deque(links, maxlen=min(length, MOST_LINKS))

    @classmethod
    def begin(cls, values: torch.Tensor, length: int) -> VersionHistory:
        """The chain of parameters that have not been updated."""
        return cls([OuterVersion(0, hash_of(bytes_of(values)), 0)], length)

    @property
    def newest(self) -> OuterVersion:
        return self._links[-1]

    @property
    def links(self) -> tuple[OuterVersion, ...]:
        """The latest links, in order."""
        return tuple(self._links)

    def extend(self, round_id: bytes, samples: int) -> None:
        """Note an update.

        Args:
            round_id: names the round that has made it, and whose messages are in its result. So the two sides of a
                round that was split are of different lineages, because their results differ.
            samples: how many samples the update is made of.
        """
        self._links.append(next_link(self.newest, round_id, samples))

    def dump(self) -> list[list[Any]]:
        """Plain values."""
        return [list(link) for link in self._links]


def parse_links(value: object) -> tuple[OuterVersion, ...]:
    """Check links that another peer has told.

    Raises:
        ValueError: they are malformed.
    """
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MOST_LINKS:
        raise ValueError(f"no list of 1 to {MOST_LINKS} links: {quoted(value)}")
    links = []
    for each in value:
        match each:
            case [int(version), bytes(digest), int(samples)] if len(digest) == HASH_BYTES:
                links.append(OuterVersion(version, digest, samples))
            case _:
                raise ValueError(f"no link: {quoted(each)}")
    versions = [link.version for link in links]
    if versions != list(range(versions[0], versions[0] + len(links))) or versions[0] < 0 or versions[-1] > MOST:
        raise ValueError(f"links must follow each other: {versions}")
    if not all(0 <= link.samples <= MOST for link in links):
        raise ValueError("a link has an impossible number of samples")
    return tuple(links)


def steps_between(older: Sequence[OuterVersion], newer: Sequence[OuterVersion]) -> int | None:
    """How many updates lead from the newest link of one chain to that of another; ``None``: none do."""
    return newer[-1].version - older[-1].version if older[-1] in newer else None


@dataclass(frozen=True)
class OuterStatement:
    """What a member of a round says about its outer parameters."""

    links: tuple[OuterVersion, ...]
    steps: int = 0
    """Inner steps behind its contribution, and their samples."""
    samples: int = 0
    expected: int = 1
    """How many members it expects, itself included."""
    digest: bytes = b""
    """A hash of the bits of its outer parameters at its newest link; empty: it tells none this time."""
    done: int = 0
    """What it has done in the slot: inner steps, or samples if slots are counted in these."""
    known: OuterVersion | None = None
    """The newest version that it has heard of in a group and still lacks; ``None``: it lacks none."""

    def dump(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "links": [list(link) for link in self.links],
            "steps": self.steps,
            "samples": self.samples,
            "expected": self.expected,
            "digest": self.digest,
            "done": self.done,
            "known": None if self.known is None else list(self.known),
        }

    @classmethod
    def parse(cls, value: object) -> OuterStatement | None:
        """Read what a member has said; ``None`` if it makes no sense."""
        if not isinstance(value, Mapping):
            return None
        numbers = [value.get(name) for name in ("steps", "samples", "expected", "done")]
        if not all(isinstance(each, int) and 0 <= each <= MOST for each in numbers):
            return None
        digest = value.get("digest", b"")
        if not isinstance(digest, bytes) or len(digest) not in (0, HASH_BYTES):
            return None
        try:
            steps, samples, expected, done = numbers
            links, heard = parse_links(value.get("links")), value.get("known")
            known = None if heard is None else parse_links([heard])[0]
            return cls(links, steps, samples, expected, digest, done, known)  # type: ignore[arg-type]
        except ValueError:
            return None


@dataclass(frozen=True)
class VersionChoice:
    """What the members of a round derive from what all have said; the same at all of them."""

    base: OuterVersion | None
    """What this round updates; ``None``: nobody has said what it has."""
    behind: Mapping[int, int]
    """How many updates members lack of it, by their positions. Those that are not here have lost, and begin anew."""


def settle(statements: Sequence[OuterStatement | None], clients: Collection[int] = ()) -> VersionChoice:
    """Decide which lineage goes on.

    It is the one with most members; of several, the one that is made of most samples; then the one with the smaller
    hash. So the first peers of a run, which may have begun with different parameters, agree by the same rule as the two
    sides of a run that was split. But nobody could take over a lineage or a version that only clients have.

    It goes on from its newest version, so that nobody makes a second update of what others have updated before. Where
    there are at least five members, more than a fifth of them must have that version, or have heard of it in a round:
    so a few liars cannot lead the others to a version that does not exist. If some have heard of a newer one that is
    not here, there is no update: all get that one first. Where there are at least four, two must have heard of it.

    Args:
        statements: of all members, in order; ``None``: this one counts for no lineage.
        clients: positions of members from which nobody can download anything.
    """
    said = {member: statement for member, statement in enumerate(statements) if statement is not None}
    told = {member: statement.links for member, statement in said.items()}
    lineages: list[set[int]] = []
    for member, links in told.items():
        kin = [each for each in lineages if any(_are_related(links, told[other]) for other in each)]
        lineages = [each for each in lineages if each not in kin] + [{member}.union(*kin)]
    if not lineages:
        return VersionChoice(None, {})

    def rank(lineage: set[int]) -> tuple[bool, int, int, bytes]:
        newest = max((told[member][-1] for member in lineage), key=lambda link: (link.version, link.hash))
        smaller_is_better = bytes(255 - byte for byte in newest.hash)
        samples = max(told[member][-1].samples for member in lineage)
        return bool(lineage.difference(clients)), len(lineage), samples, smaller_is_better

    winners = max(lineages, key=rank)
    holders = {link: member for member in winners for link in told[member]}

    def heard_of(member: int) -> set[OuterVersion]:
        known, links = said[member].known, told[member]
        if known not in holders:
            return {*links}
        return {*links, *(link for link in told[holders[known]] if link <= known)}

    votes = Counter(link for member in winners for link in heard_of(member))
    common = [link for link, count in votes.items() if count > len(winners) // PEERS_PER_LIAR]
    to_be_had = {link for member in winners.difference(clients) for link in told[member]}
    base = max([link for link in common if link in to_be_had] or common or holders)
    heard = Counter(newer for member in winners if (newer := said[member].known) is not None)
    liars = max(len(winners) // PEERS_PER_LIAR, 1 if len(winners) > MOST_WHO_TRUST_ONE else 0)
    ahead = max((link for link, count in heard.items() if count > liars), default=base)
    if ahead.version > base.version:  # nobody here has it
        return VersionChoice(ahead, {n: max(1, ahead.version - told[n][-1].version) for n in sorted(winners)})
    known = {link for member in winners if base in told[member] for link in told[member] if link <= base}
    return VersionChoice(base, {n: base.version - told[n][-1].version for n in sorted(winners) if told[n][-1] in known})


def has_other_bits(statements: Sequence[OuterStatement | None], own: int, clients: Collection[int] = ()) -> bool:
    """Whether the outer parameters of a member are of the same version as those of most others, but not the same bits.

    As many members with either: those with the smaller digest are right. Bits that only clients have are never right.

    Args:
        statements: of all members, in order.
        own: position of the member.
        clients: positions of members from which nobody can download anything.
    """
    mine = statements[own]
    if mine is None or not mine.digest:
        return False
    newest = mine.links[-1]
    told = [(n, each.digest) for n, each in enumerate(statements) if each and each.digest and each.links[-1] == newest]
    counts, to_be_had = Counter(digest for _, digest in told), {digest for n, digest in told if n not in clients}
    return mine.digest != min(counts, key=lambda digest: (digest not in to_be_had, -counts[digest], digest))


def _are_related(one: Sequence[OuterVersion], other: Sequence[OuterVersion]) -> bool:
    return one[-1] in other or other[-1] in one
