"""Archives in files: a full disk, a kill in the middle of writing and damage leave the last good one."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFileSystem

from shoal.archive import store as room
from shoal.archive.manifest import MANIFEST
from shoal.archive.store import Store
from shoal.averaging.state.download import State
from shoal.errors import ArchiveError
from tests import nursery
from tests.archive.states import RUN, files_of, is_state_of, small_state

ROOT = Path(__file__).parents[2]
QUICK_KILLS, MANY_KILLS = 20, 1000
needs_kills = pytest.mark.skipif(sys.platform == "win32", reason="forks processes, and kills them at once")


@pytest.mark.parametrize("is_local", [True, False], ids=["folder", "address"])
def test_archives_round_trip_and_old_ones_go(tmp_path: Path, is_local: bool) -> None:
    store = Store(tmp_path / "run" if is_local else f"memory://archives-{tmp_path.name}")
    assert store.folders() == []
    assert store.last_good() == "there is no good archive yet"
    for epoch in (3, 8, 12):
        assert store.write(RUN, "Optimizer", small_state(epoch)).epoch == epoch
        store.prune(2)
    assert store.folders() == ["000003-epoch-12", "000002-epoch-8"]
    assert "000003-epoch-12" in store.last_good()
    archive = Store.open(store.url)
    assert (archive.run_id, archive.kind, archive.epoch) == (RUN, "Optimizer", 12)
    assert is_state_of(archive.state, 12)
    assert set(archive.names) == {"layer.bias", "layer.weight"}
    assert torch.equal(archive.tensors["statistic.momentum_buffer.layer.bias"], torch.full((3,), -12.0))
    assert is_state_of(Store.open(f"{store.url}/000002-epoch-8").state, 8)


def test_other_programs_can_read_the_model(tmp_path: Path) -> None:
    Store(tmp_path).write(RUN, "Optimizer", small_state(4))
    found = safetensors.torch.load_file(tmp_path / "000001-epoch-4" / "model.safetensors")
    assert found.keys() == {"layer.weight", "layer.bias"}
    assert torch.equal(found["layer.weight"], torch.full((3, 2), 4.0))


def test_highest_epoch_stays_although_older(tmp_path: Path) -> None:
    """The run was revived from an old archive on purpose; or all peers were lost, and it has begun anew unnoticed."""
    store = Store(tmp_path)
    for epoch, further in ((700, None), *((epoch, "000001-epoch-700") for epoch in (30, 31, 32))):
        store.write(RUN, "Optimizer", small_state(epoch))
        assert store.prune(2) == further
    assert Store.open(tmp_path).epoch == 32
    assert store.folders() == ["000004-epoch-32", "000003-epoch-31", "000001-epoch-700"]
    for epoch in (700, 701):
        store.write(RUN, "Optimizer", small_state(epoch))
        assert store.prune(2) is None
    assert store.folders() == ["000006-epoch-701", "000005-epoch-700"]


def test_reading_warns_of_a_higher_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    for epoch in (700, 3):
        assert caplog.text == ""
        store.write(RUN, "Optimizer", small_state(epoch))
        assert Store.open(tmp_path).epoch == epoch
    assert f"is taken: 000002-epoch-3. But {tmp_path}/000001-epoch-700 is of a later epoch" in caplog.text
    assert caplog.text.count("later epoch") == 1


def test_large_states_are_kept_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_BYTES_OF_FILE", 30)
    Store(tmp_path).write(RUN, "Optimizer", small_state(4))
    assert "000001-epoch-4/model-2.safetensors" in files_of(tmp_path)
    assert is_state_of(Store.open(tmp_path).state, 4)


@pytest.mark.parametrize(
    "damage",
    ["a byte", "cut short", "gone", "a byte of the manifest", "half of the manifest", "no text in the manifest"],
)
def test_damaged_archive_falls_back_to_the_previous_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = Store(tmp_path)
    for epoch in (5, 6):
        store.write(RUN, "Optimizer", small_state(epoch))
    newest = tmp_path / "000002-epoch-6"
    path = newest / ("manifest.json" if "manifest" in damage else "training.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage.startswith("no text"):
        path.write_bytes(data.replace(b"Optimizer", b"Optimize\xff"))
    else:
        if damage.startswith("a byte"):
            data[data.index(b"6", len(data) // 8) if "manifest" in damage else -1] ^= 1
        path.write_bytes(data[: len(data) // 2] if damage in ("cut short", "half of the manifest") else data)
    with caplog.at_level("WARNING", logger="shoal"):
        assert is_state_of(Store.open(tmp_path).state, 5)
    assert "000002-epoch-6" in caplog.text
    assert "damaged" in caplog.text
    assert "The last good archive is taken: 000001-epoch-5" in caplog.text
    with pytest.raises(ArchiveError, match="a good one beside it is 000001-epoch-5"):
        Store.open(newest)
    (tmp_path / "000001-epoch-5" / MANIFEST).unlink()
    with pytest.raises(ArchiveError, match="no good archive in") as e:
        Store.open(tmp_path)
    assert "was never finished" in str(e.value)


@pytest.mark.skipif(sys.platform == "win32", reason="the limit is one of POSIX systems")
def test_a_full_disk_leaves_the_last_good_archive(tmp_path: Path) -> None:
    """The system refuses files beyond a size, in the middle of writing one."""
    import resource

    store = Store(tmp_path)
    store.write(RUN, "Optimizer", small_state(1))
    before = files_of(tmp_path)
    large = State(small_state(2).metadata, [torch.zeros(2**16, 4), *small_state(2).tensors[1:]])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, hard))
    try:
        with pytest.raises(ArchiveError, match=r"epoch 2 could not be written .*; the last good archive is 000001"):
            store.write(RUN, "Optimizer", large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_of(tmp_path) == before
    assert is_state_of(Store.open(tmp_path).state, 1)


def test_a_manifest_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.write(RUN, "Optimizer", small_state(1))
    real = Store.__dict__["_put"]

    def put(self: Store, folder: str, name: str, data: bytes) -> object:
        if name == MANIFEST:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, folder, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_put", put)
        with pytest.raises(ArchiveError, match=r"No space left on device.*last good archive is 000001-epoch-1"):
            store.write(RUN, "Optimizer", small_state(2))
    assert store.folders() == ["000001-epoch-1"]


def test_leftovers_of_a_killed_archiver_are_removed(tmp_path: Path) -> None:
    """It is newer than the last good one, and only an archive that was written would be newer still."""
    store = Store(tmp_path)
    store.write(RUN, "Optimizer", small_state(1))
    left = tmp_path / "000002-epoch-2"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half of it")
    fsync = os.fsync

    def fsync_if_there_is_room(file: int) -> None:
        if left.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync_if_there_is_room)
        with pytest.raises(ArchiveError, match=r"No space left on device.*last good archive is 000001-epoch-1"):
            store.write(RUN, "Optimizer", small_state(3))
        store.write(RUN, "Optimizer", small_state(3))
    assert store.folders() == ["000002-epoch-3", "000001-epoch-1"]


def test_bad_state_is_not_written(tmp_path: Path) -> None:
    store, good = Store(tmp_path), small_state(3)
    with pytest.raises(ValueError, match=r"values of 'layer\.weight' are NaN"):
        store.write(RUN, "Optimizer", State(good.metadata, [torch.full((3, 2), torch.nan), *good.tensors[1:]]))
    for change in (
        {"epoch": -1},
        {"names": {"parameters": ["a", "a"], "extra": []}},
        {
            "names": {"parameters": ["a", "__metadata__"], "extra": []}
        },  # which no reader of safetensors takes for a tensor
        {"names": {"parameters": ["a", 3], "extra": []}},
        {"names": None},
        {"tensors": {"parameters": 2, "extra": 1, "buffers": 0}},
        {"optimizer_metadata": {"names": []}},
    ):
        with pytest.raises(ValueError, match=r"state|names"):
            store.write(RUN, "Optimizer", State({**good.metadata, **change}, good.tensors))
    assert store.folders() == []


@pytest.mark.parametrize(("position", "name"), [(2, "extra.0"), (3, "buffer.0"), (5, "statistic.momentum_buffer.b")])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_state_newcomers_would_refuse_is_not_written(tmp_path: Path, position: int, name: str, value: float) -> None:
    """A run that is revived from it would be lost: nobody could begin with it."""
    metadata, tensors = state_with_all_kinds(("a", "b"))
    tensors[position][0] = value
    with pytest.raises(ValueError, match=rf"values of '{name}' are NaN or infinite"):
        Store(tmp_path).write(RUN, "Optimizer", State(metadata, tensors))
    assert files_of(tmp_path) == []


def state_with_all_kinds(names: tuple[str, str]) -> State:
    """The state of an ``Optimizer`` with an extra tensor and a buffer that have no names; all values differ."""
    metadata, (weight, bias, *statistics) = small_state(1, names)
    tensors = [weight, bias, torch.full((4,), 7.0), torch.full((5,), 8.0), statistics[0] - 1, statistics[1] - 2]
    return State({**metadata, "tensors": {"parameters": 2, "extra": 1, "buffers": 1}}, tensors)


@pytest.mark.parametrize(
    "names",
    [
        ("extra.0", "buffer.0"),
        ("shoal.extra.0", "extra.0"),
        ("a", "statistic.momentum_buffer.a"),
        ("statistic.momentum_buffer.b", "b"),
    ],
)
def test_parameter_names_may_clash_with_shoal_s(tmp_path: Path, names: tuple[str, str]) -> None:
    state = state_with_all_kinds(names)
    Store(tmp_path).write(RUN, "Optimizer", state)
    found = Store.open(tmp_path)
    assert all(map(torch.equal, found.state.tensors, state.tensors))
    assert set(found.names) == set(names)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in zip(names, state.tensors, strict=False))
    in_files = safetensors.torch.load_file(tmp_path / "000001-epoch-1" / "model.safetensors")
    assert in_files.keys() == set(names)


def test_several_inner_optimizers_may_share_statistic_names(tmp_path: Path) -> None:
    """Parameter 0 of the second optimizer, and one that the model calls 0.1."""
    fragment = {"layout": [[0, 0, [2]], [1, 2, [3]]], "tensors": 1, "optimizer": {"names": []}}
    inner = [{"names": ["/0/exp_avg", "/1/exp_avg"]}, {"names": ["/0/exp_avg"]}]
    metadata = {"slot": 1, "fragments": [fragment], "names": ["0.0", "0.1"], "inner": inner}
    tensors = [torch.arange(size) + 10.0 * size for size in (5, 2, 3, 4)]
    Store(tmp_path).write(RUN, "DiLoCo", State(metadata, tensors))
    assert all(map(torch.equal, Store.open(tmp_path).state.tensors, tensors))


def test_archives_of_two_runs_do_not_mix(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.check_run("other")
    store.write(RUN, "Optimizer", small_state(1))
    store.check_run(RUN)
    with pytest.raises(ArchiveError, match=f"has archives of run '{RUN}': give 'other' a folder of its own"):
        store.check_run("other")


def test_an_archive_of_a_newer_format_says_so(tmp_path: Path) -> None:
    Store(tmp_path).write(RUN, "Optimizer", small_state(1))
    path = tmp_path / "000001-epoch-1" / MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format": 3'))
    with pytest.raises(ArchiveError, match="has format 3"):
        Store.open(tmp_path / "000001-epoch-1")


def test_newer_formats_are_not_removed(tmp_path: Path) -> None:
    """Somebody has gone back to an older version for a while."""
    store = Store(tmp_path)
    for epoch in (1, 2):
        store.write(RUN, "Optimizer", small_state(epoch))
    path = tmp_path / "000001-epoch-1" / MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format": 3, "more": [1]').replace('"kind"', '"what"'))
    with pytest.raises(ArchiveError, match="has format 3"):
        store.manifest("000001-epoch-1")
    store.prune(1)
    assert store.folders() == ["000002-epoch-2", "000001-epoch-1"]


def test_temporarily_unreadable_archive_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses fail now and then; what they have is not damaged by that."""
    store = Store(tmp_path)
    for epoch in (1, 2, 3):
        store.write(RUN, "Optimizer", small_state(epoch))
    real = os.open

    def open_now(path: str, *options: int, **more: int) -> int:
        if "epoch-2" in str(path):
            raise OSError(errno.EIO, "slow down")
        return real(path, *options, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_now)
        store.prune(3)
        assert len(store.folders()) == 3
        store.prune(1)
    assert store.folders() == ["000003-epoch-3", "000002-epoch-2"]
    store.prune(1)
    assert store.folders() == ["000003-epoch-3"]


