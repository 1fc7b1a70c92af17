"""What may be stored under ``{run}_progress`` in the DHT, and which peer may write it.

The subkey of a record is the owner tag of a signing key, so only the holder of that key can write there. The record
names a peer and carries that peer's signature over the tag. So only the peer itself can write in its name, and every
DHT node that knows the run refuses forged and malformed records.
"""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

from shoal.dht.crypto import PrivateKey, SignatureValidator, peer_of
from shoal.dht.schema import BytesWithPublicKey, SchemaValidator
from shoal.optim.progress.records import LocalTrainingProgress, endorse, is_endorsed, parse_record
from shoal.optim.report import parse_report

__all__ = ["LocalTrainingProgress", "TrainingProgressSchema", "endorse", "progress_validators"]


def _check(records: dict[bytes, Any]) -> dict[bytes, Any]:
    for owner_tag, value in records.items():
        if value is not None and not is_endorsed(parse_record(value), owner_tag):
            raise ValueError("a record in the name of another peer")
    return records


def _check_reports(records: dict[bytes, Any]) -> dict[bytes, Any]:
    for owner_tag, value in records.items():
        peer_of(owner_tag)
        parse_report(value)
    return records


class ReportsSchema(pydantic.BaseModel):
    """A :class:`~shoal.optim.report.PeerReport` of every peer that reports, by the owner tag of its identity."""

    reports: Annotated[dict[BytesWithPublicKey, Any], pydantic.AfterValidator(_check_reports)]


class TrainingProgressSchema(pydantic.BaseModel):
    """A :class:`LocalTrainingProgress` of every peer, by owner tag; ``None`` if the peer has left."""

    progress: Annotated[dict[BytesWithPublicKey, Any], pydantic.AfterValidator(_check)]


def progress_validators(prefix: str, private_key: PrivateKey) -> tuple[SchemaValidator, SignatureValidator]:
    """The validators for the records of one run; the second one also signs this peer's own records of progress."""
    schema = SchemaValidator(TrainingProgressSchema, prefix=prefix)
    schema.merge_with(SchemaValidator(ReportsSchema, prefix=prefix))
    return schema, SignatureValidator(private_key)
