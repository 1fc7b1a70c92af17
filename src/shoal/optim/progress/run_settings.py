"""The settings that all peers of a run must share, and how those of two peers differ.

Peers tell each other a short hash of their settings when they meet. If the hashes differ, they exchange the settings
themselves, and each of them can name the differences.

A peer that trains with others that fit only warns of a stranger that does not. A peer without such company stops with
:class:`~shoal.errors.SettingsMismatch`. Otherwise it would train alone under the name of the run, or train with others
by different rules. One of two sides stops, and it must not be the healthy one:

- The side with fewer hosts stops. So a single liar stops nobody.
- If no side has more hosts, the newcomer stops, that is, the peer that found the other side there when it came. It has
  the least to lose. If two peers start together, both may stop, because nothing shows which of them is wrong.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from msgspec import Meta

from shoal.averaging.groups.settings import advice_on, contradiction_of
from shoal.base.logs import Seldom, counted, one_line
from shoal.compression.base import dtype_name
from shoal.errors import SettingsMismatch
from shoal.net.transport import Count
from shoal.p2p import Header, PeerID

if TYPE_CHECKING:
    from shoal.averaging.node import AveragerNode

logger = logging.getLogger(__name__)

# Limits on what a peer tells. Chosen: settings fit into one message.
DIGEST_BYTES = 8
MAX_NAME_CHARACTERS, MAX_VALUE_CHARACTERS, MAX_SETTINGS = 200, 600, 64
# Beyond these numbers of parameters or bytes, only the hash of all shapes is compared. Chosen: a message has at most a
# megabyte.
MAX_PARAMETERS, MAX_DIMENSIONS, MAX_PARAMETER_BYTES = 4096, 16, 2**19
# What an error or a log line shows. Chosen: two models may differ in thousands of parameters.
PARAMETERS_SHOWN, CHARACTERS_SHOWN = 4, 100

_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
_Settings = Annotated[dict[_Name, Annotated[str, Meta(max_length=MAX_VALUE_CHARACTERS)]], Meta(max_length=MAX_SETTINGS)]

# These settings are hashes, or other settings say the same more clearly: they are shown only if nothing else differs.
TENSORS, PHASES, STATE_TENSORS = "averaged tensors", "phases", "tensors averaged with the parameters"
_OPAQUE = {
    TENSORS: "the shapes, types or roles of the averaged tensors differ",
    STATE_TENSORS: "what is averaged with the parameters differs: model=, extra_tensors=, average_opt_statistics= or "
    "offload_optimizer=",
    PHASES: "the peers average in other phases",
}


# The averager's names of its settings, and the names that users of an optimizer know.
SCHEMA = "shapes, types and roles of tensors"
GRADIENT_OPTIONS = {"compression": "grad_compression", "phases": "grad_averager"}
STATE_OPTIONS = {
    SCHEMA: STATE_TENSORS,
    "compression": "state_averaging_compression",
    "aggregation": "state_aggregation",
    "phases": "phases of state averaging",
}
# These usually differ, too, if the models differ.
OPTIMIZER, GROUPS = "optimizer", "size of each parameter group"
_OF_THE_MODEL = {STATE_TENSORS, OPTIMIZER, GROUPS}


class ParameterSettings(msgspec.Struct, array_like=True, frozen=True):
    """One parameter of the optimizer."""

    name: _Name
    """Empty if the peer does not know it."""
    shape: Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)]
    type: Annotated[str, Meta(max_length=32)]
    is_trained: bool

    def describe(self, number: int) -> str:
        """The parameter in words."""
        return f"parameter {_shown(self.name)!r}" if self.name else f"parameter number {number}"


class RunSettings(Header):
    """The settings of one peer."""

    kind: _Name
    """``Optimizer``, the same with local updates, or ``DiLoCo``."""
    needed: _Settings = msgspec.field(default_factory=dict)
    """Peers that differ in one of these cannot average with each other at all."""
    shared: _Settings = msgspec.field(default_factory=dict)
    """Peers that differ in one of these train by other rules, even if they can average; empty for an auxiliary."""
    declared: _Settings = msgspec.field(default_factory=dict)
    """What users have declared with ``frozen_base=`` and ``agreement=``; needed, too."""
    hidden: Count = 0
    """The number of declared settings that are not shown to the receiver."""
    parameters: Annotated[list[ParameterSettings], Meta(max_length=MAX_PARAMETERS)] = msgspec.field(
        default_factory=list
    )
    """In the order of the optimizer; empty if there are too many."""

    @property
    def digest(self) -> bytes:
        """Equal for equal settings."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="deterministic")).digest()[:DIGEST_BYTES]

    def shown_to(self, other: RunSettings) -> RunSettings:
        """These settings without the declared ones that the other peer has not named itself.

        Otherwise anybody could ask for them.
        """
        shown = {name: value for name, value in self.declared.items() if name in other.declared}
        return msgspec.structs.replace(self, declared=shown, hidden=len(self.declared) - len(shown))

    def can_average_with(self, other: RunSettings) -> bool:
        """Whether the averagers of two peers would form a group."""
        mine, theirs = (self.kind, self.needed, self.declared), (other.kind, other.needed, other.declared)
        return mine == theirs and not other.hidden

    def differs_in_options(self, other: RunSettings) -> bool:
        """Whether peers of one kind differ in an option that does not follow from their models."""
        if self.kind != other.kind or not (self.shared and other.shared):
            return False
        names = (self.shared.keys() | other.shared.keys()) - _OF_THE_MODEL
        return any(self.shared.get(name) != other.shared.get(name) for name in names)

    def differences(self, other: RunSettings) -> list[str]:
        """The settings that differ, in words for the user of this peer; empty if both peers fit.

        Args:
            other: as another peer has told it, so its texts may be hostile.
        """
        if self.kind != other.kind:
            return [f"this peer trains with {self.kind}, and that one with {_shown(other.kind)}"]
        told = compare_parameters(self.parameters, other.parameters)
        opaque = list[str]()
        compared = [(self.needed, other.needed)]
        compared += [(self.shared, other.shared)] if self.shared and other.shared else []
        for own, theirs in compared:
            for name in sorted(own.keys() | theirs.keys()):
                mine, given = own.get(name), theirs.get(name)
                if mine != given:
                    opaque += [_OPAQUE[name]] if name in _OPAQUE else []
                    told += [] if name in _OPAQUE else [_difference(name, mine, given)]
        for name in sorted(self.declared.keys() | other.declared.keys()):
            mine, given = self.declared.get(name), other.declared.get(name)
            if mine is not None and mine != given:
                advice = advice_on(name)
                told.append(_difference(name, mine, given) + (f" ({advice})" if advice else ""))
            elif mine is None:
                told.append(f"{_shown(name)} is not declared here")
        if other.hidden:
            told.append(f"{counted(other.hidden, 'setting')} of agreement= or frozen_base= there, and not here")
        if not told and TENSORS in self.needed and self.needed.get(TENSORS) != other.needed.get(TENSORS):
            told = compare_types(self.parameters, other.parameters)
        return list(dict.fromkeys(told or opaque))