def test_what_another_archiver_writes_at_the_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in one folder are not supported, but neither destroys what the other one has."""
    one, other = Store(tmp_path), Store(tmp_path)
    real = Store.folders

    def folders(self: Store) -> list[str]:
        found = real(self)
        monkeypatch.setattr(Store, "folders", real)
        one.write(RUN, "Optimizer", small_state(5))  # just after the other one has looked
        return found

    monkeypatch.setattr(Store, "folders", folders)
    other.write(RUN, "Optimizer", small_state(5))
    assert whole_archives(other) == ["000002-epoch-5", "000001-epoch-5"]


def whole_archives(store: Store) -> list[str]:
    """The names of all archives that are whole, to the last byte."""
    return [folder for folder, _ in store.whole() if is_state_of(store.read(folder).state, 5)]


def test_uncreatable_folder_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArchiveError, match=r"epoch 3 could not be written to .*file \(.*there is no good archive yet"):
        Store(tmp_path / "file").write(RUN, "Optimizer", small_state(3))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "has no name: give one"),
        ("nowhere://x", "'nowhere://x' is no address of a folder: .*nowhere"),
        ("zip://gone.zip", "'zip://gone.zip' is no address of a folder"),
        ("reference://x", "is no address of a folder"),
        ("data:x", "cannot look into data:x: NotImplementedError: not possible there"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(url: str, says: str) -> None:
    with pytest.raises(ArchiveError, match=says):
        Store(url).check_run(RUN)


def test_missing_package_is_that_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ArchiveError, match=r"'s3://bucket/run' needs one more package: .*s3fs") as e:
        Store("s3://bucket/run")
    assert "shoal[archive]" not in str(e.value)


class _Broken(MemoryFileSystem):
    """An address that takes no bytes, and says so in a way of its own."""

    protocol = "broken"

    def _open(self, *_: object, **__: object) -> object:
        raise NotImplementedError


def test_unwritable_address_is_an_error(tmp_path: Path) -> None:
    fsspec.register_implementation("broken", _Broken, clobber=True)
    with pytest.raises(ArchiveError, match=r"epoch 3 could not be written to .* \(NotImplementedError: not possible"):
        Store(f"broken://{tmp_path.name}").write(RUN, "Optimizer", small_state(3))


class _Away(MemoryFileSystem):
    """An address behind a line that is down, as that of s3fs: it says so to every question."""

    protocol = "away"

    def exists(self, *_: object, **__: object) -> bool:
        raise ConnectionError("Could not connect to the endpoint")


def test_an_address_that_is_not_reached_says_so(tmp_path: Path) -> None:
    fsspec.register_implementation("away", _Away, clobber=True)
    with pytest.raises(ArchiveError, match=r"cannot look into away://.*: Could not connect to the endpoint"):
        Store.open(f"away://{tmp_path.name}")


def test_renamed_archive_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path).write(RUN, "Optimizer", small_state(4))
    (tmp_path / "000001-epoch-4").rename(tmp_path / "best")
    assert Store.open(tmp_path / "best").epoch == 4
    assert Store.open(f"{tmp_path}/best/").epoch == 4
    monkeypatch.chdir(tmp_path / "best")
    assert Store.open(".").epoch == 4


# --- kills ------------------------------------------------------------------------------------------------------------


def _write_without_end(folder: str, epoch: int) -> None:
    """What the process does that is killed: it writes archives of rising epochs, as an archiver does."""
    print(os.getpid(), flush=True)
    store = Store(folder)
    while True:
        store.write(RUN, "Optimizer", small_state(epoch))
        print(epoch, flush=True)
        store.prune(3)
        epoch += 1


def _fork_writers(folder: str) -> None:
    """Fork a writer for each line, which tells its first epoch. No thread runs here, so a fork is safe."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _write_without_end(folder, int(line))
        os.waitpid(pid, 0)
        print("dead", flush=True)


