"""How far this peer believes others: a policy of pure functions over what it has seen them do.

:mod:`~.policy` is what a run that trusts its members uses, :mod:`~.budget` bounds the time that others may cost, and
:mod:`~.open` adds the limits of a run that anybody may join. It is imported only there (``guard="open"``)::

    rounds ── who came, samples, waits ──► Members ──► whom to wait for, whose samples count, the epoch of the run
                                              │
                                              └──► Budget ──► who may join or lead, how long a lone donor may wait
"""
