"""Connections through a relay.

A peer that nobody can call asks relays for a reservation (:mod:`~.client`); a public peer is a relay for a few others
(:mod:`~.server`). A caller opens :mod:`~.circuits` through the relay, and the peer behind it answers. :mod:`~.messages`
has the messages between them; :mod:`~.fair_rate` shares the relay's rate among circuits.
"""
