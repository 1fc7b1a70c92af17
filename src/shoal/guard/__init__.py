"""How far this peer believes others: a policy based on what it has seen them do.

:mod:`~.policy` is the policy of a run that trusts its members, :mod:`~.budget` bounds the time that others may cost,
and :mod:`~.open` adds the limits of a run that anyone may join. Only such a run imports it (``guard="open"``)::

    rounds ── members, samples, waits ──► Members ──► which peers to wait for, whose samples count, the run's epoch
                                             │
                                             └──► Budget ──► which peers may join or lead, how long a lone donor waits
"""
