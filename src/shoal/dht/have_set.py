"""What an asker has already, told in a few bytes, so that the answer leaves it out.

A walk asks several nodes near a key one after the other, and most of what each would tell is what others have told
before: contacts of the same nodes, and the same entries of one dictionary. So a request carries a fingerprint of four
bytes of each node and entry that the asker has, and the answer has only the rest.

A fingerprint is the top of the product of the last 64 bits of a number and a random odd factor, which is drawn for each
request (multiply-shift hashing; Dietzfelbinger et al., A reliable randomized algorithm for the closest-pair problem,
Journal of Algorithms 1997). Two of them match by chance in one of two billion requests. The numbers are hashes, so
nobody can make up a node or an entry that hides another one: they would have to try 2^64 keys.
"""

from __future__ import annotations

import functools
import hashlib
import random
import struct
from collections.abc import Callable, Iterable

from shoal.base.serializer import MSGPackSerializer
from shoal.dht.routing import DHTID, ID_BITS
from shoal.dht.storage import MAX_SUBKEY_REMEMBERED, DictionaryDHTValue, Subkey, ValueWithExpiration
from shoal.p2p import PeerID

_FACTOR_BYTES, _FINGERPRINT_BYTES = 8, 4
MAX_KNOWN = 1024
MAX_KNOWN_BYTES = _FACTOR_BYTES + MAX_KNOWN * _FINGERPRINT_BYTES
MAX_NUMBERS_REMEMBERED = 4096
Entry = tuple[Subkey, ValueWithExpiration[bytes]]
"""One entry of a dictionary."""
_SHIFT, _MASK = 8 * (_FACTOR_BYTES - _FINGERPRINT_BYTES), (1 << 8 * _FACTOR_BYTES) - 1


def _factor_of(packed: bytes) -> int:
    return int.from_bytes(packed[:_FACTOR_BYTES], "big") | 1


def pack_known(numbers: Iterable[int], rng: random.Random) -> bytes:
    """The random factor, and the fingerprints of nodes and entries, the first :data:`MAX_KNOWN` of them."""
    drawn = rng.randbytes(_FACTOR_BYTES)
    factor = _factor_of(drawn)
    fingerprints = [(number * factor & _MASK) >> _SHIFT for number in numbers][:MAX_KNOWN]
    return drawn + struct.pack(f"<{len(fingerprints)}I", *fingerprints)


class HaveSet:
    """Tells what an asker has.

    Args:
        packed: what :func:`pack_known` has made, or anything else: then a little is left out that nobody has.
    """

    def __init__(self, packed: bytes) -> None:
        self._factor = _factor_of(packed)
        count = max(0, len(packed) - _FACTOR_BYTES) // _FINGERPRINT_BYTES
        self._fingerprints = frozenset(struct.unpack_from(f"<{count}I", packed, _FACTOR_BYTES) if count else ())

    def __bool__(self) -> bool:
        return bool(self._fingerprints)

    def __contains__(self, number: int) -> bool:
        return (number * self._factor & _MASK) >> _SHIFT in self._fingerprints

    def unknown(self, nodes: Iterable[tuple[DHTID, PeerID]]) -> list[tuple[DHTID, PeerID]]:
        """The nodes, with their peers, that the asker does not have."""
        factor, fingerprints = self._factor, self._fingerprints
        return [node for node in nodes if (node[0] * factor & _MASK) >> _SHIFT not in fingerprints]

    def without_known(
        self,
        key_id: int,
        dictionary: DictionaryDHTValue[bytes],
        most: int = 0,
        in_turns: Callable[[list[Entry]], list[Entry]] = list,
    ) -> DictionaryDHTValue[bytes]:
        """The entries of a dictionary that the asker does not have; the dictionary itself if that is all of them.

        Args:
            most: only among this many, which are drawn by the random factor; 0: among all. Those that were stored last
                would be those of the peer that stores most often.
            in_turns: puts entries into the order in which they are chosen, from the order that was drawn.
        """
        entries = list(dictionary.items())
        is_drawn = 0 < most < len(entries)
        numbers = numbers_of_entries(key_id, entries) if self._fingerprints or is_drawn else {}
        if is_drawn:
            drawn = sorted(entries, key=lambda entry: numbers[entry[0]] * self._factor & _MASK)
            entries = in_turns(drawn)[:most]
        elif not any(number in self for number in numbers.values()):
            return dictionary
        rest: DictionaryDHTValue[bytes] = DictionaryDHTValue()
        rest.maxsize = dictionary.maxsize
        with rest.freeze():
            for subkey, item in entries:
                if not numbers or numbers[subkey] not in self:
                    rest.store(subkey, item.value, item.expiration_time)
        rest.latest_expiration_time = dictionary.latest_expiration_time
        return rest


def numbers_of_entries(key_id: int, entries: Iterable[Entry]) -> dict[Subkey, int]:
    """A number for each entry of a key, which changes when the entry is stored anew."""
    return {
        subkey: (_known_number_of if is_short(subkey) else _number_of)(key_id, item.expiration_time, subkey)
        for subkey, item in entries
    }


def is_short(subkey: Subkey) -> bool:
    """Whether the number of an entry is worth remembering. Others than texts and bytes may be equal and yet differ in
    packed form, such as 1 and 1.0."""
    return type(subkey) in (bytes, str) and len(subkey) <= MAX_SUBKEY_REMEMBERED


def _number_of(key_id: int, expiration_time: float, subkey: Subkey) -> int:
    packed = key_id.to_bytes(ID_BITS // 8, "big") + struct.pack("<d", expiration_time) + MSGPackSerializer.dumps(subkey)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=ID_BITS // 8).digest(), "big")


# The same entries are told by several nodes, and asked for again and again.
_known_number_of = functools.lru_cache(MAX_NUMBERS_REMEMBERED)(_number_of)
