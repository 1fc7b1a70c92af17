"""What ``shoal archive`` and ``shoal revive`` are told, and what they say if that cannot be."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from shoal.cli.__main__ import build_parser, main
from shoal.cli.__main__ import parse as parse_line

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def test_where_options_may_stand() -> None:
    parse = functools.partial(parse_line, build_parser())
    for words in (
        ["archive", ADDRESS, "--run", "r", "--keep", "3", "x"],
        ["archive", "--run", "r", "--keep", "3", ADDRESS, "x"],
    ):
        found = parse(words)
        assert (found.addresses, found.folder, found.run_id, found.keep) == ([ADDRESS], "x", "r", 3)
    assert parse(["archive", "--run", "r", ADDRESS, ADDRESS, "x"]).addresses == [ADDRESS, ADDRESS]
    for words in (["archive", ADDRESS, "/ip4/b", "--run", "r", "x"], ["archive", ADDRESS, "--run", "r", "/ip4/b", "x"]):
        found = parse(words)
        assert (found.addresses, found.folder) == ([ADDRESS, "/ip4/b"], "x")
    assert parse(["revive", "x", "--token", "t", ADDRESS]).addresses == [ADDRESS]
    assert parse(["monitor", ADDRESS, "--run", "r", "/ip4/b"]).addresses == [ADDRESS, "/ip4/b"]
    for words in (["archive", ADDRESS, "--run", "r", "x", "--often"], ["doctor", "--run"], ["demo", "x"]):
        with pytest.raises(SystemExit):
            parse(words)


def test_what_cannot_be_is_said_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["revive", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"shoal revive: there is no good archive in {tmp_path}\n"
    assert main(["revive", str(tmp_path / "typo")]) == 1
    assert f"there is no folder {tmp_path / 'typo'}" in capsys.readouterr().err
    assert main(["archive", "--run", "r", ADDRESS, ADDRESS]) == 1
    assert f"the last word must be the folder of the archives, got {ADDRESS}" in capsys.readouterr().err
    assert main(["archive", "--run", "r", ADDRESS, "203.0.113.7:31337"]) == 1
    assert "the last word must be the folder of the archives, got 203.0.113.7:31337" in capsys.readouterr().err
    assert main(["archive", "--run", "r", "127.0.0.1:1", str(tmp_path)]) == 1
    assert "\n  127.0.0.1:1: connection refused" in capsys.readouterr().err
    assert main(["archive", "--run", "r", ADDRESS, str(tmp_path)]) == 1
    assert "failed to connect to bootstrap peers" in capsys.readouterr().err
    assert main(["archive", "--run", "r", "--token", "nonsense", ADDRESS, str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("shoal archive: ")


@pytest.mark.parametrize(("options", "status"), [([], 0), (["--once"], 130)])
def test_an_archive_that_was_interrupted_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], status: int
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.archive.store.Store", interrupted)
    assert main(["archive", "--run", "r", *options, ADDRESS, str(tmp_path)]) == status
