"""What may stand under ``{run}_progress`` in the DHT, and who may write it.

The subkey of a record is the owner tag of a key: only whoever holds that key can write there. The record names a peer,
and has that peer's word that the tag is its own: its signature over the tag. So nobody can write in the name of a peer
but the peer itself, and every node that knows the run refuses what is forged or malformed.
"""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.schema import BytesWithPublicKey, SchemaValidator
from shoal.optim.progress import LocalTrainingProgress, ProgressRecord, parse_record
from shoal.p2p import PeerID
from shoal.p2p.identity import Identity, verify_signature

__all__ = ["LocalTrainingProgress", "TrainingProgressSchema", "endorse", "progress_validators"]

# Part of what is signed, so that no signature can be used elsewhere.
_PURPOSE = b"shoal progress owner 1"


def endorse(identity: Identity, owner_tag: bytes) -> bytes:
    """A peer's word that records under this tag are its own."""
    return identity.sign(_PURPOSE + owner_tag)


def _is_endorsed(record: ProgressRecord, owner_tag: bytes) -> bool:
    public_key = PeerID(record.peer_id).public_key
    return public_key is not None and verify_signature(public_key, record.endorsement, _PURPOSE + owner_tag)


def _check(records: dict[bytes, Any]) -> dict[bytes, Any]:
    for owner_tag, value in records.items():
        if value is not None and not _is_endorsed(parse_record(value), owner_tag):
            raise ValueError("a record in the name of another peer")
    return records


class TrainingProgressSchema(pydantic.BaseModel):
    """The progress of every peer, a :class:`LocalTrainingProgress` each, by owner tag. ``None``: it has left."""

    progress: Annotated[dict[BytesWithPublicKey, Any], pydantic.AfterValidator(_check)]


def progress_validators(prefix: str, private_key: PrivateKey) -> tuple[SchemaValidator, SignatureValidator]:
    """The rules for the records of one run, and the key that signs this peer's own."""
    return SchemaValidator(TrainingProgressSchema, prefix=prefix), SignatureValidator(private_key)
