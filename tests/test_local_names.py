"""A web server on the loopback answers to names of this machine, and to no name that a web site can have."""

from __future__ import annotations

import pytest

from shoal.base.local_names import why_not_answered

pytestmark = pytest.mark.oldest

LOOPBACK = ["127.0.0.1", "127.0.0.2", "127.0.1.1", "::1", "::ffff:127.0.0.1"]
OWN = [
    "localhost",
    "localhost:8265",
    "LocalHost:1",
    "localhost.",
    "page.localhost:8265",
    "127.0.0.1",
    "127.0.0.1:8265",
    "127.0.0.2:9",
    "[::1]",
    "[::1]:9",
    "::1",
    "[::ffff:127.0.0.1]:9",
    " 127.0.0.1 ",
]
FOREIGN = [
    "",
    "evil.example",
    "evil.example:8265",
    "localhost.evil.example",
    "notlocalhost",
    "127.0.0.1.evil.example",
    "evil.example:127.0.0.1",
    "[::1].evil.example",
    "[evil.example]",
    "127.0.0.1,evil.example",
    "evil.example,127.0.0.1",
    "127.0.0.1@evil.example",
    "evil.example#@127.0.0.1",
    "8.8.8.8:80",
    "0.0.0.0:80",
    "[::]:80",
    "192.168.1.5",
    "[::ffff:8.8.8.8]",
]


@pytest.mark.parametrize("bound", LOOPBACK)
@pytest.mark.parametrize("host", OWN)
def test_names_of_this_machine_are_answered(bound: str, host: str) -> None:
    assert why_not_answered(bound, host) is None


@pytest.mark.parametrize("bound", LOOPBACK)
@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_not(bound: str, host: str) -> None:
    assert why_not_answered(bound, host) is not None


@pytest.mark.parametrize("bound", LOOPBACK)
def test_old_programs_that_send_no_name_are_answered(bound: str) -> None:
    assert why_not_answered(bound, None) is None


def test_the_name_that_the_user_gave_is_answered() -> None:
    assert why_not_answered("127.0.1.1", "my-laptop:8265", "My-Laptop") is None
    assert why_not_answered("127.0.1.1", "evil.example", "my-laptop") is not None
    assert why_not_answered("127.0.0.1", "") is not None, "an empty name is no chosen one"


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "192.168.1.5", "8.8.8.8", "2a00:1450::1", "fe80::1%eth0"])
@pytest.mark.parametrize("host", ["evil.example", "localhost", "", "192.168.1.5:80"])
def test_what_the_user_shows_to_others_is_answered_under_any_name(bound: str, host: str) -> None:
    assert why_not_answered(bound, host) is None


def test_the_error_says_what_to_do() -> None:
    text = why_not_answered("127.0.0.1", "evil.example:8265\x1b[31m" + "x" * 10_000) or ""
    assert "'evil.example:8265\\x1b[31m" in text
    assert "http://localhost" in text
    assert "0.0.0.0" in text
    assert len(text) < 500
