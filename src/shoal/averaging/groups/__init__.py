"""Finding groups: everything that happens until a group is complete.

A step begins a search. The table shows which peers look for a group and when each promises to start; the earliest one
leads. The others ask it, or it invites them; it starts when all are there or its time has come::

    table, peers ── events ──> GroupSearch (pure) ── actions ──> SearchShell ── calls ──> table, peers

=====================  ========================================================================================
:mod:`~.settings`      how an averager looks for groups, and what all members must have in common
:mod:`~.keys`          under which keys of the DHT averagers find each other
:mod:`~.search`        decides: which peer to follow, which peers to invite, how long to wait, when to start
:mod:`~.matchmaking`   performs what was decided: asks leaders, answers followers, looks at the table
:mod:`~.group`         what a leader announces, and what a member believes of it
:mod:`~.memory`        former members, who are asked even if the DHT does not show them; and refused peers
=====================  ========================================================================================
"""
