"""Archives as files, in a folder of this machine or at any address that fsspec can open.

::

    DIR/000017-epoch-4200/model.safetensors       parameters and buffers, by their names in the model
                          training.safetensors    statistics of optimizers and all else that training needs
                          state.msgpack           plain values: schedules, lineage, in which order the tensors are
                          data.msgpack            what is done of a shared pass over data, if the run has one
                          manifest.json           which run and epoch; size and hash of each file. Written last

Of a run in stages, each stage has such files of its own, whose names begin with ``stage-0.``, ``stage-1.`` and so on.

Nothing is ever changed or renamed, because many file systems cannot do that atomically. An archive counts only if its
manifest is complete, and the manifest is written after everything else. So whatever happens while an archive is
written, earlier ones are unharmed. Unknown files that a manifest names are checked and otherwise ignored, so that later
versions can store more.

An archive may come from anywhere, so nothing in it is trusted before it is checked. Files have plain names, so that
none lies outside the folder. In a folder of this machine they must be regular files: no links, pipes or devices. Their
sizes are compared before they are read, and no read goes beyond them.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from shoal.archive.contents import CheckedState, Order, Piece, epoch_of, order_of, put_together
from shoal.archive.manifest import MANIFEST, STAGES, File, Manifest, NotWholeError, StageEntry, prefix_of
from shoal.averaging.state.download import State
from shoal.base.logs import one_line, quoted
from shoal.base.serializer import MSGPackSerializer
from shoal.errors import ArchiveError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

VALUES, DATA = "state.msgpack", "data.msgpack"
# A remote file is copied in memory before it is written, so a large state is split into several files. Chosen.
MOST_BYTES_OF_FILE = 2**28
_PIECE_BYTES = 2**20  # chosen
# The largest manifest; each file takes about a hundred bytes of it. Chosen.
_MANIFEST_BYTES = 2**24
_FOLDER = re.compile(r"(\d{6,12})-epoch-(\d{1,19})")
_OF_STAGE = re.compile(r"^stage-\d+\.")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
# Windows lacks O_NOFOLLOW and O_NONBLOCK, and only Windows has O_BINARY.
_READ_ONLY = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True)
class Archive:
    """An archive that was read completely."""

    path: str
    manifest: Manifest
    state: State
    """As the donor gave it; empty for a run in stages."""
    tensors: dict[str, torch.Tensor]
    """All stored tensors by name, including the statistics of optimizers."""
    names: tuple[str, ...]
    """The names of the tensors that belong to the model."""
    data: dict[str, Any] | None = None
    """For ``load_state_dict`` of a :class:`shoal.data.SharedPass`; ``None`` if the run had none under its name."""
    is_private: bool = False
    """Whether the run was private."""
    stages: Mapping[int, Archive] = field(default_factory=dict)
    """Of a run in stages: each stage as an archive of its own. The names of tensors are those in the stage's module,
    and in the archive of the whole run those in ``torch.nn.Sequential(*stages)``."""
    newest: int = 0
    """Of a stage that was read alone: the epoch of the newest stage in the same archive."""

    @property
    def state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that the archive holds, by their names in the model."""
        return {name: self.tensors[name] for name in self.names}

    @property
    def kind(self) -> str:
        return self.manifest.kind

    @property
    def run_id(self) -> str:
        return self.manifest.run

    @property
    def epoch(self) -> int:
        return self.manifest.epoch


