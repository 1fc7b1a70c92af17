"""What a checkpoint of low-communication training holds, beside the model and the state of the inner optimizers.

It includes the result of a finished round that the model does not have yet. A round in flight is not included; it
counts as missed. A checkpoint is parsed as a whole before any of it is put in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from shoal.averaging import RoundResult
from shoal.optim.diloco.fragment_updates import Flight, FragmentUpdates, GroupFinding, Outgoing
from shoal.optim.diloco.messages import Contribution, Effort
from shoal.optim.diloco.slots import Schedule, SlotCounter
from shoal.optim.history.window import Relation
from shoal.p2p import PeerID

_PLACE = ("slot", "steps", "samples", "inner_steps")
_LENGTHS = ("sync_every", "target_batch_size")


@dataclass(frozen=True)
class SavedFragment:
    """One fragment of a checkpoint. It fits the fragment of this peer."""

    metadata: Mapping[str, Any]
    tensors: list[torch.Tensor]
    contribution: Contribution
    flight: Flight | None
    """A finished round whose result the model did not have yet."""
    vector: torch.Tensor | None
    """The result of that round."""

    def put_in_place(self, own: FragmentUpdates) -> None:
        """Continue from here. The tensors of the checkpoint are copied."""
        own.restore(self.metadata, self.tensors)
        own.flight, own.contribution = self.flight, self.contribution
        if self.vector is not None:
            own.vector.copy_(self.vector)


@dataclass(frozen=True)
class OuterCheckpoint:
    """The outer part of a checkpoint."""

    counter: SlotCounter
    """Where the peer was in its run."""
    fragments: list[SavedFragment]
    differences: str
    """How the settings of its run differ from this peer's, in words; empty if they do not."""

    @staticmethod
    def dump(counter: SlotCounter, average: str, fragments: Sequence[FragmentUpdates]) -> dict[str, Any]:
        """Dump everything as plain values and tensors. The tensors are not copied.

        Args:
            counter: where this peer is in its run.
            average: what the peers of the run average.
            fragments: all of them.
        """
        return {
            **{name: getattr(counter, name) for name in _PLACE},
            "average": average,
            **{name: getattr(counter.schedule, name) for name in _LENGTHS},
            "fragments": [_dump_fragment(each) for each in fragments],
        }

    @classmethod
    def parse(
        cls, state: Any, average: str, schedule: Schedule, fragments: Sequence[FragmentUpdates]
    ) -> OuterCheckpoint:
        """Parse the result of :meth:`dump`.

        Raises:
            ValueError: it does not fit this peer, or is malformed.
        """
        try:
            if state["average"] != average:
                raise ValueError(
                    f"the checkpoint is of a run with average={state['average']!r}, and this peer has "
                    f"average={average!r}: give the same"
                )
            if len(state["fragments"]) != len(fragments):
                raise ValueError(
                    f"the checkpoint has {len(state['fragments'])} fragments, and this peer {len(fragments)}: give "
                    "fragments= as when it was saved"
                )
            place = {name: state[name] for name in _PLACE}
            _check_counts(**place)
            saved = [_parse_fragment(each, own) for each, own in zip(state["fragments"], fragments, strict=True)]
            lengths = [(name, state[name], getattr(schedule, name)) for name in _LENGTHS]
        except (KeyError, TypeError) as e:
            raise ValueError(f"the checkpoint is malformed, or of another version of shoal: {e!r}") from e
        told = [f"{name} was {before} and is {now}" for name, before, now in lengths if before != now]
        has_errors = any(each["error"] is not None for each in state["fragments"])
        if has_errors and not any(own.contribution.feedback for own in fragments):
            told.append("there was error feedback and is none, so that what messages had left out is lost")
        return cls(SlotCounter(schedule, **place), saved, ", ".join(told))


def _dump_fragment(each: FragmentUpdates) -> dict[str, Any]:
    (metadata, tensors), own = each.dump(), each.contribution
    return {
        **metadata,
        "tensors": tensors,
        "layout": _layout_of(each),
        "effort": list(astuple(own.effort)),
        "age": own.age,
        "is_fresh": own.is_fresh,
        "error": own.error,
        "flight": _dump_flight(each),
    }


