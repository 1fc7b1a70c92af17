"""An archive from a stranger: nothing outside of its folder is read, nothing hangs, and memory is bounded."""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import safetensors.torch
import torch
from blake3 import blake3
from fsspec.implementations.memory import MemoryFileSystem

from shoal.archive import store as room
from shoal.archive.manifest import MANIFEST, File, Manifest
from shoal.archive.reviving import Revival
from shoal.archive.store import DATA, VALUES, Store
from shoal.base.serializer import MSGPackSerializer
from shoal.dht import DHT
from shoal.errors import ArchiveError
from tests.archive.states import RUN, is_state_of, small_state

NAME = "000001-epoch-4"
HOSTILE_TEXT = "\x1b[2J\r\n" * 100_000
needs_pipes = pytest.mark.skipif(sys.platform == "win32", reason="has no pipes in folders, and seldom links")


def file_of(data: bytes) -> File:
    return File(len(data), blake3(data).hexdigest())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a good archive."""
    Store(tmp_path / "run").write(RUN, "Optimizer", small_state(4))
    return tmp_path / "run" / NAME


def rewrite(folder: Path, files: dict[str, File] | None = None, **changes: Any) -> None:
    """Give an archive another manifest, with a hash that is right."""
    manifest = Manifest.decode((folder / MANIFEST).read_bytes(), "it")
    manifest = msgspec.structs.replace(manifest, files={**manifest.files, **(files or {})}, **changes)
    manifest = msgspec.structs.replace(manifest, check=manifest.hash)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def put(folder: Path, name: str, data: bytes) -> None:
    """Put a file into an archive, and name it in the manifest."""
    (folder / name).write_bytes(data)
    rewrite(folder, {name: file_of(data)})


def change_values(folder: Path, **changes: Any) -> None:
    values = MSGPackSerializer.loads((folder / VALUES).read_bytes())
    put(folder, VALUES, MSGPackSerializer.dumps({**values, **changes}))


def refusal(folder: Path) -> str:
    """What the error says, which nothing of the archive can fill a screen with or control a terminal by."""
    with pytest.raises(ArchiveError) as e:
        Store.open(folder)
    text = str(e.value)
    assert NAME in text
    assert text.isprintable()
    assert len(text) < 2000
    return text


@pytest.mark.parametrize(
    "name",
    [
        "../../secret",
        "../000001-epoch-4/model.safetensors",
        "below/secret",
        "/etc/hostname",
        "..",
        ".",
        "",
        ".hidden",
        "..\\secret",
        "C:secret",
        "nul\0",
        "model.safetensors\n",
        HOSTILE_TEXT,
        "x" * 900_000,
        "ünï",
    ],
)
def test_only_plain_names_are_opened(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The size and the hash are right, so only the name tells."""
    for place in (folder.parents[1] / "secret", folder / "below" / "secret"):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"of the user")
    rewrite(folder, {name: file_of(b"of the user")})
    opened, real = set[str](), os.open

    def open_and_note(path: str, *options: int, **more: int) -> int:
        opened.add(path)
        return real(path, *options, **more)

    monkeypatch.setattr(os, "open", open_and_note)
    assert "plain names" in refusal(folder)
    assert opened == {str(folder / MANIFEST)}


@needs_pipes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "later.bin", MANIFEST])
@pytest.mark.parametrize("kind", ["pipe", "folder", "endless device", "regular file elsewhere"])
def test_only_regular_files_are_opened(folder: Path, name: str, kind: str) -> None:
    """To open a pipe hangs until somebody writes to it, and some devices never end."""
    if name != MANIFEST:
        rewrite(folder, {name: file_of(b"elsewhere")})
    path, elsewhere = folder / name, folder.parent / "elsewhere"
    elsewhere.write_bytes(b"elsewhere")
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "endless device" else elsewhere)
    text = refusal(folder)
    assert f"{name} is {'no regular file' if kind in ('pipe', 'folder') else 'a link'}" in text
    assert "cp -rL" in text
    # A store with such an archive works on: it is not taken for what a killed archiver has left.
    store = Store(folder.parent)
    store.write(RUN, "Optimizer", small_state(5))
    store.prune(1)
    assert is_state_of(Store.open(folder.parent).state, 5)


@needs_pipes
def test_file_swapped_for_a_pipe_does_not_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = folder / "model.safetensors", os.lstat

    def lstat(looked_at: str) -> os.stat_result:
        status = real(looked_at)
        if Path(looked_at) == path and path.is_file():
            path.unlink()
            os.mkfifo(path)
        return status

    monkeypatch.setattr(os, "lstat", lstat)
    assert "no regular file" in refusal(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "later.bin"])
def test_a_file_of_another_size_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder / name).touch()
    rewrite(folder, {name: file_of((folder / name).read_bytes())})
    os.truncate(folder / name, 2**40)  # takes no room on the disk
    assert f"{name} is not what was written" in refusal(folder)


def test_files_larger_than_memory_are_not_read(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 2**42)
    rewrite(folder, {"model.safetensors": File(2**42, "0" * 64)})
    text = refusal(folder)
    assert "more than the memory of this machine" in text
    assert "Read it on a larger one" in text