def _difference(name: str, own: str | None, other: str | None) -> str:
    mine, theirs = ("not set" if value is None else _shown(value) for value in (own, other))
    return f"{_shown(name)} is {mine} here and {theirs} there"


def _shown(text: str) -> str:
    """A text from another peer: on one line, and short."""
    line = one_line(text)
    return line if len(line) <= CHARACTERS_SHOWN else f"{line[:CHARACTERS_SHOWN]}…"


def compare_parameters(own: Sequence[ParameterSettings], other: Sequence[ParameterSettings]) -> list[str]:
    """How the parameters of two peers differ in number, order, shape, or in what is frozen."""
    if not own or not other:
        return []
    names, their_names = [each.name for each in own], [each.name for each in other]
    has_names = all((*names, *their_names)) and len(set(their_names)) == len(their_names)
    if [(p.shape, p.is_trained) for p in own] == [(p.shape, p.is_trained) for p in other]:
        # Wrappers rename parameters. Their order is meaningful only if the set of names is the same.
        is_moved = has_names and names != their_names and Counter(names) == Counter(their_names)
        return [_order(names, their_names)] if is_moved else []
    if has_names and set(names) & set(their_names):
        return _limited(_compare_by_name(own, other)) or [_order(names, their_names)]
    return _limited(_compare_by_position(own, other))


def compare_types(own: Sequence[ParameterSettings], other: Sequence[ParameterSettings]) -> list[str]:
    """How the types of the values differ, where all else is equal."""
    pairs = enumerate(zip(own, other, strict=False))
    return _limited(
        f"{mine.describe(n)} has values of type {mine.type} here and {_shown(theirs.type)} there"
        for n, (mine, theirs) in pairs
        if mine.type != theirs.type
    )


def _order(own: Sequence[str], other: Sequence[str]) -> str:
    number = next(n for n, (mine, theirs) in enumerate(zip(own, other, strict=True)) if mine != theirs)
    mine, theirs = _shown(own[number]), _shown(other[number])
    return f"the parameters have another order: number {number} is {mine!r} here and {theirs!r} there"


