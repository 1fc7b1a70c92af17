"""Errors that users can mend: a sentence below their own line, without the frames behind it."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import weakref
from textwrap import dedent

import pytest
import torch

import shoal
from shoal.base.closeable import at_the_door
from shoal.errors import ReactorError, ShoalError

pytestmark = pytest.mark.oldest

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWRqtrjbqhmpvJpo6y9uA7JEv9XkzXQ6yTQmeJ3Qp5Cxkk"
MOST_LINES = 8

MISTAKES = {
    "nobody answers": (
        f"dht = shoal.DHT(initial_peers=['{NOBODY}'], start=True)",
        "connection refused: nothing listens there",
    ),
    "an address without an identity": (
        "dht = shoal.DHT(initial_peers=['/ip4/127.0.0.1/tcp/9'], start=True)",
        "must end with /p2p/<peer id>",
    ),
    "no address at all": ("dht = shoal.DHT(initial_peers=['there'], start=True)", "ValueError: "),
    "a number instead of addresses": ("dht = shoal.DHT(initial_peers=4012, start=True)", "TypeError: "),
    "nowhere to listen": ("dht = shoal.DHT(host_maddrs=['/ip4/198.51.100.1/tcp/1'], start=True)", "cannot listen on"),
    "no such token": ("dht = shoal.DHT(start=True, token='no-token')", "cannot use"),
    "waiting later": (
        f"dht = shoal.DHT(initial_peers=['{NOBODY}'], start=True, await_ready=False); dht.wait_until_ready()",
        "connection refused",
    ),
    "an argument that does not exist": (
        f"dht = shoal.DHT(initial_peer=['{NOBODY}'], start=True)",
        "DHT has no argument 'initial_peer': did you mean initial_peers?",
    ),
}


def complaint_of(script: str) -> list[str]:
    """The error output of a program that fails."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_a_few_lines(mistake: str) -> None:
    line, words = MISTAKES[mistake]
    lines = complaint_of(f"import shoal\n{line}")
    assert len(lines) <= MOST_LINES, "\n".join(lines)
    assert any(words in line for line in lines[2:])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell which process it is")
def test_a_port_in_use_is_told_with_its_process() -> None:
    with shoal.DHT(start=True, host_maddrs=LOOPBACK) as dht:
        port = dht.get_visible_maddrs()[0]["tcp"]
        lines = complaint_of(f"import shoal\ndht = shoal.DHT(host_maddrs=['/ip4/127.0.0.1/tcp/{port}'], start=True)")
    assert len(lines) <= MOST_LINES, "\n".join(lines)
    assert f"port {port} is in use: is an earlier run still running? (process {os.getpid()})" in lines[-1]


def test_a_step_of_an_optimizer_that_is_shut_down() -> None:
    lines = complaint_of(
        dedent("""
            import shoal, torch
            model = torch.nn.Linear(2, 2)
            dht = shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
            optimizer = shoal.Optimizer(
                dht=dht, run_id="x", target_batch_size=3, params=model.parameters(), optimizer=torch.optim.SGD
            )
            optimizer.shutdown()
            optimizer.step()
        """)
    )
    assert len(lines) <= MOST_LINES, "\n".join(lines)
    assert lines[-1].startswith("shoal.errors.ReactorError: this Optimizer is shut down")


@pytest.mark.parametrize(
    ("make", "wrong", "meant"),
    [
        (shoal.DHT, "initial_peer", "initial_peers"),
        (shoal.DHT, "host_maddr", "host_maddrs"),
        (shoal.DHT, "clientmode", "client_mode"),
        (shoal.Optimizer, "target_batch", "target_batch_size"),
        (shoal.DiLoCo, "run_ids", "run_id"),
        (shoal.DecentralizedAverager, "prefx", "prefix"),
    ],
)
def test_an_argument_that_is_misspelt(make: type, wrong: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"^{make.__name__} has no argument '{wrong}': did you mean {meant}\\?$"):
        make(**({"start": False} if make is shoal.DHT else {}), **{wrong: None})


def test_an_argument_that_is_like_no_other() -> None:
    with pytest.raises(TypeError, match=r"^DHT has no argument 'quantum'$"):
        shoal.DHT(start=False, quantum=1)
    with pytest.raises(TypeError, match=r"^P2P has no parameter quantum$"), shoal.DHT(start=True) as dht:
        dht.run_coroutine(lambda *_: shoal.p2p.P2P.create(quantum=1))


class Shop:
    @at_the_door
    def call(self, function: object) -> object:
        """Let the user's function run."""
        return function()  # type: ignore[operator]


def frames_of(error: BaseException) -> int:
    trace, count = error.__traceback__, 0
    while trace is not None:
        trace, count = trace.tb_next, count + 1
    return count


@pytest.mark.parametrize("error", [ValueError("x"), TypeError("x"), ShoalError("x"), OSError("x"), KeyError("x")])
def test_what_goes_wrong_in_code_of_the_user_keeps_its_frames(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as found:
        Shop().call(fail)
    assert found.traceback[-1].name == "fail"


def test_a_closure_of_the_user_keeps_its_frames() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    with shoal.DHT(start=True, host_maddrs=LOOPBACK) as dht:
        optimizer = shoal.Optimizer(
            dht=dht, run_id="run", target_batch_size=3, params=[parameter], optimizer=torch.optim.SGD
        )

        def closure() -> float:
            raise ValueError("mine")

        with optimizer, pytest.raises(ValueError, match="mine") as found:
            optimizer.step(closure, batch_size=1)
    assert found.traceback[-1].name == "closure"


def test_the_whole_way_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG, "shoal.base.closeable"),
        pytest.raises(ValueError, match="must end with") as found,
    ):
        shoal.DHT(["/ip4/127.0.0.1/tcp/9"], start=True)
    assert frames_of(found.value) == 2
    assert "in parse_peer_addresses" in caplog.text


def test_an_error_does_not_keep_its_object_alive() -> None:
    dht = shoal.DHT(start=True, host_maddrs=LOOPBACK)
    dht.shutdown()
    gone = weakref.ref(dht)
    gc.disable()
    try:
        try:
            dht.wait_until_ready()
            dht.get("x")
        except ReactorError:
            pass
        del dht
        assert gone() is None
    finally:
        gc.enable()
