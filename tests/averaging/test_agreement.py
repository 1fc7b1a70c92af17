"""What users declare to be the same in all peers: who has something else gets neither a group nor a state."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.averaging.arguments import MOST_AGREED
from shoal.averaging.groups.settings import FROZEN_BASE
from tests.averaging.swarm import Swarm, make_control
from tests.dht.virtual_time import alone_in_virtual_time

ONE, OTHER = {FROZEN_BASE: "revision 1111"}, {FROZEN_BASE: "files 2222"}
FIX = "load the same checkpoint in both, or if it is the same, give both the same name for it"


def told(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    return [text for text in caplog.messages if all(word in text for word in words)]


@alone_in_virtual_time
async def test_peers_that_differ_do_not_average_and_both_hear_why(caplog: pytest.LogCaptureFixture) -> None:
    swarm = Swarm()
    tensors = [torch.full((3,), float(number)) for number in range(3)]
    for tensor, agreement in zip(tensors, (ONE, ONE, OTHER), strict=True):
        await swarm.add([tensor], agreement=agreement)
    controls = [make_control(node, timeout=4.0) for node in swarm.nodes]
    await asyncio.gather(*(node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)))
    assert [tensor.tolist() for tensor in tensors] == [[0.5] * 3, [0.5] * 3, [2.0] * 3]
    assert isinstance(controls[2].exception(), Exception)
    here = f"{FROZEN_BASE} is 'revision 1111' there and 'files 2222' here; {FIX}"
    there = f"{FROZEN_BASE} is 'files 2222' there and 'revision 1111' here; {FIX}"
    ids = [str(node.p2p.peer_id) for node in swarm.nodes]
    assert told(caplog, here, "average") or told(caplog, there, ids[2])
    # Whoever asked whom: one side was refused, the other one has refused.
    assert {text.split()[2] for text in told(caplog, "refuses to average with this one", FIX)}
    assert {text.split()[2] for text in told(caplog, "cannot average with this one", FIX)}
    await swarm.close()


@pytest.mark.parametrize("agreement", [ONE, {}, OTHER, {"data": "poems"}], ids=str)
async def test_a_state_is_given_unless_something_contradicts(
    agreement: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    swarm = Swarm()
    donor = await swarm.add([torch.zeros(1)], get_state=lambda: ({"epoch": 3}, [torch.ones(4)]), agreement=ONE)
    donor.state_sharing.set(allowed=True)
    await donor.state_sharing.declare(True)
    newcomer = await swarm.add([torch.zeros(1)], agreement=agreement)
    state = await newcomer.state_downloads.download()
    names = {"donor": str(donor.p2p.peer_id), "newcomer": str(newcomer.p2p.peer_id)}
    if agreement is not OTHER:
        assert state is not None
        assert state.tensors[0].tolist() == [1.0] * 4
        assert newcomer.state_downloads.contradictions == {}
    else:
        assert state is None
        difference = f"{FROZEN_BASE} is 'revision 1111' there and 'files 2222' here; {FIX}"
        assert newcomer.state_downloads.contradictions == {donor.p2p.peer_id: difference}
        assert told(caplog, f"donor {names['donor']} refuses to give this peer its state: {difference}")
        assert told(caplog, f"newcomer {names['newcomer']} does not get the state", "'revision 1111' here")
    await swarm.close()


async def test_an_agreement_is_a_few_texts() -> None:
    swarm = Swarm()
    with pytest.raises(TypeError, match="agreement must have texts by name, got 'epochs': 3"):
        await swarm.add([torch.zeros(1)], agreement={"epochs": 3})
    with pytest.raises(ValueError, match=f"at most {MOST_AGREED} settings, got {MOST_AGREED + 1}: hash them"):
        await swarm.add([torch.zeros(1)], agreement={str(number): "" for number in range(MOST_AGREED + 1)})
    await swarm.close()
