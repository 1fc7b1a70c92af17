"""Options of the strategy, checked when it is made rather than at the first batch; and instructions for joining."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.net.pasted import split_addresses
from shoal.optim import DiLoCo, Optimizer
from shoal.optim.diloco.settings import OuterSettings
from shoal.optim.diloco.slots import Schedule
from shoal.optim.options import with_defaults

# Options of the swarm's optimizer that the strategy fills in itself.
_FILLED_IN = frozenset({"self", "dht", "optimizer", "params", "scheduler", "batch_size_per_step"})
# Options of DiLoCo that are arguments of the strategy, under these names.
_ARGUMENTS = {
    **{name: name for name in ("run_id", "target_batch_size", "matchmaking_time", "averaging_timeout")},
    **{"averager_opts": "averager_opts", "verbose": "verbose"},
    **{"scheduler": "scheduler_fn", "batch_size_per_step": "batch_size"},
}
_EXAMPLE = "low_communication={'sync_every': 50}"

# Environment variables with addresses of peers to join. The second one is read if the first one is not set.
INITIAL_PEERS_ENV, OTHER_INITIAL_PEERS_ENV = "PL_INITIAL_PEERS", "INITIAL_PEERS"


def _options_of(kind: type) -> frozenset[str]:
    return frozenset(inspect.signature(kind.__init__).parameters) - _FILLED_IN  # type: ignore[misc]  # not called


def check_names(options: Mapping[str, Any]) -> None:
    """Check the names of further options.

    Raises:
        TypeError: an option does not exist.
    """
    if not (unknown := sorted(options.keys() - _options_of(Optimizer))):
        return
    text = (
        f"HivemindStrategy has no options {unknown}: beside its own, it takes those of shoal.Optimizer, except for "
        f"{', '.join(sorted(_FILLED_IN - {'self'}))}, which it finds itself"
    )
    if outer := [name for name in unknown if name in _options_of(DiLoCo)]:
        given = ", ".join(f"{name!r}: {options[name]!r}" for name in outer)
        text += f". {outer} are options of shoal.DiLoCo: write low_communication={{{given}}}"
    raise TypeError(text)


def check_delays(grads: bool, state: bool, step: bool | None, offload: bool | None) -> None:
    """Check that the options agree.

    Raises:
        ValueError: two of them contradict each other.
    """
    if grads and step is False:
        raise ValueError("delay_grad_averaging=True needs delay_optimizer_step=True: the step needs the gradients")
    if grads and not (step or state or offload):
        raise ValueError("delay_grad_averaging=True needs delay_optimizer_step=True and offload_optimizer=True")
    if (grads or step) and offload is False:
        raise ValueError("delay_optimizer_step=True needs offload_optimizer=True")


def outer_options(
    given: Mapping[str, Any], arguments: Mapping[str, Any], further: Mapping[str, Any], synchronous: Mapping[str, Any]
) -> dict[str, Any]:
    """Collect all options of :class:`shoal.DiLoCo`.

    Args:
        given: the user's ``low_communication``.
        arguments: those arguments of the strategy that are options of DiLoCo, too.
        further: further keywords of the strategy.
        synchronous: those arguments of the strategy that matter only for steps that all peers make together.

    Raises:
        ValueError: options contradict each other.
        TypeError: an option does not exist, or has a wrong type.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"low_communication must have options of shoal.DiLoCo by name, as in {_EXAMPLE}: got {given!r}")
    for name, value in given.items():
        _check_outer_name(name, value)
    check_names(further)
    together = {name: value for name, value in synchronous.items() if value}
    together |= {name: value for name, value in further.items() if name not in _options_of(DiLoCo)}
    for name, value in together.items():
        raise ValueError(
            f"{name}={value!r} is for steps that all peers make together, and with low_communication={dict(given)!r} "
            "each peer makes its own: leave one of them out. To train on during exchanges, use "
            "low_communication={'fragment_sync_delay': …}; for codecs, {'compression': …}"
        )
    for name in given.keys() & further.keys():
        raise ValueError(
            f"{name} is given twice, as {further[name]!r} and in low_communication as {given[name]!r}: leave one out"
        )
    target, every = arguments["target_batch_size"], given.get("sync_every")
    if target is not None and every is not None:
        raise ValueError(
            f"target_batch_size={target} and low_communication={{'sync_every': {every}}} both say for how long peers "
            "train between two exchanges: give target_batch_size=None, or leave sync_every out"
        )
    if target is None and every is None:
        raise ValueError(
            "target_batch_size=None and no sync_every: nothing says for how long peers train between two exchanges. "
            f"Give {_EXAMPLE}, or as target_batch_size the samples of all peers between two exchanges"
        )
    options = {**arguments, **further, **given}
    _check_values(options)
    return options


def _check_outer_name(name: str, value: Any) -> None:
    if name in _ARGUMENTS:
        own = _ARGUMENTS[name]
        raise ValueError(
            f"low_communication has {name!r}, which is an argument of the strategy itself: write "
            f"HivemindStrategy({own}={value!r})"
        )
    known = _options_of(DiLoCo)
    if name not in known:
        raise TypeError(
            f"low_communication has {name!r}, which is no option that the strategy could give to shoal.DiLoCo: it "
            f"takes {', '.join(sorted(known - _ARGUMENTS.keys()))}"
        )


def _check_values(options: Mapping[str, Any]) -> None:
    """Refuse here what the constructor, or the first step, would refuse."""
    complete = with_defaults(DiLoCo, options)
    if complete["auxiliary"]:
        raise ValueError(
            "auxiliary=True is for peers without data, and a Trainer has some: make a shoal.DiLoCo(auxiliary=True) "
            "without Lightning, and call its step() now and then"
        )
    every, fragments = complete["sync_every"], complete["fragments"]
    for name, value in {"sync_every": every, "fragment_sync_delay": complete["fragment_sync_delay"]}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"low_communication={{{name!r}: {value!r}}}: give a whole number of inner steps")
    Schedule(fragments if isinstance(fragments, int) else len(fragments), every, complete["target_batch_size"])
    OuterSettings.resolve(**complete)


def initial_peer_addresses(argument: str | Sequence[str] | None) -> list[str]:
    """Addresses of peers to join: those in the environment, or else the argument."""
    given = os.environ.get(INITIAL_PEERS_ENV) or os.environ.get(OTHER_INITIAL_PEERS_ENV) or argument or []
    parts = [given] if isinstance(given, str) else [str(address) for address in given]
    return [str(address) for address in split_addresses(part for part in parts if part.strip(", \t\r\n"))]


def joining_instructions(address: str) -> str:
    """What to type on another machine to make it join."""
    is_script = bool(sys.argv) and sys.argv[0] not in ("", "-", "-c", "-m")
    script = shlex.join(["python", *sys.argv]) if is_script else "python SCRIPT"
    return (
        "Other machines join this run with either of:\n"
        f"    {INITIAL_PEERS_ENV}={shlex.quote(address)} {script}\n"
        f'    HivemindStrategy(..., initial_peers="{address}")'
    )
