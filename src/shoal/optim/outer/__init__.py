"""Low-communication training: peers make many inner steps of their own between two exchanges.

What all peers agree on are the *outer* parameters. Every so many inner steps each peer tells by how much its own
parameters have moved away from them; the mean of that is a gradient for an outer optimizer, which all peers step alike.
"""
