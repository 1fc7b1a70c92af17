"""Plain counters of everything that this process did, for monitoring.

Every peer owns one :class:`Metrics`. Its fields are plain numbers. The code that counts an event writes them, nearly
always in the event loop; any thread may read them. Most only grow. :func:`serve_prometheus` shows them to Prometheus.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from shoal.base.local_names import why_not_answered

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

REQUEST_TIMEOUT = 10.0
"""Seconds that a caller of the Prometheus endpoint may be silent in the middle of a request. Chosen."""


class Fading:
    """Counts in which older events weigh less: half after half an hour."""

    def decay(self, factor: float) -> None:
        """Scale all counts down, because time has passed."""
        for name, count in vars(self).items():
            setattr(self, name, count * factor)


@dataclass
class PeerHistory(Fading):
    """The contribution history of another peer, as this one has seen it."""

    came: float = 0.0
    """Rounds in which it was a member."""
    delivered: float = 0.0
    """Rounds in which it did not fail."""
    excluded: float = 0.0
    """How often it failed as a reducer or as a leader."""


@dataclass
class Demands(Fading):
    """Resources that strangers of one host have taken."""

    connections: float = 0.0
    """That this peer has accepted, or refused."""
    dropped: float = 0.0
    """Of these, how many it has refused or dropped, for whatever reason."""
    nbytes: float = 0.0
    """That arrived on those that are over."""


@dataclass
class Metrics:
    bytes_sent: int = 0
    """Bytes of messages written to other peers, before encryption."""
    bytes_sent_by_handler: Counter[str] = field(default_factory=Counter)
    """Bytes sent, by the called handler, requests and responses alike; greetings count with the first call."""
    bytes_received: int = 0
    """Bytes of messages read from other peers, after decryption."""
    connections_dialled: int = 0
    """Connections that this peer opened and that were authenticated."""
    connections_accepted: int = 0
    """Connections that others opened to this peer and that were authenticated."""
    dials_failed: int = 0
    """Failed attempts to reach an address."""
    dials_direct: int = 0
    """Connections that this peer opened directly to an address of the other one."""
    dials_reversed: int = 0
    """Connections to peers that cannot be called, opened by them at the request of this one."""
    dials_punched: int = 0
    """Connections punched through the routers of both sides, which a relay only arranged."""
    punches_failed: Counter[str] = field(default_factory=Counter)
    """Punches of this peer that failed, by reason: ``no connection``, ``no candidates``, ``no exchange`` or
    ``not that peer``."""
    seconds_to_direct: float = 0.0
    """Total seconds from the start of the dial to the connection, over all successful punches."""
    dials_relayed: int = 0
    """Connections that this peer opened through a relay."""
    bytes_relayed: int = 0
    """Bytes of messages that this peer sent and received through relays."""
    circuits_carried: int = 0
    """Pairs of connections that this peer joined as a relay."""
    bytes_carried: int = 0
    """Bytes that this peer carried as a relay."""
    circuits_refused: Counter[str] = field(default_factory=Counter)
    """Requests that this peer refused as a relay, by reason: ``no reservation``, ``no room``, ``wrong role``,
    ``not a relay``, or ``nobody came`` for circuits that one side did not join."""
    calls_made: int = 0
    calls_failed: int = 0
    calls_served: int = 0
    calls_refused: Counter[str] = field(default_factory=Counter)
    """Calls of others that this peer did not serve, by reason."""
    members_refused: Counter[str] = field(default_factory=Counter)
    """Peers, and calls of members, that this peer refused in a private run, by reason: ``not a member``,
    ``another run``, ``expired``, ``revoked``, ``wrong role`` or ``broken``."""
    connections_dropped: Counter[str] = field(default_factory=Counter)
    """Connections that this peer refused or dropped, by reason."""
    hops_to_records: Counter[int] = field(default_factory=Counter)
    """Gets that found a record, by the length of the chain of answers that led to it; 0 = this node had it itself."""
    records_refused: Counter[str] = field(default_factory=Counter)
    """Records of other peers that this node did not keep, by :class:`~shoal.dht.validation.Reason`."""
    stores_failed: Counter[str] = field(default_factory=Counter)
    """Nodes that did not keep a record of this peer, by :class:`~shoal.dht.validation.Reason`."""
    gets_failed: Counter[str] = field(default_factory=Counter)
    """Nodes that gave no value for a key that this peer looked for, by :class:`~shoal.dht.validation.Reason`."""
    records_evicted: int = 0
    """Records that this node evicted before they expired, because there was no room."""
    node_ids_refused: int = 0
    """Answers of DHT nodes that others had listed under wrong ids."""
    clock_offset: float = 0.0
    """Seconds by which this machine's clock is ahead of the swarm; shoal corrects for it. 0 if the clock is right."""
    reachability: str = ""
    """How others call this peer: ``public``, ``relayed``, ``client`` (they cannot) or ``unknown``."""
    nat: str = ""
    """What the router does to outgoing ports: ``easy``, ``hard`` (each connection gets another one), or empty."""
    reservations: int = 0
    """Relays through which this peer can be called at the moment."""
    rounds_succeeded: int = 0
    """Averaging rounds that brought a result, complete or partial."""
    rounds_failed: int = 0
    """Averaging rounds that brought no result."""
    last_failure: str = ""
    """Why the last failed round failed."""
    seconds_averaging: float = 0.0
    """Seconds spent in the all-reduce of successful rounds."""
    states_refused: int = 0
    """Downloaded states that were not adopted: they did not fit, or the user's ``check_state`` refused them."""
    peers_absent: Counter[str] = field(default_factory=Counter)
    """Peers that were seen or expected but were not in a group of this one, by reason."""
    donors_left: Counter[str] = field(default_factory=Counter)
    """Donors whose state this peer did not download completely, by reason."""
    newcomers_turned_away: int = 0
    """Requests for this peer's state that found no free place."""
    newcomers_dropped: int = 0
    """Downloads of this peer's state that were ended because they made hardly any progress while others waited."""
    members_untrue: int = 0
    """Detected lies of group members, about what they send or about the averages that they made."""
    exchanges_resumed: int = 0
    """How often the exchange with another member of a round resumed over new connections after one had broken."""
    members_lost_by_cause: Counter[str] = field(default_factory=Counter)
    """The same, by cause; see :class:`~shoal.averaging.control.LossCause`."""
    members_lost: int = 0
    """Group members that failed during an all-reduce, as sender or as reducer."""
    microbatches_done: int = 0
    """Microbatches that this driver has brought through all stages."""
    microbatches_resent: Counter[str] = field(default_factory=Counter)
    """Microbatches that this driver has sent again, by reason: ``late`` (their step was over at a stage), or ``lost``
    (a repair has failed; some stages may have counted such a microbatch already)."""
    microbatches_dropped: Counter[str] = field(default_factory=Counter)
    """Microbatches that this driver has given up, by reason: ``not finite``, or ``lost``."""
    hops_repaired: Counter[str] = field(default_factory=Counter)
    """Stage peers that have failed with a microbatch of this peer; then the ``same peer`` was asked again over a new
    connection, or ``another peer`` was."""
    troubles: Counter[str] = field(default_factory=Counter)
    """Warnings to the user by kind, including those that were suppressed as repetitions:

    ``alone``: a round or a step without any other peer, although others are known;
    ``waited in vain``: a peer that had announced itself did not show up;
    ``values that are not finite``: values of another member were left out;
    ``epochs that cannot be``: other peers claimed impossible epochs;
    ``no place for a connection``: another peer found all places taken;
    ``reducers without a share``: their averages did not arrive;
    ``averages that did not come``: a round took long because a reducer gave none, or a sender sent too slowly;
    ``clocks that differ``: peers ignored records of this one, because its time is ahead of theirs;
    ``states that differ``: donors did not have the state that most donors of that epoch have;
    ``leaders not followed``: they accepted followers and did not start the group, or did not end a round that they
    coordinated;
    ``members too slow``: rounds were cut short because of them, or took longer than their samples are worth."""
    peers: dict[str, PeerHistory] = field(default_factory=dict)
    """By peer id, the history of peers that took part in rounds; a few thousand at most."""
    strangers: dict[str, Demands] = field(default_factory=dict)
    """The demands of connected peers that this one neither calls nor knows from rounds, by public network (/24 in IPv4,
    /48 in IPv6), or by peer id without one; the last few hundred."""

    def __post_init__(self) -> None:
        _of_this_process[id(self)] = self


