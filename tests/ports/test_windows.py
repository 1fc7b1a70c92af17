"""What Windows does differently, tried on any system; ``--pretend=windows`` runs the other tests as there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shoal import errors
from shoal.base.clock import ProcessClock
from shoal.base.reactor import LOOPS, Portal, Reactor, new_event_loop
from shoal.errors import StreamClosedError
from shoal.net.tcp.handshake import explain
from shoal.net.tcp.listener import Listener, bind
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import COOKIE_BYTES
from shoal.p2p import Identity, Multiaddr
from tests import pretend
from tests.net.test_sessions import Circle, has_ended
from tests.net.test_tcp import Listening, read
from tests.p2p.peers import end_of, until
from tests.pretend.proactor import PretendedProactorLoop
from tests.pretend.windows import O_BINARY, TextFiles, exclusive


def on_proactor(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the loop of Windows; errors that reach nobody fail it."""

    def run() -> None:
        reported: list[dict[str, Any]] = []
        loops: list[PretendedProactorLoop] = []

        def run_in_thread() -> None:  # in the main thread it would take what wakes that one for signals
            loop = PretendedProactorLoop()
            loops.append(loop)
            loop.set_exception_handler(lambda _, report: reported.append(report))
            try:
                loop.run_until_complete(test())
                loop.run_until_complete(loop.shutdown_default_executor())
            except BaseException as e:
                errors.append(e)
            finally:
                loop.close()

        errors: list[BaseException] = []
        thread = threading.Thread(target=run_in_thread)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        assert not reported

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# --- files ------------------------------------------------------------------------------------------------------------


