"""Finding groups: everything that happens until a group is complete.

=======================  ======================================================================================
:mod:`~.keys`            under which keys of the DHT averagers find each other
:mod:`~.candidates`      one search for a group: who is looking, whom to ask next, who waits for whom
:mod:`~.matchmaking`     asks leaders, leads followers, and starts the group
:mod:`~.leading`         invites those that should follow, refuses who has sent bad values, describes the group
:mod:`~.former_members`  members of recent groups, who are asked even if the DHT does not show them
=======================  ======================================================================================
"""