_of_this_process: weakref.WeakValueDictionary[int, Metrics] = weakref.WeakValueDictionary()

Sample = tuple[str, str, dict[str, str], float]
"""A figure for Prometheus: its name, its meaning, its labels and its value."""


class PrometheusEndpoint:
    """A server that Prometheus asks. It runs in a thread of its own until it is closed."""

    def __init__(self, url: str, close: Callable[[], None]) -> None:
        self.url = url
        """The URL of the figures."""
        self.close = close


def serve_prometheus(port: int, host: str = "127.0.0.1") -> PrometheusEndpoint:
    """Show the counters of all peers in this process, added up, to Prometheus. It needs ``shoal[prometheus]``.

    Args:
        port: 0 = any free one.
        host: where to listen; by default only programs on this machine can ask, and only under its own names.

    Raises:
        ModuleNotFoundError: ``prometheus-client`` is not installed.
        OSError: the port is taken.
    """
    return start_prometheus(port, lambda: samples_of(list(_of_this_process.values())), host)


def samples_of(all_metrics: Iterable[Metrics]) -> Iterator[Sample]:
    """The counters of several peers, added up. A counter by reason is one figure with a label; texts are left out."""
    sums: Counter[tuple[str, str]] = Counter()
    for metrics in all_metrics:
        for each in fields(metrics):
            value = getattr(metrics, each.name)
            if isinstance(value, Counter):
                for reason, count in list(value.items()):
                    sums[each.name, str(reason)] += count
            elif isinstance(value, (int, float)):
                sums[each.name, ""] += value  # type: ignore[assignment]
    for (name, reason), value in sums.items():
        yield f"shoal_{name}", name.replace("_", " "), {"by": reason} if reason else {}, float(value)


