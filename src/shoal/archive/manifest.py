"""The file that describes an archive. An archive without it does not count."""

from __future__ import annotations

from typing import Annotated

import msgspec
from blake3 import blake3

from shoal.archive.contents import EPOCHS
from shoal.base.logs import one_line, quoted
from shoal.errors import ArchiveError

FORMAT = 1
MANIFEST = "manifest.json"


class File(msgspec.Struct, frozen=True):
    """One file of an archive."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    blake3: str


class _Format(msgspec.Struct, frozen=True):
    """The fields that manifests of all formats have."""

    format: int


class NotWholeError(ArchiveError):
    """An archive was never finished, or its manifest is damaged: it can never be read again."""


class Manifest(msgspec.Struct, frozen=True):
    """Describes an archive. Its hash covers all fields, so new fields need a new format."""

    format: int
    kind: str
    """``"Optimizer"`` or ``"DiLoCo"``."""
    run: str
    epoch: int
    named: bool
    """Whether parameters have names; otherwise they have numbers."""
    written: str
    """When it was written, in UTC, for people to read."""
    files: dict[str, File]
    check: str = ""
    """The hash of all fields, with an empty ``check``."""

    @property
    def hash(self) -> str:
        return blake3(msgspec.json.encode(msgspec.structs.replace(self, check=""))).hexdigest()

    @classmethod
    def make(cls, kind: str, run: str, epoch: int, named: bool, written: str, files: dict[str, File]) -> Manifest:
        """A manifest of the present format, with its hash."""
        manifest = cls(FORMAT, kind, run, epoch, named, written, files)
        return msgspec.structs.replace(manifest, check=manifest.hash)

    @classmethod
    def decode(cls, data: bytes, of: str) -> Manifest:
        """Read a manifest.

        Args:
            of: names the archive in errors.

        Raises:
            NotWholeError: it is damaged.
            ArchiveError: it has another format.
        """
        try:
            found = msgspec.json.decode(data, type=_Format).format
            manifest = msgspec.json.decode(data, type=cls) if found == FORMAT else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise NotWholeError(f"{of} is damaged, or was never finished: {MANIFEST}: {one_line(str(e))}") from e
        if manifest is None or manifest.kind not in EPOCHS:
            what = "" if manifest is None else f" of a {quoted(manifest.kind)}"
            raise ArchiveError(
                f"{of} has format {quoted(found)}{what}, but this version of shoal reads format {FORMAT}: use the "
                "version that wrote it, or a newer one"
            )
        if manifest.check != manifest.hash:
            raise NotWholeError(f"{of} is damaged: {MANIFEST} does not match its own hash")
        return manifest