def test_identity_files_are_binary(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In text mode each 0x0A of a key would become two bytes: one key in four has one."""
    text = TextFiles()
    flags: list[int] = []

    def noting(path: Any, flag: int, *mode: int) -> int:
        flags.append(flag)
        return text.open(path, flag, *mode)

    monkeypatch.setattr("shoal.peers.identity.NEW_BINARY_FILE", os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_BINARY)
    monkeypatch.setattr(os, "open", noting)
    monkeypatch.setattr(os, "write", text.write)
    key = next(each for _ in range(1000) if b"\n" in (each := Identity.generate()).to_bytes())
    monkeypatch.setattr(Identity, "generate", classmethod(lambda cls: key))
    made = Identity.load_or_create(tmp_path / "id")
    monkeypatch.undo()
    assert flags[0] & O_BINARY
    assert Identity.load_or_create(tmp_path / "id").peer_id == made.peer_id


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_the_loop_is_made_in_the_thread_in_which_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in the main thread, the loop of Windows takes the wake-up descriptor: Ctrl-C is lost."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread has one")
    monkeypatch.setattr("shoal.base.reactor.loop_factory", lambda: PretendedProactorLoop)
    before = signal.set_wakeup_fd(-1)
    reactor = Reactor()
    try:
        assert signal.set_wakeup_fd(before) == -1
        assert isinstance(reactor.loop, PretendedProactorLoop)
    finally:
        reactor.stop()


def test_a_policy_does_not_choose_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter sets one with which there can be 512 sockets."""
    monkeypatch.setenv("SHOAL_LOOP", "asyncio")

    def never() -> None:
        raise AssertionError("the policy was asked")

    monkeypatch.setattr(asyncio, "new_event_loop", never)
    new_event_loop().close()


@pytest.mark.parametrize("wanted", LOOPS)
def test_the_environment_chooses_the_loop(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    if wanted == "uvloop":
        try:
            import uvloop  # noqa: F401
        except ImportError:
            pytest.skip("not to be had here")
    monkeypatch.setenv("SHOAL_LOOP", wanted)
    loop = new_event_loop()
    loop.close()
    assert any(kind.__module__.startswith("uvloop") for kind in type(loop).__mro__) == (wanted == "uvloop")


def test_an_unknown_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_LOOP", "trio")
    with pytest.raises(ValueError, match="SHOAL_LOOP must be one of uvloop, asyncio, got 'trio'"):
        new_event_loop()
    monkeypatch.setattr(Reactor, "current", None)
    with pytest.raises(ValueError, match="'trio'"):
        Portal("object")


# --- connections ------------------------------------------------------------------------------------------------------


@on_proactor
async def test_a_reset_leaves_neither_an_error_nor_a_socket() -> None:
    async with Listening() as listening:
        near = await TcpTransport(Identity.generate()).dial(listening.address, listening.peer_id)
        far = await listening.streams.get()
        near.abort()
        await until(lambda: far.closed)
        with pytest.raises(StreamClosedError, match="the other side closed"):
            await far.read_exactly_into(memoryview(bytearray(1)))
        await asyncio.sleep(0)


@on_proactor
async def test_who_is_gone_is_noticed_while_nobody_reads() -> None:
    async with Listening() as listening:
        near = await TcpTransport(Identity.generate()).dial(listening.address, listening.peer_id)
        far = await listening.streams.get()
        writing = asyncio.ensure_future(near.write(bytes(2**26)))
        await until(lambda: far.read_paused)
        near.abort()
        await until(lambda: far.closed)
        await end_of(writing)


@on_proactor
async def test_silent_strangers_cost_no_tls() -> None:
    """The standard library takes 256 KiB for each of them."""
    async with Listening() as listening:
        _, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        await until(lambda: len(listening.transport.strangers.silent) == 1)
        assert len(listening.transport.strangers.shaking_hands) == 0
        writer.write(b"\x16")
        await until(lambda: len(listening.transport.strangers.shaking_hands) == 1)
        writer.transport.abort()
        await until(lambda: len(listening.transport.strangers.shaking_hands) == 0)


@on_proactor
async def test_sessions_and_streams_are_told_apart() -> None:
    """No reader can be set there to look at the first byte."""
    async with Circle() as circle:
        near, far = await circle.streams_through(*await circle.circuit())
        await near.write(bytes(1_000_000))
        assert await read(far, 1_000_000) == bytes(1_000_000)
        near.close()
        assert await has_ended(await circle.near.open_session(circle.address, bytes(COOKIE_BYTES)))
        assert circle.dropped == {"unknown session": 1}
        (await circle.near.dial(circle.address, circle.relay.identity.peer_id)).abort()
        await until(lambda: far.closed)


@on_proactor
async def test_nothing_ends_accepting() -> None:
    """Neither those who leave before they are accepted, nor an error of whoever takes a connection."""
    taken: list[socket.socket] = []
    exhausted: list[None] = []

    def take(connection: socket.socket, host: str) -> None:
        taken.append(connection)
        if len(taken) == 1:
            raise RuntimeError("this one cannot be taken")

    [bound] = await bind("127.0.0.1", 0, socket.AF_INET)
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [ConnectionResetError(errno.ECONNRESET, "reset")] * 5

    async def sometimes(listening: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(listening)

    loop.sock_accept = sometimes  # type: ignore[method-assign]
    logging.getLogger("shoal.net.tcp.listener").disabled = True
    listener = Listener(bound, take, lambda: exhausted.append(None))
    try:
        for number in range(1, 4):
            with socket.create_connection(listener.address):
                await until(lambda: len(taken) == number)  # noqa: B023
        assert not exhausted
    finally:
        logging.getLogger("shoal.net.tcp.listener").disabled = False
        await listener.close()
        for each in taken:
            each.close()


@pytest.mark.parametrize("code", [1231, 1232])
def test_errors_of_completion_ports_that_mean_no_route(code: int) -> None:
    error = OSError(errno.EINVAL, "unreachable")
    error.winerror = code  # type: ignore[attr-defined]
    assert explain(error).startswith("no route to that host")


async def test_a_host_of_which_one_address_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that answers is tried beside it; there is no waiting for the time limit."""
    async with Listening() as listening:
        loop = asyncio.get_running_loop()
        real, dead = loop.sock_connect, asyncio.Event()

        async def connect(connecting: socket.socket, address: Any) -> None:
            if address[0] == "127.0.0.9":
                try:
                    await asyncio.Event().wait()
                finally:
                    dead.set()
            await real(connecting, address)

        async def resolve(host: str, port: int, **_: Any) -> list[Any]:
            hosts = ["127.0.0.9", "127.0.0.1"]
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, port)) for each in hosts]

        class Loop:
            """The loop, but for these two."""

            sock_connect, getaddrinfo = staticmethod(connect), staticmethod(resolve)

            def __getattr__(self, name: str) -> Any:
                return getattr(loop, name)

        monkeypatch.setattr("shoal.net.tcp.connect.asyncio.get_running_loop", Loop)
        monkeypatch.setattr("shoal.net.tcp.connect.CONNECT_STAGGER", 0.01)
        address = Multiaddr(f"/dns4/two.example/tcp/{listening.port}")
        stream = await TcpTransport(Identity.generate()).dial(address, listening.peer_id)
        assert dead.is_set()
        stream.abort()


# --- time and words ---------------------------------------------------------------------------------------------------


def test_no_two_looks_at_the_time_are_the_same() -> None:
    now = 1_700_000_000.0
    clock = ProcessClock(lambda: now, lambda: now)
    looks = [clock.time() for _ in range(1000)]
    assert looks == sorted(set(looks))
    assert len({look + 3600 for look in looks}) == 1000
    assert looks[-1] - looks[0] < 0.001
    now += 0.015625
    assert clock.time() == now, "as soon as the clock has ticked, it is right"
    now -= 0.1
    assert clock.time() > now + 0.1, "a little back is not back"
    now -= 100
    assert clock.time() == now, "far back is"


@pytest.mark.parametrize("system", ["win32", "darwin", "linux"])
def test_advice_is_for_this_system(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr("shoal.errors.sys.platform", system)
    said = " ".join(
        [errors.set_the_clock(), errors.make_private("key"), errors.allow_open_files(1024), errors.end_at_once()]
    )
    assert ("timedatectl" in said) == (system == "linux")
    assert ("chmod" in said) == (system != "win32")
    assert ("w32tm" in said) == ("TerminateProcess" in said) == (system == "win32")
    assert ("Local Network" in errors.no_route_to_neighbours()) == (system == "darwin")


def test_commands_for_a_dead_process_are_not_heard(tmp_path) -> None:
    """Windows says EINVAL where others say EPIPE."""
    from shoal.cli.demo.messages import PeerProcess, Train

    class Broken:
        def write(self, _: bytes) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

        flush = close = lambda self, *_: self.write(b"")

    peer = PeerProcess.__new__(PeerProcess)
    peer.process = type("Process", (), {"stdin": Broken()})()
    with contextlib.nullcontext():
        peer.tell(Train())
        peer.hang_up()


def test_commands_are_not_read_from_standard_input() -> None:
    """A library that looks at it while somebody reads from it would wait, on Windows."""
    script = """
        import os
        from shoal.cli.demo.peer import _take_standard_input
        commands = _take_standard_input()
        assert os.read(0, 10) == b"", "nothing is there any more"
        assert commands.read() == b"a command", "it has moved"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], input=b"a command", check=True, timeout=60)


@pytest.mark.skipif(pretend.system != "windows", reason="elsewhere files have no text mode")
def test_a_key_with_a_line_feed_survives(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = next(each for _ in range(1000) if b"\n" in (each := Identity.generate()).to_bytes())
    monkeypatch.setattr(Identity, "generate", classmethod(lambda cls: key))
    Identity.load_or_create(tmp_path / "id")
    assert Identity.load_or_create(tmp_path / "id").peer_id == key.peer_id


@pytest.mark.skipif(pretend.system != "windows", reason="elsewhere there is no such option")
async def test_a_port_is_for_one_listener_alone() -> None:
    for bound in await bind("127.0.0.1", 0, socket.AF_INET):
        with bound:
            assert bound.fileno() in exclusive
