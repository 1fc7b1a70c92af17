"""Finding groups: everything that happens until a group is complete.

Each step starts a search. The DHT (here: the table) lists the peers that look for a group, with the time by which each
promises to start. The peer with the earliest promise leads. Others ask to follow it, or it invites them. It starts the
group when all expected members have joined, or at its promised time::

    table, peers ── events ──> GroupSearch (pure) ── actions ──> SearchShell ── calls ──> table, peers

=====================  ========================================================================================
:mod:`~.settings`      how an averager looks for groups, and what all members must have in common
:mod:`~.keys`          under which keys of the DHT averagers find each other
:mod:`~.search`        decides: which peer to follow, which peers to invite, how long to wait, when to start
:mod:`~.matchmaking`   performs what was decided: asks leaders, answers followers, looks at the table
:mod:`~.group`         what a leader announces, and how a member checks it
:mod:`~.memory`        former members, which are called even if the DHT does not list them; and refused peers
=====================  ========================================================================================
"""