def _compare_by_name(own: Sequence[ParameterSettings], other: Sequence[ParameterSettings]) -> Iterable[str]:
    theirs = {each.name: each for each in other}
    for number, mine in enumerate(own):
        given = theirs.pop(mine.name, None)
        yield from _compare(mine, given, number)
    for given in theirs.values():
        yield f"{given.describe(0)} of shape {given.shape} is missing here"


def _compare_by_position(own: Sequence[ParameterSettings], other: Sequence[ParameterSettings]) -> Iterable[str]:
    if len(own) != len(other):
        yield f"the optimizer has {counted(len(own), 'parameter')} here and {len(other)} there"
    for number, (mine, given) in enumerate(zip(own, other, strict=False)):
        yield from _compare(mine, given, number)


def _compare(own: ParameterSettings, other: ParameterSettings | None, number: int) -> Iterable[str]:
    which = own.describe(number)
    if other is None:
        yield f"{which} of shape {own.shape} is missing there"
    elif own.shape != other.shape:
        yield f"{which} has the shape {own.shape} here and {other.shape} there"
    elif own.is_trained != other.is_trained:
        yield f"{which} is {_state(own)} here and {_state(other)} there"


def _state(parameter: ParameterSettings) -> str:
    return "trained" if parameter.is_trained else "frozen"


def _limited(texts: Iterable[str]) -> list[str]:
    told = list(texts)
    rest = len(told) - PARAMETERS_SHOWN
    return told if rest <= 1 else [*told[:PARAMETERS_SHOWN], f"{rest} more parameters differ"]


# --- what this peer has -----------------------------------------------------------------------------------------------


def settings_of(
    kind: str,
    averager: AveragerNode,
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    options: Mapping[str, str],
    *,
    needed: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
) -> RunSettings:
    """The settings of this peer.

    Args:
        averager: the averager that peers need to train together.
        parameters: all that the optimizer has, in its order.
        names: of the parameters; empty if they are not known.
        options: maps the averager's names of its settings to the users' names.
        needed, shared: further settings, see :class:`RunSettings`.
    """
    declared = averager.config.agreement
    described = [
        ParameterSettings(
            _plain(name)[:MAX_NAME_CHARACTERS],
            tuple(parameter.shape)[:MAX_DIMENSIONS],
            dtype_name(parameter.dtype)[:32],
            parameter.requires_grad,
        )
        for name, parameter in zip(names or [""] * len(parameters), parameters, strict=True)
    ]
    is_short = len(described) <= MAX_PARAMETERS and len(msgspec.msgpack.encode(described)) <= MAX_PARAMETER_BYTES
    return RunSettings(
        kind,
        _texts({**settings_of_averager(averager, options), **(needed or {})}),
        _texts(shared or {}),
        _texts(declared),
        parameters=described if is_short else [],
    )


def settings_of_averager(averager: AveragerNode, options: Mapping[str, str]) -> dict[str, str]:
    """What an averager compares before it forms a group, without what users have declared.

    Args:
        options: maps the averager's names of the settings to the users' names.
    """
    tensors, found = hashlib.sha256(), dict[str, str]()
    for lane in averager.lanes.values():
        for name, value in lane.matchmaking.settings.agreed.items():
            if name == SCHEMA:
                tensors.update(value.encode())
            elif name not in averager.config.agreement:
                found[options.get(name, name)] = value
    return {**found, options.get(SCHEMA, TENSORS): tensors.hexdigest()[:16]}


# Hyper-parameters that change the steps of an optimizer. Others, such as ``fused``, do not.
_MATTER = ("lr", "momentum", "dampening", "nesterov", "betas", "eps", "weight_decay")


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer that must make the same steps in all peers."""
    given = {name: optimizer.defaults[name] for name in _MATTER if name in optimizer.defaults}
    kind = next(each for each in type(optimizer).__mro__ if not each.__module__.startswith("shoal."))
    return f"{kind.__name__}({', '.join(f'{name}={value}' for name, value in given.items())})"


def _plain(name: str) -> str:
    """The name of a parameter without those of wrappers around the model."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as short texts. A text that is cut ends with a hash, so that different texts stay different."""
    return {name[:MAX_NAME_CHARACTERS]: _cut(str(value)) for name, value in settings.items()}


def _cut(text: str) -> str:
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[: MAX_VALUE_CHARACTERS - 20]}… {digest}"


# --- what other peers have --------------------------------------------------------------------------------------------

