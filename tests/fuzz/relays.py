"""Targets that read what relays, and those who come through them, send: addresses, candidates, orders of grants."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress

import msgspec

from shoal.access.badges import Grant, encode_badge, read_badge
from shoal.errors import NotAMemberError, ProtocolError
from shoal.metrics import Metrics
from shoal.net.addresses import AddressBook, is_loopback, is_private
from shoal.net.memory import MemoryNetwork
from shoal.net.transport import decode_header
from shoal.p2p import Multiaddr
from shoal.peers.identity import is_circuit, relay_of
from shoal.reach.punching import MAX_CANDIDATES, Candidates, Circuit, Puncher, worth_punching
from shoal.reach.relay.circuits import may_be_dialled
from shoal.reach.relay.messages import LOWEST_PORT, Reach
from tests.fuzz.conversations import SOMEBODY, ScriptedSession
from tests.fuzz.fuzzing import Target, check_text
from tests.fuzz.mutation import Mutator
from tests.fuzz.samples import ADDRESSES, BADGE_TOKEN, CANDIDATES, IDENTITY, PACKED_HEADERS, RUN

PEER, RELAY = IDENTITY.peer_id, SOMEBODY
OTHER_CHAINS = [BADGE_TOKEN.chain, RUN.chain_for(IDENTITY, 4e9)]
OWN_NETWORK = ipaddress.ip_network("192.168.1.0/24")
SEEN = Multiaddr("/ip4/203.0.113.7/tcp/31337")
PLACES = [Multiaddr("/ip4/198.51.100.7/tcp/4001"), Multiaddr("/ip6/2001:db8::7/tcp/4001")]


def _is_inside(address: Multiaddr) -> bool:
    host = address.get("ip4")
    return host is not None and ipaddress.ip_address(host) in OWN_NETWORK


def _candidates(data: bytes) -> str:
    """Attempts go to the public internet and into the own network, to few addresses, and to no service of a system."""
    try:
        told = decode_header(data, Candidates)
    except ProtocolError as e:
        check_text(e)
        return "ProtocolError"
    found = []
    for number in range(9):
        chosen = worth_punching(
            told.of_port(number), have_same_host=False, is_inside=_is_inside, is_relay_on_loopback=False
        )
        assert len(chosen) <= MAX_CANDIDATES
        found += [each for each in chosen if "memory" not in each]
    for address in found:
        ip = ipaddress.ip_address(address.get("ip4") or address.get("ip6") or "")
        assert ip.is_global or _is_inside(address), address
        odd = [name for name in ("loopback", "multicast", "unspecified", "link_local") if getattr(ip, f"is_{name}")]
        assert not odd, address
        assert int(address["tcp"] or 0) >= LOWEST_PORT, address
    return "dialled" if found else "nothing to dial"


class _Heard(ScriptedSession):
    """The other side has said all this before it hears anything, and stays."""

    local_address = Multiaddr("/ip4/192.168.1.2/tcp/40000")
    remote_address = PLACES[0]

    async def write(self, data: bytes) -> None:
        pass


class _Exchange:
    """The exchange of candidates before a punch, with somebody who says anything."""

    async def start_afresh(self) -> None:
        self._puncher = Puncher(MemoryNetwork().transport(), Metrics(), lambda stream: None, lambda: Reach.EASY)

    async def as_target(self, script: bytes) -> str:
        circuit = Circuit(_Heard(script), RELAY, SEEN, SEEN)
        punch = await self._puncher.as_target(PEER, Reach.EASY, [circuit])
        if inspect.iscoroutine(punch):
            is_on = punch.cr_code.co_name == "_punch_as_target"
            punch.close()
            return "punches" if is_on else "does not punch"
        raise AssertionError(punch)

    async def as_dialler(self, script: bytes) -> str:
        circuit = Circuit(_Heard(script), RELAY, SEEN, SEEN)
        began = asyncio.get_running_loop().time()
        punches = await self._puncher.as_dialler(PEER, Reach.EASY, [circuit], began)
        for each in punches:
            each.cancel()
        await asyncio.sleep(0)
        self._puncher.policy.clear()
        return "punches" if punches else "does not punch"


def _frames(mutator: Mutator, *kinds: type) -> bytes:
    return b"".join(len(packed).to_bytes(2) + packed for packed in (_candidates_or(mutator, kind) for kind in kinds))


def _candidates_or(mutator: Mutator, kind: type) -> bytes:
    packed = PACKED_HEADERS[kind]
    return packed if mutator.rng.random() < 0.3 else mutator.packed(packed)[: 2**16 - 1]


def _shuffled_badge(mutator: Mutator) -> bytes:
    """Grants that somebody has signed, in another order or company, with a field exchanged, or as they are."""
    grants = [each for chain in OTHER_CHAINS for each in chain]
    chain = list(mutator.one_of(OTHER_CHAINS))
    for _ in range(int(mutator.rng.random() * 3)):
        kind = int(mutator.rng.random() * 5)
        at = int(mutator.rng.random() * (len(chain) + 1))
        if kind == 0:
            mutator.rng.shuffle(chain)
        elif kind == 1:
            chain.insert(at, mutator.one_of(grants))
        elif kind == 2:
            del chain[at:]
        elif kind == 3:
            del chain[:at]
        elif chain:
            chain[at % len(chain)] = _mixed(chain[at % len(chain)], mutator.one_of(grants), mutator)
    return encode_badge(tuple(chain))


def _mixed(grant: Grant, other: Grant, mutator: Mutator) -> Grant:
    """One grant with some field of another one."""
    name = mutator.one_of(["issuer", "subject", "roles", "expires", "name", "signature"])
    return msgspec.structs.replace(grant, **{name: getattr(other, name)})


def _shuffled(data: bytes) -> str:
    try:
        badge = read_badge(RUN.run_key, data)
    except NotAMemberError as e:
        check_text(e)
        return e.reason
    chain = msgspec.msgpack.decode(data, type=list[Grant])
    assert any(tuple(chain) == each[: len(chain)] for each in OTHER_CHAINS), "a badge that nobody has granted"
    assert badge.expires == min(each.expires for each in chain)
    return "granted"


def _relayed(texts: list[str]) -> str:
    """What a peer says of its relays: nothing leads through two of them, or to somebody else."""
    told = []
    for text in texts:
        with contextlib.suppress(ValueError):
            told.append(Multiaddr(text))
    book = AddressBook()
    book.replace(PEER, told)
    relays = [relay for each in book.get(PEER) if (relay := relay_of(each)) is not None]
    assert all("p2p-circuit" not in place for place, _ in relays)
    wanted = [each for each in book.get(PEER) if may_be_dialled(each, PLACES, _is_inside, is_loopback)]
    assert not any("p2p-circuit" in each for each in wanted)
    assert all("memory" in each or not is_private(each) for each in wanted), wanted
    return f"{min(1, len(relays))} relayed, {min(1, len(wanted))} in reverse"


async def _forget_relays() -> None:
    """What is remembered of addresses is bounded, but a thousand inputs do not fill it."""
    relay_of.cache_clear()
    is_circuit.cache_clear()


def _make_addresses(mutator: Mutator) -> list[str]:
    relayed = [f"{place}/p2p/{RELAY}/p2p-circuit" for place in PLACES]
    known = [*relayed, *(f"{each}/p2p/{PEER}" for each in relayed), *ADDRESSES, f"{SEEN}/p2p/{PEER}"]
    chosen = [mutator.one_of(known) for _ in range(1 + int(mutator.rng.random() ** 2 * 20))]
    chosen[0] = mutator.text(chosen[0])
    mutator.rng.shuffle(chosen)
    return chosen


def targets() -> list[Target]:
    exchange = _Exchange()
    return [
        Target("candidates of a punch", lambda m: m.packed(CANDIDATES), _candidates),
        Target(
            "sessions, candidates to the target", lambda m: _frames(m, Candidates), exchange.as_target,
            exchange.start_afresh,
        ),
        Target(
            "sessions, candidates to the dialler", lambda m: _frames(m, Candidates), exchange.as_dialler,
            exchange.start_afresh,
        ),
        Target("badge, order of grants", _shuffled_badge, _shuffled),
        Target("addresses at relays", _make_addresses, _relayed, _forget_relays),
    ]  # fmt: skip
