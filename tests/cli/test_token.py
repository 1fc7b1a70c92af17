"""``shoal token`` and ``--token`` from end to end: begin a run, invite, join, expire, expel; errors name their fix."""

from __future__ import annotations

import os
import pickle
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import shoal
from shoal.access.badges import ROLES_BY_NAME
from shoal.access.tokens import BADGE, DAY, INVITATION, RUN, Token, read_token, write_token
from shoal.base.clock import TOLERANCE_SECONDS, ProcessClock
from shoal.cli.__main__ import main
from shoal.cli.doctor.findings import Severity, look_at_token
from shoal.errors import BootstrapError, NotAMemberError, P2PDaemonError
from shoal.p2p import Identity
from tests.cli.test_dht_command import bootstrap

JOIN = re.compile(r"^  shoal dht --initial-peers (/\S+/p2p/\w+) --token TOKEN$")
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
on_posix = pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX thing")


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is chosen, and nobody has tried to join a swarm in vain. After that a process judges no dates."""
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    monkeypatch.setattr("shoal.base.clock.clock_of_process", ProcessClock())


def output_of(capsys: pytest.CaptureFixture[str], *command: str, status: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["token", *command]) == status
    return capsys.readouterr()


def join(address: str, token: str | Path | None, **options: object) -> shoal.DHT:
    return shoal.DHT([address], start=True, host_maddrs=LOOPBACK, token=token, **options)


def test_private_run_from_first_token_to_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The story of docs/private-swarms.md, with real processes."""
    secret = tmp_path / "friends.token"
    out, errors = output_of(capsys, "new", "friends", "-o", str(secret))
    assert out == ""
    assert "Keep it like a password" in errors
    assert os.name != "posix" or stat.S_IMODE(secret.stat().st_mode) == 0o600
    text, described = output_of(capsys, "invite", "--token", str(secret), "--name", "anna", "--days", "2")
    invitation = text.strip()
    assert invitation.startswith(INVITATION)
    assert re.search(r"role: +train\n", described)
    shown, _ = output_of(capsys, "show", invitation)
    assert output_of(capsys, "show", "--token", invitation)[0] == shown
    assert "give the token once" in output_of(capsys, "show", "--token", invitation, invitation, status=1)[1]
    assert "name:     'anna'" in shown
    key = re.search(r"key: +(12D3\w+), to take it back: shoal token revoke", shown)
    assert key is not None

    with bootstrap("--token", str(secret), "--ephemeral") as seed:
        address = seed.line_that_matches(JOIN)[1]
        with join(address, invitation) as guest, join(address, secret) as friend:
            until = shoal.get_dht_time() + 60
            assert guest.store("from", "a guest", until)
            found = friend.get("from", latest=True)
            assert found is not None
            assert found.value == "a guest"
            with pytest.raises(BootstrapError, match="takes part in a private run, and this peer has no token"):
                join(address, None)
            with pytest.raises(BootstrapError, match="the badge is for another run"):
                join(address, Token.new_run("rivals").text)

            out, errors = output_of(capsys, "revoke", key[1], "--via", address, "--token", str(secret))
            assert out == "List 1 is on its way: 1 key revoked.\n"
            assert "start over with `shoal token new`" in errors
            assert (tmp_path / "friends.token.revoked").is_file()
            assert friend.p2p.membership is not None
            while friend.p2p.membership.serial == 0:  # the test's time limit is the limit
                time.sleep(0.01)
            assert friend.store("after", "that", until)
            guest.store("after", "a guest", until + 1)
            found = friend.get("after", latest=True)
            assert found is not None
            assert found.value == "that", "the guest is out"
        with pytest.raises(BootstrapError, match="the badge was revoked"):
            join(address, invitation)
        again, _ = output_of(capsys, "revoke", "--via", address, "--token", str(secret))
        assert again == "List 1 is on its way: 1 key revoked.\n", "nothing new, but told once more"


def test_environment_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", Token.new_run("friends").text)
    with bootstrap("--ephemeral") as seed:
        address = seed.line_that_matches(JOIN)[1]
        with join(address, None) as friend:
            assert friend.p2p.membership is not None
        with pytest.raises(BootstrapError, match="this peer has no token"):
            join(address, "")  # open, whatever the environment says


