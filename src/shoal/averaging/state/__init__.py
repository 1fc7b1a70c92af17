"""State downloads: a newcomer takes the state from several donors at once.

::

    donor                                              newcomer
    declares itself under a key of the DHT  ─────────► finds donors, and asks the best ones
    takes a snapshot: chunks and their hashes ───────► lets their hosts vote on a version
    sends the chunks it is asked for  ◄──────────────► asks each donor of that version for other chunks
                                                       checks their hashes, and has the state

In reading order:

- :mod:`~.download` is a state in flight: the snapshot that a donor sends, and the chunks as they arrive.
- :mod:`~.donor` declares a donor, and decides which newcomers it serves: a few at a time.
- :mod:`~.newcomer` finds donors, chooses a version, and replaces donors that are slow or fail.

Metadata such as the epoch come from the donor that described the version. Only the averager that owns the state knows
what its tensors mean.
"""
