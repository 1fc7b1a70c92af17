"""The file that describes an archive. An archive without it does not count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from blake3 import blake3

from shoal.archive.contents import EPOCHS
from shoal.base.logs import one_line, quoted
from shoal.errors import ArchiveError

FORMAT, FORMAT_OF_STAGES = 1, 2
STAGES = "Stages"
"""The kind of an archive that holds the stages of a run, each with a kind of its own."""
MANIFEST = "manifest.json"
# The most stages in an archive. Chosen: bounds what a manifest makes its reader do.
MOST_STAGES = 1024


class File(msgspec.Struct, frozen=True):
    """One file of an archive."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    blake3: str


class StageEntry(msgspec.Struct, frozen=True):
    """One stage in an archive of all stages. The names of its files begin with those of :func:`prefix_of`."""

    run: str
    """The run id of its optimizers."""
    kind: str
    epoch: int
    named: bool
    written: str
    """When its state was archived first: it may come from an earlier archive."""


def prefix_of(stage: int | None) -> str:
    """What the names of a stage's files begin with; empty for a run without stages."""
    return "" if stage is None else f"stage-{stage}."


class _Format(msgspec.Struct, frozen=True):
    """The fields that manifests of all formats have."""

    format: int


class NotWholeError(ArchiveError):
    """An archive was never finished, or its manifest is damaged: it can never be read again."""


class Manifest(msgspec.Struct, frozen=True):
    """Describes an archive. Its hash covers all fields, so new fields need a new format."""

    format: int
    kind: str
    """``"Optimizer"``, ``"DiLoCo"`` or ``"Stages"``."""
    run: str
    epoch: int
    named: bool
    """Whether parameters have names; otherwise they have numbers."""
    written: str
    """When it was written, in UTC, for people to read."""
    files: dict[str, File]
    check: str = ""
    """The hash of all fields, with an empty ``check``."""
    count: Annotated[int, msgspec.Meta(gt=0, le=MOST_STAGES)] | msgspec.UnsetType = msgspec.UNSET
    """How many stages the model has."""
    stages: dict[Annotated[int, msgspec.Meta(ge=0, lt=MOST_STAGES)], StageEntry] | msgspec.UnsetType = msgspec.UNSET
    """Those that the archive holds."""

    @property
    def hash(self) -> str:
        return blake3(msgspec.json.encode(msgspec.structs.replace(self, check=""))).hexdigest()

    @classmethod
    def make(
        cls, run: str, states: Mapping[int | None, StageEntry], count: int, written: str, files: dict[str, File]
    ) -> Manifest:
        """A manifest of the present format, with its hash. Its epoch is that of the newest stage.

        Args:
            states: the state of a run under ``None``, or those of its stages by their numbers.
            count: how many stages the model has.
        """
        epoch, named = max(each.epoch for each in states.values()), all(each.named for each in states.values())
        if None in states:
            manifest = cls(FORMAT, states[None].kind, run, epoch, named, written, files)
        else:
            stages = {stage: each for stage, each in states.items() if stage is not None}
            manifest = cls(FORMAT_OF_STAGES, STAGES, run, epoch, named, written, files, count=count, stages=stages)
        return msgspec.structs.replace(manifest, check=manifest.hash)

    def of_stage(self, stage: int) -> Manifest:
        """The manifest of one stage, as that of a run of its own.

        Raises:
            ArchiveError: it is not there.
        """
        stages = self.stages or {}
        if stage not in stages:
            held = f"it has {', '.join(map(str, sorted(stages)))}" if stages else "it is of a run without stages"
            raise ArchiveError(
                f"the archive of epoch {self.epoch} of run {quoted(self.run)} has no stage {stage}: {held}"
            )
        each, prefix = stages[stage], prefix_of(stage)
        files = {name.removeprefix(prefix): file for name, file in self.files.items() if name.startswith(prefix)}
        return Manifest(FORMAT, each.kind, each.run, each.epoch, each.named, each.written, files)

    @property
    def _kinds(self) -> set[str]:
        """The kinds of all its states."""
        stages = self.stages or {}
        return {each.kind for each in stages.values()} if self.kind == STAGES and stages else {self.kind}

    @property
    def missing(self) -> list[int]:
        """The stages that the model has and the archive lacks."""
        return [] if self.count is msgspec.UNSET else sorted({*range(self.count)} - {*(self.stages or ())})

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
            manifest = msgspec.json.decode(data, type=cls) if found in (FORMAT, FORMAT_OF_STAGES) else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise NotWholeError(f"{of} is damaged, or was never finished: {MANIFEST}: {one_line(str(e))}") from e
        if manifest is None or (unknown := manifest._kinds - EPOCHS.keys()):
            what = "" if manifest is None else f" of a {quoted(next(iter(unknown)))}"
            raise ArchiveError(
                f"{of} has format {quoted(found)}{what}, but this version of shoal reads formats up to "
                f"{FORMAT_OF_STAGES}: use the version that wrote it, or a newer one"
            )
        if manifest.check != manifest.hash:
            raise NotWholeError(f"{of} is damaged: {MANIFEST} does not match its own hash")
        return manifest