def _kill_writers(folder: Path, kills: int) -> None:
    rng, pause, written, unfinished = random.Random(7), threading.Event(), 0, 0
    store = Store(folder)
    process = nursery.start(Path(__file__), [str(folder)], stderr=2, environment=os.environ, cwd=ROOT)
    assert process.stdin
    assert process.stdout
    with process.stdin as orders, process.stdout as lines:
        for _ in range(kills):
            print(written + 1, file=orders, flush=True)
            pid = int(lines.readline())
            for _ in range(rng.randrange(3)):
                written = int(lines.readline())
            # Into the middle of an archive, which takes some milliseconds.
            pause.wait(rng.random() * 0.02)
            os.kill(pid, signal.SIGKILL)
            while (line := lines.readline()) != "dead\n":
                written = int(line)
            whole = [name for name, _ in store.whole()]
            unfinished += len(store.folders()) - len(whole)
            for name in whole:
                archive = store.read(name)
                assert is_state_of(archive.state, archive.epoch)
            newest = store.read(whole[0]).epoch if whole else 0
            # The last one may be whole although there was no time to say so.
            assert written <= newest <= written + 1
            assert len(whole) >= min(3, newest)
            written = newest
    process.wait()
    assert unfinished, "no kill came while an archive was being written"


@needs_kills
@pytest.mark.timeout(300)
def test_archives_are_whole_after_any_kill(tmp_path: Path) -> None:
    _kill_writers(tmp_path, QUICK_KILLS)


@needs_kills
@pytest.mark.slow_drill
@pytest.mark.timeout(3600)
def test_after_a_thousand_kills_all_archives_are_whole(tmp_path: Path) -> None:
    _kill_writers(tmp_path, MANY_KILLS)


if __name__ == "__main__":
    _fork_writers(*sys.argv[1:])