def start_prometheus(port: int, collect: Callable[[], Iterable[Sample]], host: str) -> PrometheusEndpoint:
    """Answer Prometheus with the result of ``collect``; see :func:`serve_prometheus`."""
    try:
        import prometheus_client
        from prometheus_client.core import GaugeMetricFamily
    except ModuleNotFoundError as e:
        text = "prometheus-client is not installed: pip install 'shoal[prometheus]'"
        raise ModuleNotFoundError(text, name=e.name) from None

    class Figures:
        def collect(self) -> Iterator[Any]:
            families: dict[tuple[str, tuple[str, ...]], Any] = {}
            for name, meaning, labels, value in collect():
                key = name, tuple(labels)
                if key not in families:
                    families[key] = GaugeMetricFamily(name, meaning, labels=list(labels))
                families[key].add_metric(list(labels.values()), value)
            yield from families.values()

    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(Figures())
    server = _server(host, port)
    server.set_app(_for_this_machine(prometheus_client.make_wsgi_app(registry), server.server_address[0], host))
    thread = threading.Thread(target=server.serve_forever, name="prometheus", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    shown = f"[{host}]" if ":" in host else host
    return PrometheusEndpoint(f"http://{shown}:{server.server_port}/metrics", close)


def _server(host: str, port: int) -> Any:
    """A listening server with a thread for each connection.

    The package's own server answers before its program can be changed, waits indefinitely for the rest of a request,
    and prints a traceback if the caller hangs up.
    """
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

    [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)

    class MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
        address_family = family
        daemon_threads = True

    class RequestHandler(WSGIRequestHandler):
        timeout = REQUEST_TIMEOUT

        def handle(self) -> None:
            with suppress(TimeoutError):
                super().handle()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: Prometheus asks every few seconds."""

    return MetricsServer(address[:2], RequestHandler)  # type: ignore[arg-type]


def _for_this_machine(program: WSGIApplication, bound: str, chosen: str) -> WSGIApplication:
    """A program that refuses requests to the names of web sites, see :mod:`shoal.base.local_names`."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        refusal = why_not_answered(bound, environ.get("HTTP_HOST"), chosen)
        if refusal is None:
            return program(environ, start_response)
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff")]
        start_response("400 Bad Request", headers)
        return [f"{refusal}\n".encode()]

    return answer