class Store:
    """The archives of one run. Only one process may write there at a time.

    Args:
        url: a folder, or an address such as ``s3://bucket/run``.

    Raises:
        ArchiveError: there is no such address, or the package that opens it is missing.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = _with_slashes(url)
        if not self.url:
            raise ArchiveError("the folder of the archives has no name: give one, or '.' for the present folder")
        try:
            import fsspec
            import safetensors.torch
            from fsspec.implementations.local import LocalFileSystem
        except ImportError as e:
            raise ArchiveError(f"archives need one more package: pip install 'shoal[archive]' ({e})") from e
        self._safetensors: Any = safetensors.torch
        self._error: type[Exception] = safetensors.SafetensorError
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as e:  # its text names the package
            raise ArchiveError(f"{self.url!r} needs one more package: {e}") from e
        except Exception as e:
            raise ArchiveError(f"{self.url!r} is no address of a folder: {_words(e)}") from e
        self._is_local = isinstance(self._fs, LocalFileSystem)

    # --- what is there ------------------------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        """The folders of all archives, whole or not, the newest first."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as e:
            raise ArchiveError(f"cannot look into {self.url}: {_words(e)}") from e
        names = [str(path).rstrip("/").rpartition("/")[2] for path in found]
        return sorted(filter(_FOLDER.fullmatch, names), key=_number_of, reverse=True)

    def manifest(self, folder: str) -> Manifest:
        """The manifest of an archive.

        Raises:
            ArchiveError: it is not whole.
        """
        try:
            with self._open(folder, MANIFEST) as (file, size):
                # Some web servers do not report the size.
                most = _MANIFEST_BYTES if size is None else size
                data = _read(file, most + 1) if most <= _MANIFEST_BYTES else b""
        except FileNotFoundError:
            raise NotWholeError(f"{self._named(folder)} was never finished: it has no {MANIFEST}") from None
        except ArchiveError:
            raise
        except Exception as e:
            raise ArchiveError(f"{self._named(folder)} cannot be read: {MANIFEST}: {_words(e)}") from e
        if (size or len(data)) > _MANIFEST_BYTES:
            raise NotWholeError(f"{self._named(folder)} is damaged: its {MANIFEST} is too large")
        return Manifest.decode(data, self._named(folder))

    def whole(self) -> Iterator[tuple[str, Manifest]]:
        """Folders and manifests of finished archives, the newest first. Their files are not read."""
        for folder in self.folders():
            try:
                yield folder, self.manifest(folder)
            except ArchiveError as e:
                logger.debug("skipped: %s", e)

    def last_good(self) -> str:
        """The newest finished archive, in words."""
        newest = next(self.whole(), None)
        return "there is no good archive yet" if newest is None else f"the last good archive is {self._told(*newest)}"

    def _is_archive(self) -> bool:
        """Whether this is a single archive, which may have been copied under any name, not a folder of archives."""
        try:
            return bool(self._fs.exists(self._path(MANIFEST)))
        except Exception as e:
            raise ArchiveError(f"cannot look into {self.url}: {_words(e)}") from e

    # --- writing ------------------------------------------------------------------------------------------------------

    def check_run(self, run_id: str) -> None:
        """Check that archives of this run may be written here.

        Raises:
            ArchiveError: there are archives of another run.
        """
        newest = next(self.whole(), None)
        if newest is not None and newest[1].run != run_id:
            raise ArchiveError(
                f"{self.url} has archives of run {quoted(newest[1].run)}: give {run_id!r} a folder of its own"
            )

    def write(
        self, run_id: str, kind: str, state: State, data: dict[str, Any] | None = None, *, is_private: bool = False
    ) -> Manifest:
        """Write an archive.

        Args:
            data, is_private: see :class:`Archive`.

        Raises:
            ValueError: the state is malformed, or has parameters that are not finite.
            ArchiveError: it could not be written; earlier archives are unharmed.
        """
        return self.write_contents(run_id, {None: CheckedState.of(run_id, kind, state)}, data, is_private=is_private)

    def write_contents(
        self,
        run_id: str,
        contents: Mapping[int | None, CheckedState],
        data: dict[str, Any] | None = None,
        *,
        count: int = 0,
        is_private: bool = False,
    ) -> Manifest:
        """Write states that were checked.

        Args:
            contents: the state of a run under ``None``, or those of its stages by their numbers.
            data, is_private: see :class:`Archive`.
            count: how many stages the model has.

        Raises:
            ArchiveError: they could not be written; earlier archives are unharmed.
        """
        epoch = max(each.epoch for each in contents.values())
        folder = self._make_folder(epoch)
        try:
            files = dict[str, File]()
            for stage, each in contents.items():
                files.update(self._write_files(folder, prefix_of(stage), each, is_private))
            if data is not None:
                files[DATA] = self._put(folder, DATA, MSGPackSerializer.dumps(data))
            now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            states = {
                stage: StageEntry(each.run, each.kind, each.epoch, each.named, each.written or now)
                for stage, each in contents.items()
            }
            manifest = Manifest.make(run_id, states, count, now, files)
            self._put(folder, MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
            self._make_lasting(self._path(folder), self._root)
        except Exception as e:  # other addresses than folders have errors of their own
            self._remove(folder)
            self._remove_unfinished()
            raise self._not_written(epoch, e) from e
        return manifest

    def _write_files(self, folder: str, prefix: str, contents: CheckedState, is_private: bool) -> dict[str, File]:
        """Write the files of one state."""
        order = order_of(contents.pieces)
        values = {"metadata": contents.state.metadata, "order": order, "private": is_private}
        parts = [(prefix + name, pieces) for name, pieces in _files(contents.pieces)]
        with ThreadPoolExecutor(4) as pool:
            sizes = pool.map(lambda part: self._write_tensors(folder, *part), parts)
            files = {name: size for (name, _), size in zip(parts, sizes, strict=True)}
        files[prefix + VALUES] = self._put(folder, prefix + VALUES, MSGPackSerializer.dumps(values))
        return files

    def _make_folder(self, epoch: int) -> str:
        """Make the folder of the next archive. A folder that another archiver has just made is left alone."""
        number = max(map(_number_of, self.folders()), default=0) + 1
        while True:
            folder = f"{number:06d}-epoch-{epoch}"
            try:
                self._fs.makedirs(self._path(folder), exist_ok=False)
            except FileExistsError:
                number += 1
            except Exception as e:
                raise self._not_written(epoch, e) from e
            else:
                return folder

    def _not_written(self, epoch: int, error: Exception) -> ArchiveError:
        return ArchiveError(f"epoch {epoch} could not be written to {self.url} ({_words(error)}); {self.last_good()}")

    def _write_tensors(self, folder: str, name: str, pieces: Sequence[Piece]) -> File:
        tensors = {piece.name: piece.tensor.detach().contiguous() for piece in pieces}
        if not self._is_local:
            return self._put(folder, name, self._safetensors.save(tensors))
        path = self._path(folder, name)
        try:
            self._safetensors.save_file(tensors, path)  # without a copy in memory
        except self._error as e:
            raise OSError(str(e)) from e
        with open(path, "rb", buffering=0) as file:
            digest, piece, total = blake3(), memoryview(bytearray(_PIECE_BYTES)), 0
            while size := file.readinto(piece):
                digest.update(piece[:size])
                total += size
            os.fsync(file.fileno())
        return File(total, digest.hexdigest())

    def _put(self, folder: str, name: str, data: bytes) -> File:
        """Write a file. On a local disk it survives a power failure once this returns."""
        with self._fs.open(self._path(folder, name), "wb") as file:
            file.write(data)
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
        return File(len(data), _hash_of(data))

    def _make_lasting(self, *folders: str) -> None:
        """Make sure that the contents of these folders survive a power failure."""
        if not self._is_local or os.name == "nt":  # Windows cannot open folders
            return
        for path in folders:
            opened = os.open(path, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)

    def prune(self, keep: int) -> str | None:
        """Remove all but the newest archives, and remains of older attempts.

        The one of the highest epoch stays, too: if all peers were lost and have started over, new archives must not
        replace the progress of the run.

        Args:
            keep: the number of whole archives to keep.

        Returns:
            The folder of the highest epoch, if the newest archive is of an earlier epoch.
        """
        whole, unfinished = self._sort()
        furthest = max(whole, key=_epoch_of, default=None)  # on a tie, the newest
        for folder in whole[keep:]:
            if folder != furthest:
                self._remove(folder)
        for folder in unfinished:
            # A newer unfinished one may be in progress.
            if whole and _number_of(folder) < _number_of(whole[0]):
                self._remove(folder)
        return furthest if furthest and _epoch_of(furthest) > _epoch_of(whole[0]) else None

    def _remove_unfinished(self) -> None:
        """Remove what killed archivers left behind, if there is a good archive: it may be filling the disk."""
        whole, unfinished = self._sort()
        for folder in unfinished if whole else ():
            self._remove(folder)

    def _sort(self) -> tuple[list[str], list[str]]:
        """The folders of whole archives, and of unfinished ones, the newest first."""
        whole, unfinished = list[str](), list[str]()
        for folder in self.folders():
            try:
                self.manifest(folder)
                whole.append(folder)
            except NotWholeError:
                unfinished.append(folder)
            except ArchiveError as e:  # another version has written it, or the address fails at the moment
                logger.debug("left alone: %s", e)
        return whole, unfinished

    def _remove(self, folder: str) -> None:
        """Remove an archive, its manifest first, so that it never looks complete when it is not."""
        for path in (self._path(folder, MANIFEST), self._path(folder)):
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                continue
            except Exception as e:
                logger.warning("could not remove %s: %s", path, _words(e))

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, folder: str, stage: int | None = None) -> Archive:
        """Read an archive, and check every byte of it.

        Args:
            stage: read only this stage.

        Raises:
            ArchiveError: it is not whole, or lacks the stage.
        """
        manifest = self.manifest(folder)
        if stage is not None:
            wanted = manifest.of_stage(stage)
            self._check_files(folder, wanted)
            return replace(self._read_state(folder, wanted, prefix_of(stage)), newest=manifest.epoch)
        self._check_files(folder, manifest)
        if manifest.kind != STAGES:
            return self._read_state(folder, manifest, "")
        stages = {
            number: self._read_state(folder, manifest.of_stage(number), prefix_of(number))
            for number in sorted(manifest.stages or ())
        }
        passed = None
        for name, told in manifest.files.items():
            if name == DATA:
                passed = self._load(folder, name, told)
            elif not any(name.startswith(prefix_of(number)) for number in stages):
                self._check(folder, name, told)
        tensors = {f"{n}.{name}": tensor for n, each in stages.items() for name, tensor in each.tensors.items()}
        names = tuple(f"{n}.{name}" for n, each in stages.items() for name in each.names)
        is_private = any(each.is_private for each in stages.values())
        return Archive(f"{self.url}/{folder}", manifest, State(None, []), tensors, names, passed, is_private, stages)

    def _read_state(self, folder: str, manifest: Manifest, prefix: str) -> Archive:
        """Read one state, whose files were checked by their sizes.

        Args:
            prefix: what the names of its files begin with.
        """
        tensors, names = dict[str, "torch.Tensor"](), list[str]()
        values: Any = None
        passed: dict[str, Any] | None = None
        for name, told in manifest.files.items():
            if not _is_known(name):
                self._check(folder, prefix + name, told)
                continue
            found = self._load(folder, prefix + name, told)
            if name == VALUES:
                values = found
            elif name == DATA:
                passed = found
            else:
                if twice := next(filter(tensors.__contains__, found), None):
                    raise ArchiveError(
                        f"{self._named(folder)} cannot be read: {prefix + name}: the tensor {quoted(twice)} is in "
                        "another file, too"
                    )
                tensors.update(found)
                names += found if name.startswith("model") else ()
        try:
            order: Order = msgspec.convert(values["order"], Order)
            state, is_private = State(values["metadata"], put_together(order, tensors)), bool(values.get("private"))
            if epoch_of(manifest.kind, state.metadata) != manifest.epoch:
                raise ValueError("its state is of another epoch")
        except (TypeError, KeyError, ValueError, RuntimeError, msgspec.ValidationError) as e:
            raise ArchiveError(f"{self._named(folder)} cannot be read: {prefix}{VALUES}: {one_line(repr(e))}") from e
        return Archive(f"{self.url}/{folder}", manifest, state, tensors, tuple(sorted(names)), passed, is_private)

    def _load(self, folder: str, name: str, told: File) -> Any:
        """The contents of a file, checked against the manifest."""
        data = b"".join(self._pieces(folder, name, told, told.bytes))
        try:
            return (self._safetensors.load if name.endswith(".safetensors") else MSGPackSerializer.loads)(data)
        except Exception as e:  # the hash is right, so another program wrote it with other contents
            raise ArchiveError(f"{self._named(folder)} cannot be read: {name}: {_words(e)}") from e

    def newest_of_stage(self, stage: int, last: int) -> CheckedState | None:
        """The newest state of a stage in a good archive, up to an epoch; ``None``: there is none.

        If the run has started over, the archives of its earlier life are of later epochs.
        """
        for folder, manifest in self.whole():
            entry = (manifest.stages or {}).get(stage)
            if entry is not None and entry.epoch <= last:
                try:
                    found = self.read(folder, stage)
                    return CheckedState.of(found.run_id, found.kind, found.state, found.manifest.written)
                except (ArchiveError, ValueError) as e:
                    logger.warning("stage %d is not taken from an earlier archive: %s", stage, e)
        return None

    def _check_files(self, folder: str, manifest: Manifest) -> None:
        """Check the manifest's entries for files, before any file is opened."""
        for name in manifest.files:
            if not _PLAIN_NAME.fullmatch(name):
                raise ArchiveError(
                    f"{self._named(folder)} cannot be read: its {MANIFEST} names the file {quoted(name)}. Files of an "
                    "archive have plain names and lie in its folder: shoal has not written this one, so do not use it"
                )
        size = sum(told.bytes for name, told in manifest.files.items() if _is_known(_OF_STAGE.sub("", name)))
        if size > memory_of_this_machine():
            raise ArchiveError(
                f"{self._named(folder)} cannot be read: its files have {size} bytes, more than the memory of this "
                "machine. Read it on a larger one"
            )

    def _check(self, folder: str, name: str, told: File) -> None:
        """Check a file that this version does not use, without holding it in memory."""
        for _ in self._pieces(folder, name, told, _PIECE_BYTES):
            pass

    def _pieces(self, folder: str, name: str, told: File, size_of_piece: int) -> Iterator[bytes]:
        """The bytes of a file, checked against the manifest."""
        digest, total = blake3(max_threads=blake3.AUTO), 0
        try:
            with self._open(folder, name) as (file, size):
                # Reading one byte more than told shows whether there is more.
                is_right = size in {None, told.bytes}
                while is_right and (piece := file.read(min(size_of_piece, told.bytes - total) or 1)):
                    digest.update(piece)
                    total += len(piece)
                    is_right = total <= told.bytes
                    if is_right:
                        yield piece
        except ArchiveError:
            raise
        except Exception as e:
            raise ArchiveError(f"{self._named(folder)} is damaged: {name}: {_words(e)}") from e
        if not is_right or total != told.bytes or digest.hexdigest() != told.blake3:
            raise ArchiveError(f"{self._named(folder)} is damaged: {name} is not what was written")

    @contextmanager
    def _open(self, folder: str, name: str) -> Iterator[tuple[IO[bytes], int | None]]:
        """Open a regular file to read it; yields it with its size, if the address tells that."""
        path = self._path(folder, name)
        if not self._is_local:
            size = self._fs.size(path)
            with self._fs.open(path, "rb") as file:
                yield file, size
            return
        self._check_kind(folder, name, os.lstat(path).st_mode)
        with open(os.open(path, _READ_ONLY), "rb") as file:
            status = os.fstat(file.fileno())
            self._check_kind(folder, name, status.st_mode)  # it may have been replaced in the meantime
            yield file, status.st_size

    def _check_kind(self, folder: str, name: str, mode: int) -> None:
        if not stat.S_ISREG(mode):
            what = "a link" if stat.S_ISLNK(mode) else "no regular file"
            raise ArchiveError(
                f"{self._named(folder)} cannot be read: {name} is {what}. If the archive is yours, copy it so that "
                "files are there in place of links (cp -rL)"
            )

    @classmethod
    def open(cls, path: str | os.PathLike[str], stage: int | None = None) -> Archive:
        """Read the newest good archive of a folder; or a single archive, if its own folder is given.

        Newer archives that are damaged are skipped with a warning.

        Args:
            stage: read only this stage of a run in stages.

        Raises:
            ArchiveError: there is none, or the single one is damaged; the text names the last good one beside it.
        """
        text = _with_slashes(path).rstrip("/")
        above, _, folder = text.rpartition("/")
        store, troubles = cls(text), list[str]()
        if _FOLDER.fullmatch(folder) or store._is_archive():
            return cls(above or text.removesuffix(folder) or ".")._open_one(folder, stage)
        for folder in store.folders():
            try:
                archive = store.read(folder, stage)
            except ArchiveError as e:
                troubles.append(str(e))
                continue
            for trouble in troubles:
                logger.warning("%s. The last good archive is taken: %s", trouble, store._told(folder, archive.manifest))
            store._tell_further(folder)
            if text := told_of_stages(store.manifest(folder)):
                logger.warning("%s: %s", store._named(folder), text)
            return archive
        if store._is_local and not os.path.isdir(store._root):
            raise ArchiveError(f"there is no folder {text}: give the one that shoal archive writes to")
        raise ArchiveError(f"there is no good archive in {text}" + "".join(f"\n  {each}" for each in troubles))

    def _tell_further(self, taken: str) -> None:
        """Warn if an older archive is of a later epoch than the newest one."""
        older = [folder for folder, _ in self.whole() if _number_of(folder) < _number_of(taken)]
        further = max(older, key=_epoch_of, default=taken)
        if _epoch_of(further) > _epoch_of(taken):
            logger.warning(
                "the newest archive is taken: %s. But %s/%s is of a later epoch: take that one if the run was "
                "restarted by mistake", taken, self.url, further,
            )  # fmt: skip

    def _open_one(self, folder: str, stage: int | None) -> Archive:
        try:
            return self.read(folder, stage)
        except ArchiveError as e:
            others = [each for each, _ in self.whole() if each != folder]
            beside = f"; a good one beside it is {others[0]}" if others else ""
            raise ArchiveError(f"{e}{beside}") from e

    # --- names --------------------------------------------------------------------------------------------------------

    def _path(self, *parts: str) -> str:
        return "/".join([self._root, *parts])

    def _named(self, folder: str) -> str:
        return f"the archive {self.url}/{folder}"

    def _told(self, folder: str, manifest: Manifest) -> str:
        return f"{folder} of {one_line(manifest.written)} UTC"


