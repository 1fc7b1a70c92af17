"""What may stand under ``{run}_progress`` in the DHT, and who may write it.

The subkey of a record is the owner tag of a signing key, so only the holder of that key can write there. The record
names a peer and carries that peer's signature over the tag. So only the peer itself can write in its name, and every
DHT node that knows the run refuses forged and malformed records.
"""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.schema import BytesWithPublicKey, SchemaValidator
from shoal.optim.progress import LocalTrainingProgress, endorse, is_endorsed, parse_record

__all__ = ["LocalTrainingProgress", "TrainingProgressSchema", "endorse", "progress_validators"]


def _check(records: dict[bytes, Any]) -> dict[bytes, Any]:
    for owner_tag, value in records.items():
        if value is not None and not is_endorsed(parse_record(value), owner_tag):
            raise ValueError("a record in the name of another peer")
    return records


class TrainingProgressSchema(pydantic.BaseModel):
    """A :class:`LocalTrainingProgress` of every peer, by owner tag; ``None`` if the peer has left."""

    progress: Annotated[dict[BytesWithPublicKey, Any], pydantic.AfterValidator(_check)]


def progress_validators(prefix: str, private_key: PrivateKey) -> tuple[SchemaValidator, SignatureValidator]:
    """The validators for the records of one run; the second one also signs this peer's own records."""
    return SchemaValidator(TrainingProgressSchema, prefix=prefix), SignatureValidator(private_key)