def test_badge_for_one_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret, identity_path = Token.new_run("friends"), tmp_path / "id"
    peer = Identity.create(identity_path).peer_id
    badge = output_of(capsys, "invite", "--token", secret.text, "--peer", str(peer), "--role", "issue")[0].strip()
    assert badge.startswith(BADGE)
    shown = output_of(capsys, "show", badge)[0]
    assert f"peer:     {peer}" in shown
    assert "train, and invite others" in shown
    with shoal.DHT(start=True, host_maddrs=LOOPBACK, token=secret.text) as seed:
        [address] = map(str, seed.get_visible_maddrs())
        with join(address, badge, identity_path=identity_path) as dht:
            assert dht.peer_id == peer
            assert dht.store("key", 1, shoal.get_dht_time() + 60)
        with pytest.raises(P2PDaemonError, match=f"badge for peer {peer}.*identity_path"):
            join(address, badge)
        guest = output_of(capsys, "invite", "--token", badge, "--identity-path", str(identity_path))[0].strip()
        with join(address, guest) as dht:
            assert dht.store("key", 2, shoal.get_dht_time() + 70)
    _, errors = output_of(capsys, "invite", "--token", badge, status=1)
    assert "give the identity file of that peer" in errors


def test_guest_whose_time_is_over() -> None:
    secret = Token.new_run("friends")
    old = secret.invite(ROLES_BY_NAME["train"], int(time.time() - TOLERANCE_SECONDS - 60)).text
    with shoal.DHT(start=True, host_maddrs=LOOPBACK, token=secret.text) as seed:
        [address] = map(str, seed.get_visible_maddrs())
        with pytest.raises(BootstrapError, match=r"has expired: .* ask who has invited you"):
            join(address, old)
        assert seed.p2p.metrics.members_refused["expired"] >= 1


def test_new_token_goes_to_the_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, errors = output_of(capsys, "new", "friends")
    token = Token.parse(out.strip())
    assert token.kind == RUN
    assert token.run in errors
    path = tmp_path / "there"
    path.write_text("mine")
    _, errors = output_of(capsys, "new", "friends", "-o", str(path), status=1)
    assert f"{path} exists, and no token takes the place of another: choose another -o" in errors
    assert path.read_text() == "mine"


def test_show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = Token.new_run("friends")
    assert "expires:  never" in output_of(capsys, "show", secret.text)[0]
    assert secret.text not in output_of(capsys, "show", secret.text)[0]
    monkeypatch.setenv("SHOAL_TOKEN", secret.invite(ROLES_BY_NAME["relay"], int(time.time()) + 5 * DAY).text)
    shown = output_of(capsys, "show")[0]
    assert re.search(r"role: +relay\n", shown)
    assert "5.0 days left" in shown
    old = secret.invite(ROLES_BY_NAME["relay"], int(time.time()) - 5)
    shown, errors = output_of(capsys, "show", old.text, status=1)
    assert "EXPIRED" in shown
    assert "ask the person who invited you" in errors