def _words(error: Exception) -> str:
    """The text of an error; file systems often give none for an operation that they do not support."""
    return one_line(str(error)) or f"{type(error).__name__}: not possible there"


def _is_known(name: str) -> bool:
    """Whether this version knows what a file is for."""
    return name in (VALUES, DATA) or name.endswith(".safetensors")


def told_of_stages(manifest: Manifest) -> str:
    """Which stages an archive lacks or has of another epoch than its own, in words; empty if all is well."""
    lacking = [
        f"it lacks stage {stage}: if nothing of it is trained, make it with its own function"
        for stage in manifest.missing
    ]
    older = [
        f"stage {stage} is of epoch {each.epoch}, archived {one_line(each.written)} UTC"
        for stage, each in sorted((manifest.stages or {}).items())
        if each.epoch != manifest.epoch
    ]
    return "; ".join([*lacking, *older])


def _read(file: IO[bytes], most: int) -> bytes:
    """The content of a file, up to a limit. Web servers return less at a time than asked for."""
    pieces = list[bytes]()
    while most > 0 and (piece := file.read(most)):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def memory_of_this_machine() -> int:
    """The memory of this machine in bytes, which no state can exceed; a terabyte if the system does not say."""
    if sys.platform != "win32" and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**40


def _with_slashes(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if "://" in text else text.replace(os.sep, "/")


def _number_of(folder: str) -> int:
    return int(folder.partition("-")[0])


def _epoch_of(folder: str) -> int:
    return int(folder.rpartition("-")[2])


def _hash_of(data: bytes) -> str:
    return blake3(data, max_threads=blake3.AUTO).hexdigest()


def _files(pieces: Iterable[Sequence[Piece]]) -> Iterator[tuple[str, list[Piece]]]:
    """Distribute pieces over files of limited size; yields the name and the pieces of each file."""
    by_part: dict[str, list[Piece]] = {}
    for each in pieces:
        for piece in each:
            by_part.setdefault(piece.part, []).append(piece)
    for part, members in by_part.items():
        number, size, chosen = 1, 0, list[Piece]()
        for piece in members:
            if chosen and size + piece.tensor.nbytes > MOST_BYTES_OF_FILE:
                yield _file_name(part, number), chosen
                number, size, chosen = number + 1, 0, []
            chosen.append(piece)
            size += piece.tensor.nbytes
        yield _file_name(part, number), chosen


def _file_name(part: str, number: int) -> str:
    return f"{part}.safetensors" if number == 1 else f"{part}-{number}.safetensors"