def _layout_of(each: FragmentUpdates) -> list[Any]:
    """Where each parameter begins, and its shape."""
    fragment = each.fragment
    places = zip(fragment.offsets, fragment.parameters, strict=True)
    return [[offset, list(parameter.shape)] for offset, parameter in places]


def _dump_flight(each: FragmentUpdates) -> dict[str, Any] | None:
    flight = each.flight
    if flight is None or flight.standing is not Relation.WITH:
        return None
    control, result = flight.control, flight.result
    if control is not None and not (control.done() and result is not None):
        return None  # it is under way, or has failed
    if result is not None and not flight.group.has_most(result.weights):
        return None  # this peer makes no update of it, now or later
    message = flight.message
    return {
        **{name: getattr(flight, name) for name in ("slot", "left", "steps_since")},
        **{name: getattr(message, name) for name in ("is_finite", "weight", "sent", "left_out")},
        "samples": flight.group.samples,
        "effort": list(astuple(message.effort)),
        "own": (each.own if flight.saved is None else flight.saved[1]).to_bytes(),
        "vector": each.vector,
        "round": None if result is None else _dump_result(result),
    }


def _dump_result(result: RoundResult) -> dict[str, Any]:
    names = ("group_id", "weights", "share_averaged", "late", "duration")
    return {**{name: getattr(result, name) for name in names}, "peers": [peer.to_bytes() for peer in result.peers]}


def _parse_fragment(state: Mapping[str, Any], own: FragmentUpdates) -> SavedFragment:
    layout = _layout_of(own)
    if [shape for _, shape in state["layout"]] != [shape for _, shape in layout]:
        raise ValueError(
            f"fragment {own.number} of the checkpoint has other parameters than this peer's: it is of another model, "
            "or fragments= was another one when it was saved"
        )
    if state["layout"] != layout:
        raise ValueError(
            f"fragment {own.number} of the checkpoint is laid out for another codec: give compression= as when it was "
            "saved"
        )
    tensors = [tensor.detach().to("cpu") for tensor in state["tensors"]]
    own.check(state, tensors)
    _check_counts(age=state["age"])
    flight, vector = (None, None) if state["flight"] is None else _parse_flight(state["flight"], own)
    contribution = replace(
        own.contribution,
        effort=Effort(*state["effort"]),
        age=state["age"],
        is_fresh=state["is_fresh"],
        error=_own_copy(state["error"], own) if own.contribution.feedback else None,
    )
    return SavedFragment(state, tensors, contribution, flight, vector)


def _parse_flight(state: Mapping[str, Any], own: FragmentUpdates) -> tuple[Flight, torch.Tensor]:
    _check_counts(**{name: state[name] for name in ("slot", "steps_since", "samples")})
    vector, left_out = _own_copy(state["vector"], own), _own_copy(state["left_out"], own)
    if vector is None:
        raise ValueError("a round in the checkpoint has no result")
    sent = _own_copy(state["sent"], own)
    message = Outgoing(Effort(*state["effort"]), state["weight"], state["is_finite"], sent, left_out)
    result = None if state["round"] is None else _parse_result(state["round"])
    flight = Flight(state["slot"], message, state["left"], state["steps_since"])
    flight.group, flight.saved = GroupFinding(samples=state["samples"]), (result, PeerID(state["own"]))
    return flight, vector


def _parse_result(state: Mapping[str, Any]) -> RoundResult:
    peers, weights = tuple(map(PeerID, state["peers"])), tuple(state["weights"])
    share, late = state["share_averaged"], state["late"]
    return RoundResult(state["group_id"], peers, (), weights, share, (), late, state["duration"])


def _own_copy(vector: torch.Tensor | None, own: FragmentUpdates) -> torch.Tensor | None:
    if vector is None:
        return None
    if vector.shape != own.state.values.shape:
        raise ValueError(
            f"a vector in the checkpoint has {vector.numel()} values, and fragment {own.number} of this peer "
            f"{own.state.values.numel()}"
        )
    return vector.detach().to(device="cpu", dtype=torch.float32, copy=True)


def _check_counts(**counts: object) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"a checkpoint cannot have {name} = {value!r}")