# While only peers are present that do not fit, a peer waits this many seconds for one that does. Chosen: others may
# still be starting.
PATIENCE = 60.0
# A peer waits this many seconds for the settings of peers that it has just heard of, before it says that nobody fits.
# Chosen: as long as a call may take.
SETTLING = 10.0
# The least seconds between two looks. Chosen: each look is at all peers.
LOOK_EVERY = 1.0
# The most peers whose settings are remembered. Chosen: bounds memory.
MAX_PEERS = 2048
# Limits of a log line. Chosen: it must fit into two lines of a terminal. An error names all differences.
CHARACTERS_OF_DIFFERENCES, PEERS_SHOWN = 90, 3
RAISE, WARN = "raise", "warn"


def check_on_mismatch(on_mismatch: object) -> str:
    """Check the option, and return it.

    Raises:
        ValueError: it is neither ``"raise"`` nor ``"warn"``.
    """
    if on_mismatch not in (RAISE, WARN):
        raise ValueError(f"on_mismatch must be {RAISE!r} or {WARN!r}, got {on_mismatch!r}")
    return str(on_mismatch)


@dataclass(frozen=True)
class KnownSettings:
    """What this peer knows of the settings of another one."""

    digest: bytes
    differences: tuple[str, ...] | None = None
    """``None``: its settings have not arrived yet. Empty: it fits."""
    can_average: bool = True
    is_urgent: bool = False
    """Waiting for peers that fit is useless."""
    was_first: bool = False
    """It was there before this peer took part."""
    refuses: bool = False
    """It has declared other settings than this peer, so it refuses this peer its state, with the reason."""


