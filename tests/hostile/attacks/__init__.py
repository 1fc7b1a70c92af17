"""Who attacks, and how: a coroutine each, which goes on until it is cancelled.

Nearly all that they send is well-formed. The very same coroutines run in processes of their own, against real trainers,
and in the simulator.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.hostile.attacker import Attacker
from tests.hostile.attacks import clocks, connections, groups, joining, malformed, progress, states, table

Attack = Callable[[Attacker], Awaitable[None]]

STRANGERS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        progress.claims_a_million_epochs,
        progress.calls_the_end_of_an_epoch_far_away,
        progress.ghosts_take_part,
        progress.claims_a_billion_samples,
        table.withdraws_what_others_declared,
        table.fills_the_table,
        table.crowds_the_keys_of_a_run,
        table.hides_what_is_stored,
        malformed.sends_huge_peer_ids,
        malformed.sends_colliding_keys,
        malformed.sends_unknown_extensions,
        connections.opens_calls_and_says_nothing,
        connections.announces_headers_that_never_come,
        connections.means_rounds_that_nobody_knows,
        groups.invites_and_falls_silent,
        joining.joins_with_absurd_wishes,
        states.asks_for_a_chunk_now_and_then,
        clocks.tells_another_time,
    )
}
"""By name: they know an address and the name of the run."""
OF_MACHINES = frozenset(
    name for name, attack in STRANGERS.items() if attack.__module__ in (malformed.__name__, connections.__name__)
)
"""They cost time of a processor, memory or connections, of which virtual time knows nothing."""
