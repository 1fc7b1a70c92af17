"""Strangers to a run that is for members only: they call what is not the table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from shoal.averaging.messages import (
    BeginReduce,
    DownloadRequest,
    Invitation,
    InvitationReply,
    JoinReply,
    JoinRequest,
    PartMessage,
    StateAnswer,
    StatusRequest,
)
from shoal.base.clock import get_dht_time
from shoal.optim.progress.exchange import ProgressMessage
from shoal.p2p import Header, PeerID
from tests.hostile.attacker import FAILURES, Attacker


async def uses_what_is_not_the_table(me: Attacker, peer: PeerID) -> dict[str, str]:
    """An outsider. Asks for the state, tells progress, asks to join, invites, sends parts. Nobody may answer.

    Returns:
        For each call, the refusal; or what was answered.
    """
    averager, key = me.averager(peer), f"{me.run}_grad_averager.0b"
    request = JoinRequest(key, {"phases": "one"}, get_dht_time() + 60, 0)
    streams: list[tuple[str, Header, type[Header]]] = [
        ("rpc_download_state", DownloadRequest(), StateAnswer),
        ("rpc_join_group", request, JoinReply),
        ("rpc_invite", Invitation(group_key=key, expiration=get_dht_time() + 1), InvitationReply),
        ("rpc_reduce", BeginReduce(round_id=bytes(21), weight=1.0), PartMessage),
    ]

    async def stream(name: str, message: Header, reply: type[Header]) -> object:
        async with getattr(averager, name)() as call:
            await call.send(message)
            return await call.receive(reply)

    progress = ProgressMessage(10**6, 1, 1.0, get_dht_time(), False)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "progress": lambda: me.tracker(peer).rpc_exchange_progress(progress, timeout=5),
        "rpc_round_status": lambda: averager.rpc_round_status(StatusRequest(round_id=bytes(21)), timeout=5),
        **{each[0]: (lambda each=each: stream(*each)) for each in streams},
    }
    told = {}
    for name, call in calls.items():
        try:
            told[name] = f"answered: {await call()!r}"
        except FAILURES as e:
            told[name] = str(e)
    return told
