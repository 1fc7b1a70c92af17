"""Names of experts, and the prefixes under which the DHT lists them.

An expert's *uid* is the name of a type and at least one number: ``ffn.3``, ``block2.1.23``. The numbers are the
expert's coordinates in a grid. A *prefix* has a dot at its end and may have no numbers: ``ffn.``, ``block2.1.``.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

from shoal.p2p import PeerID

ExpertUID: TypeAlias = str
ExpertPrefix: TypeAlias = str
Coordinate: TypeAlias = int
Score: TypeAlias = float

UID_DELIMITER = "."
FLAT_EXPERT = -1
"""Stands for the number of an expert whose uid has one number only: such an expert is listed under its own uid."""

_NUMBER = r"\.(?:0|[1-9][0-9]*)"
_UID = re.compile(rf"[^.]+(?:{_NUMBER})+")
_PREFIX = re.compile(rf"[^.]+(?:{_NUMBER})*\.")
_WITH_NUMBER = re.compile(rf"([^.]+(?:{_NUMBER})*\.)(0|[1-9][0-9]*|{FLAT_EXPERT})\.*")


class ExpertInfo(NamedTuple):
    """An expert and the peer that runs it."""

    uid: ExpertUID
    peer_id: PeerID | None


def is_valid_uid(maybe_uid: str) -> bool:
    """Whether a text is the uid of an expert."""
    return _UID.fullmatch(maybe_uid) is not None


def is_valid_prefix(maybe_prefix: str) -> bool:
    """Whether a text is a prefix of uids, with the dot at its end."""
    return _PREFIX.fullmatch(maybe_prefix) is not None


def split_uid(uid_or_prefix: ExpertUID | ExpertPrefix) -> tuple[ExpertPrefix, Coordinate]:
    """Split off the last number: ``a.1.2`` and ``a.1.2.`` give ``("a.1.", 2)``.

    Raises:
        ValueError: there is no number.
    """
    match = _WITH_NUMBER.fullmatch(uid_or_prefix)
    if match is None:
        raise ValueError(f"{uid_or_prefix!r} does not end with a number, as in 'expert.1' or 'expert.1.2.'")
    return match[1], int(match[2])
