"""What peers call themselves: told when they connect, in a private run only to members."""

from __future__ import annotations

import os
import socket

import pytest

import shoal
from shoal.access.tokens import Token
from shoal.base.logs import MAX_NAME_CHARACTERS, name_and_id
from shoal.dht.authorization import AuthorizedRequest, AuthorizedResponse, AuthorizerBase
from shoal.errors import NotAMemberError
from shoal.net.connection import Hello
from shoal.peers.identity import checked_name, default_name
from tests.p2p.peers import KINDS, Number, Peers, serving, stub


class Members(AuthorizerBase):
    """Lets everybody in."""

    async def prepare(self) -> None:
        pass

    async def sign_request(self, request: AuthorizedRequest, call: str) -> None:
        pass

    async def validate_request(self, request: AuthorizedRequest, call: str) -> bool:
        return True

    async def sign_response(self, response: AuthorizedResponse, request: AuthorizedRequest, call: str) -> None:
        pass

    async def validate_response(self, response: AuthorizedResponse, request: AuthorizedRequest, call: str) -> bool:
        return True


both_kinds = pytest.mark.parametrize("kind", KINDS)


@both_kinds
async def test_both_sides_of_a_connection_learn_the_name_of_the_other(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.start(name="laptop"), await peers.start(name="größter Rechner")
        await serving(server)
        await stub(caller, server).rpc_square(Number(value=3))
        assert name_and_id(str(server.peer_id)) == f"laptop (…{str(server.peer_id)[-8:]})"
        assert name_and_id(str(caller.peer_id)).startswith("größter Rechner (…")


@both_kinds
@pytest.mark.parametrize("is_member", [True, False])
async def test_in_a_private_run_only_members_learn_names(kind: str, is_member: bool) -> None:
    token = Token.new_run("friends").text
    async with Peers(kind) as peers:
        server = await peers.start(name="laptop", token=token)
        caller = await peers.start(name="curious", token=token if is_member else None)
        await serving(server)
        if is_member:
            await stub(caller, server).rpc_square(Number(value=3))
        else:
            with pytest.raises(NotAMemberError):
                await stub(caller, server).rpc_square(Number(value=3))
        known = [name_and_id(str(peer.peer_id)).startswith(peer.name) for peer in (server, caller)]
        assert known == [is_member] * 2


async def test_a_name_of_any_length_or_with_terminal_codes_does_no_harm() -> None:
    async with Peers("memory") as peers:
        server, caller = await peers.two()
        await serving(server)
        caller.hello = lambda: Hello(agent="x", instance=caller.instance, name="\x1b[2J\r\n")  # type: ignore[method-assign]
        await stub(caller, server).rpc_square(Number(value=3))
        assert name_and_id(str(caller.peer_id)).isprintable()
        long = await peers.start()
        long.hello = lambda: Hello(agent="x", name="y" * (MAX_NAME_CHARACTERS + 1))  # type: ignore[method-assign]
        with pytest.raises(shoal.errors.ShoalError):
            await stub(long, server).rpc_square(Number(value=3))
        assert name_and_id(str(long.peer_id)).startswith("…")
        assert (await stub(caller, server).rpc_square(Number(value=3))).value == 9


def test_the_default_is_the_host_and_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_NAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop.example.org")
    assert default_name() == f"laptop-{os.getpid()}"
    monkeypatch.setattr(socket, "gethostname", lambda: "h\x1b" * 100)
    assert default_name().endswith(f"-{os.getpid()}")
    assert checked_name(default_name())
    monkeypatch.setenv("SHOAL_NAME", "")
    assert default_name() == ""
    monkeypatch.setenv("SHOAL_NAME", "garage")
    assert default_name() == "garage"
    monkeypatch.setenv("SHOAL_NAME", "\x07")
    with pytest.raises(ValueError, match="SHOAL_NAME must have at most 32 printable characters"):
        default_name()


def test_a_name_that_cannot_be_is_refused() -> None:
    for wrong in ("x" * 33, "a\nb", " a", "a  b", "\x1b[31m"):
        with pytest.raises(ValueError, match="name must have at most 32 printable characters"):
            checked_name(wrong)
    with pytest.raises(TypeError, match="name must be a text such as 'laptop'"):
        shoal.DHT(start=False, name=3)


@pytest.mark.parametrize(("options", "expected"), [({}, None), ({"name": "me"}, "me"), ({"name": ""}, "")])
def test_a_dht_has_a_name(options: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_NAME", raising=False)
    with shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], **options) as dht:
        assert dht.p2p.name == (default_name() if expected is None else expected)


def test_with_an_authorizer_it_has_none_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who connect have shown nothing yet when they are greeted."""
    monkeypatch.delenv("SHOAL_NAME", raising=False)
    with shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], authorizer=Members()) as dht:
        assert dht.p2p.name == ""