SECRET = Token.new_run("friends")
GUEST = SECRET.invite(ROLES_BY_NAME["relay"], int(time.time()) + DAY)
ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
KEY = str(Identity.generate().peer_id)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["show"], "there is no token: give --token TOKEN, or set SHOAL_TOKEN; begin with `shoal token new`"),
        (["show", GUEST.text[:-3]], "a character is missing or wrong: copy the whole text again"),
        (["show", "no-such-file"], "cannot use token file no-such-file: No such file"),
        (["invite"], "there is no token"),
        (["invite", "--token", SECRET.text, "--role", "boss"], "use one of train, relay, monitor, issue"),
        (["invite", "--token", GUEST.text, "--role", "train"], "cannot be granted with a token that allows: relay"),
        (["invite", "--token", SECRET.text, "--peer", "me"], "is not a peer id"),
        (["invite", "--token", SECRET.text, "--name", "x" * 40], "at most 32 characters"),
        (["new", "x" * 40], "at most 32 characters"),
        (["revoke", KEY, "--via", ADDRESS, "--token", GUEST.text], "only the secret key of the run can revoke"),
        (["revoke", "somebody", "--via", ADDRESS, "--token", SECRET.text], "is not a peer id"),
        (["revoke", KEY, "--via", "/ip4/1.2.3.4/tcp/5", "--token", SECRET.text], "must end with /p2p/"),
        (["revoke", KEY, "--via", ADDRESS, "--token", SECRET.text], "connection refused"),
        (["revoke", KEY, "--via", "127.0.0.1:1", "--token", SECRET.text], "127.0.0.1:1: connection refused"),
        (
            ["revoke", KEY, "--via", "local", "--token", SECRET.text],
            "--via takes addresses of certain peers",
        ),
        (["revoke", KEY, "--via", f"{ADDRESS},a:1", "--token", SECRET.text], "--via takes the address of one peer of"),
    ],
)
def test_errors_name_their_fix(command: Sequence[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, errors = output_of(capsys, *command, status=1)
    assert out == ""
    assert errors.startswith("shoal token: ")
    assert text in errors


def test_nothing_to_revoke(capsys: pytest.CaptureFixture[str]) -> None:
    with shoal.DHT(start=True, host_maddrs=LOOPBACK, token=SECRET.text) as seed:
        [address] = map(str, seed.get_visible_maddrs())
        for via in (address, f"127.0.0.1:{address.split('/')[4]}"):
            _, errors = output_of(capsys, "revoke", "--via", via, "--token", SECRET.text, status=1)
            assert "nothing is revoked in this run" in errors


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    _, errors = output_of(capsys, status=2)
    assert "revoke" in errors


@on_posix
def test_secret_that_others_can_read_is_refused_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    write_token(path, SECRET)
    path.chmod(0o644)
    fix = f"run chmod 600 {path}"
    assert fix in output_of(capsys, "show", str(path), status=1)[1]
    with pytest.raises(P2PDaemonError, match=fix):
        shoal.DHT(start=True, host_maddrs=LOOPBACK, token=path)
    assert main(["dht", "--token", str(path), "--ephemeral", "--host-maddrs", *LOOPBACK]) == 1
    assert fix in capsys.readouterr().err
    path.chmod(0o600)
    assert read_token(path).text == SECRET.text


# --- the doctor -------------------------------------------------------------------------------------------------------


def doctor(capsys: pytest.CaptureFixture[str], *options: str, status: int) -> str:
    capsys.readouterr()
    assert main(["doctor", *options, "--host-maddrs", *LOOPBACK]) == status
    return " ".join(capsys.readouterr().out.split())


def test_doctor_tells_of_the_token(capsys: pytest.CaptureFixture[str]) -> None:
    with shoal.DHT(start=True, host_maddrs=LOOPBACK, token=SECRET.text) as seed:
        [address] = map(str, seed.get_visible_maddrs())
        monitor = SECRET.invite(ROLES_BY_NAME["monitor"], int(time.time()) + 9 * DAY).text
        for token, role in ((SECRET.text, "train, and invite others"), (monitor, "monitor")):
            found = doctor(capsys, address, "--token", token, "--client-mode", status=0)
            assert f"ok token run {SECRET.run}, role {role}, until 2" in found
            assert f"ok token both are members of the run {SECRET.run}" in found
        stranger = doctor(capsys, address, "--client-mode", status=1)
        assert "FAIL token peer" in stranger
        assert "this peer has no token: ask a member for an invitation" in stranger
        damaged = doctor(capsys, address, "--client-mode", "--token", SECRET.text[:-2], status=1)
        assert "FAIL token cannot use the token: the token is damaged" in damaged
        assert "this peer has no token" in damaged
        assert seed.p2p.members is not None
        old = SECRET.invite(ROLES_BY_NAME["train"], int(time.time() - TOLERANCE_SECONDS - 60)).text
        expired = doctor(capsys, address, "--client-mode", "--token", old, status=1)
        assert f"FAIL token expired: run {SECRET.run}" in expired
        assert "does not let this peer in: the badge (train) has expired" in expired


async def test_doctor_warns_before_a_token_ends() -> None:
    soon = SECRET.invite(ROLES_BY_NAME["train"], int(time.time()) + DAY).text
    _, finding = await look_at_token(soon, None)
    assert finding is not None
    assert finding.verdict is Severity.WARN
    assert await look_at_token("", None) == ("", None)


def test_reasons_survive_the_way_to_other_threads() -> None:
    error = NotAMemberError("why", reason="expired")
    assert pickle.loads(pickle.dumps(error)).reason == "expired"