class Company:
    """The settings of other peers. The event loop hears them, and the training thread looks at them.

    Args:
        run_id: name of the run.
        settings: of this peer.
        on_mismatch: ``"raise"`` or ``"warn"``.
    """

    def __init__(self, run_id: str, settings: RunSettings, on_mismatch: str = RAISE) -> None:
        self.run_id, self.on_mismatch = run_id, on_mismatch
        self.own, self.digest = settings, settings.digest
        self.strangers: frozenset[bytes] = frozenset()
        """The peers with which this one cannot average."""
        self.foreign: frozenset[bytes] = frozenset()
        """The strangers, and the peers whose settings have not arrived yet. Rounds are not compared with these: the two
        sides have not split, because they were never together."""
        self.refusing: frozenset[bytes] = frozenset()
        """The strangers that refuse their state, with a reason for the users of both sides."""
        self._known: dict[bytes, KnownSettings] = {}
        self._warned_of = set[bytes]()
        self._alone_since: float | None = None
        # While it is alone: whether the user knows that it waits.
        self._has_told_of_waiting = False
        self._next_look = -math.inf
        self._warn_seldom = Seldom(logger.warning, 3600.0)

    # --- what others tell ---------------------------------------------------------------------------------------------

    def knows(self, peer: bytes) -> bool:
        """Whether a peer has told a hash of its settings."""
        return peer in self._known

    def hear_digest(self, peer: bytes, digest: bytes, *, was_first: bool) -> None:
        """A peer tells a hash of its settings.

        Args:
            was_first: it was there before this peer took part.
        """
        known = self._known.get(peer)
        if known is None or known.digest != digest:
            self._note(peer, KnownSettings(digest, () if digest == self.digest else None, was_first=was_first))

    def change(self, settings: RunSettings) -> None:
        """Replace this peer's settings, such as after it has learnt the names of its parameters."""
        self.own, self.digest = settings, settings.digest

    def wants_settings_of(self, peer: bytes) -> bool:
        """Whether a peer has other settings than this one, and has not told them yet."""
        known = self._known.get(peer)
        return known is not None and known.differences is None

    def hear_settings(self, peer: bytes, settings: RunSettings, *, was_first: bool) -> None:
        """A peer tells its settings.

        Args:
            was_first: as above.
        """
        known = self._known.get(peer)
        if known is not None:  # keep the hash it told: that of settings with hidden parts is another one
            digest, was_first = known.digest, known.was_first
        else:
            digest = settings.digest
        can_average = self.own.can_average_with(settings)
        is_urgent = can_average or self.own.differs_in_options(settings)
        refuses = bool(contradiction_of(self.own.declared, settings.declared))
        told = tuple(self.own.differences(settings))
        self._note(peer, KnownSettings(digest, told, can_average, is_urgent, was_first, refuses))

    def _note(self, peer: bytes, known: KnownSettings) -> None:
        self._known.pop(peer, None)
        self._warned_of.discard(peer)
        while len(self._known) >= MAX_PEERS:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._warned_of.discard(oldest)
        self._known[peer] = known
        self.strangers = frozenset(p for p, each in self._known.items() if each.differences and not each.can_average)
        self.refusing = frozenset(peer for peer in self.strangers if self._known[peer].refuses)
        self.foreign = self.strangers | {p for p, each in self._known.items() if each.differences is None}

    # --- what follows -------------------------------------------------------------------------------------------------

    def look(
        self,
        present: Callable[[], Collection[bytes]],
        mates: Collection[bytes],
        now: float,
        host_of: Callable[[bytes], Hashable],
    ) -> None:
        """Warn of peers that do not fit, or stop this peer. Called by the training thread, often.

        Args:
            present: the other peers that take part and can be reached.
            mates: the members of this peer's last round. They fit, even if they cannot tell their settings.
            now: seconds of a monotonic clock.
            host_of: the host of a peer; the peers of one host have one vote together.

        Raises:
            SettingsMismatch: this peer must stop.
        """
        known = dict(self._known)
        if now < self._next_look or not any(each.differences for each in known.values()):
            return
        self._next_look = now + LOOK_EVERY
        others = present()
        misfits = {peer: known[peer] for peer in others if peer in known and known[peer].differences}
        fitting = [
            peer
            for peer in others
            if (known[peer].differences == () if peer in known else peer in mates) and peer not in misfits
        ]
        if fitting or not misfits:
            self._alone_since, self._has_told_of_waiting = None, False
            self._warn_of_strangers(known)
            return
        if self._alone_since is None:
            self._alone_since = now
        is_settled = all(peer in known and known[peer].differences is not None for peer in others)
        # The side with the most hosts is most likely right.
        votes = dict.fromkeys((each.digest, host_of(peer)) for peer, each in misfits.items())
        sides = Counter(digest for digest, _ in votes)
        [(largest, hosts)] = sides.most_common(1)
        side = {peer: each for peer, each in misfits.items() if each.digest == largest}
        is_urgent = any(each.is_urgent for each in side.values())
        patience = PATIENCE if not is_urgent else 0.0 if is_settled else SETTLING
        if hosts < 2 and not any(each.was_first for each in misfits.values()):
            self._warn_of_strangers(known)
        elif now - self._alone_since >= patience:
            self._stop(side, now - self._alone_since)
        elif not is_urgent and (is_settled or now - self._alone_since >= SETTLING):
            self._tell_of_waiting(side)

    def _tell_of_waiting(self, side: dict[bytes, KnownSettings]) -> None:
        if self._has_told_of_waiting:
            return
        self._has_told_of_waiting = True
        peer, known = next(iter(side.items()))
        logger.warning(
            "waiting up to %.0f s for a peer that fits this one; peer %s does not: %s",
            PATIENCE,
            _name(peer),
            _joined(known.differences or ()),
        )

    def _warn_of_strangers(self, known: dict[bytes, KnownSettings]) -> None:
        """Warn of all strangers, including those that have stopped, so that the users of both sides know."""
        for peer, each in known.items():
            if each.differences and peer not in self._warned_of:
                self._warned_of.add(peer)
                shown = _joined(each.differences)
                self._warn_seldom(
                    "peer %s does not fit this one in run %r: %s. Correct the wrong one and restart it",
                    _name(peer),
                    self.run_id,
                    shown,
                    about=shown,
                )

    def _stop(self, side: dict[bytes, KnownSettings], seconds: float) -> None:
        peers, differences = list(side), list(next(iter(side.values())).differences or ())
        names = [str(PeerID(peer)) for peer in peers]
        shown = ", ".join(map(_name, peers[:PEERS_SHOWN]))
        whom = shown if len(peers) <= PEERS_SHOWN else f"{shown} and {counted(len(peers) - PEERS_SHOWN, 'more peer')}"
        why = "nobody else with its settings is there" + (f" after {seconds:.0f} s" if seconds >= 1 else "")
        if self.on_mismatch == RAISE:
            raise SettingsMismatch(self.run_id, why, whom, differences, names)
        self._warn_seldom(
            "this peer does not fit run %r. It differs from %s: %s. It continues, because on_mismatch is 'warn'",
            self.run_id,
            whom,
            _joined(differences),
            about=tuple(differences),
        )


def _name(peer: bytes) -> str:
    return f"…{str(PeerID(peer))[-8:]}"


def _joined(differences: Collection[str]) -> str:
    """The first differences, as many as leave room for the rest of a log line, but at least one."""
    told = list(differences)
    shown = told[:1]
    for each in told[1:]:
        if len("; ".join([*shown, each])) > CHARACTERS_OF_DIFFERENCES:
            break
        shown.append(each)
    rest = len(told) - len(shown)
    return "; ".join(shown) + (f"; and {rest} more" if rest > 0 else "")