def test_unknown_file_is_checked_in_pieces(folder: Path) -> None:
    put(folder, "later.bin", bytes(64 * 2**20))
    tracemalloc.start()
    try:
        Store.open(folder)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()
    rewrite(folder, {"later.bin": File(64 * 2**20, "0" * 64)})
    assert "later.bin is not what was written" in refusal(folder)


def test_a_manifest_of_any_size_is_not_read(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 2**40)
    assert "too large" in refusal(folder)


ONE = "layer.weight"


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([ONE] * 100_000, "used twice"),
        ([[ONE] * 100_000], "used twice"),
        ([ONE, [ONE]], "used twice"),
        (["gone"], "'gone' is not there"),
        ([HOSTILE_TEXT], "is not there"),
        ([[]], "has no pieces"),
        ([[ONE, "wide"]], "pieces of several types"),
        (ONE, "Expected `array`"),
        ([1], "Expected"),
        (None, "Expected"),
    ],
    ids=range(10),
)
def test_state_never_exceeds_its_tensors(folder: Path, order: object, says: str) -> None:
    put(folder, "more.safetensors", safetensors.torch.save({"wide": torch.zeros((), dtype=torch.float64)}))
    change_values(folder, order=order)
    assert says in refusal(folder)


def test_a_tensor_stands_in_one_file_only(folder: Path) -> None:
    put(folder, "model-2.safetensors", safetensors.torch.save({ONE: torch.ones(3, 2)}))
    assert "'layer.weight' is in another file, too" in refusal(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": HOSTILE_TEXT, "epoch": 5},
        {"kind": HOSTILE_TEXT},
        {"format": 2**60},
        {"files": {HOSTILE_TEXT: {"bytes": -1}}},
        {"files": {"a": {"bytes": HOSTILE_TEXT}}},
        {"count": 2**60},
        {"stages": {"0": HOSTILE_TEXT}},
    ],
    ids=range(7),
)
def test_texts_of_a_manifest_are_quoted_and_cut(folder: Path, changes: dict[str, Any]) -> None:
    found = {**msgspec.json.decode((folder / MANIFEST).read_bytes()), **changes}
    if changes.keys() & {"run"}:
        rewrite(folder, **changes)
    else:
        (folder / MANIFEST).write_bytes(msgspec.json.encode(found))
    refusal(folder)


def test_lines_about_a_folder_quote_its_manifests(folder: Path) -> None:
    rewrite(folder, run=HOSTILE_TEXT, written=HOSTILE_TEXT)
    store = Store(folder.parent)
    with pytest.raises(ArchiveError) as e:
        store.check_run(RUN)
    for text in (str(e.value), store.last_good()):
        assert text.isprintable()
        assert len(text) < 2000


def test_values_of_a_stranger_are_quoted_and_cut(folder: Path) -> None:
    change_values(folder, metadata={"epoch": HOSTILE_TEXT})
    refusal(folder)
    put(folder, VALUES, b"\xc1" * 900_000)
    refusal(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 2**52},
        {"samples": 2**63},
        {"samples": -1},
        {"chunk": 0},
        {"chunk": 2**40},
        {"order": HOSTILE_TEXT},
        {"number": HOSTILE_TEXT},
    ],
    ids=str,
)
def test_impossible_data_progress_is_not_published(
    folder: Path, changes: dict[str, Any], make_dhts: Callable[..., list[DHT]]
) -> None:
    passed = {"number": 0, "samples": 100, "chunk": 1, "done": b"\x01", "order": ""}
    put(folder, DATA, MSGPackSerializer.dumps({**passed, **changes}))
    archive = Store.open(folder)
    [dht] = make_dhts(1)
    with pytest.raises(ArchiveError, match=r"cannot be read: data\.msgpack") as e:
        Revival(dht, archive)
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 2000


class _Endless:
    """A file that never ends, and counts what was read of it."""

    given = 0

    def __enter__(self) -> _Endless:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, size: int = -1) -> bytes:
        assert size >= 0, "asks for everything"
        _Endless.given += min(size, 100)
        return bytes(min(size, 100))  # less than was asked for, as web servers do


class _Silent(MemoryFileSystem):
    """An address that tells no sizes, as some web servers, and one of whose files never ends."""

    protocol = "silent"
    endless = ""

    def size(self, path: str) -> None:
        return None

    def _open(self, path: str, *options: Any, **more: Any) -> Any:
        return _Endless() if self.endless and path.endswith(self.endless) else super()._open(path, *options, **more)


@pytest.mark.parametrize("endless", ["", "model.safetensors", MANIFEST])
def test_reads_are_bounded_without_file_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: str) -> None:
    fsspec.register_implementation("silent", _Silent, clobber=True)
    monkeypatch.setattr(_Endless, "given", 0)
    monkeypatch.setattr(room, "_MANIFEST_BYTES", 10_000)
    store = Store(f"silent://{tmp_path.name}")
    written = store.write(RUN, "Optimizer", small_state(4))
    monkeypatch.setattr(_Silent, "endless", endless)
    if not endless:
        assert is_state_of(store.read(NAME).state, 4)
        return
    with pytest.raises(ArchiveError, match="too large" if endless == MANIFEST else "is not what was written"):
        store.read(NAME)
    assert _Endless.given == 1 + (10_000 if endless == MANIFEST else written.files[endless].bytes)
