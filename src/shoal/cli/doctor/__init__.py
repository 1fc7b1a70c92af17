"""``shoal doctor``: finds what may keep this machine from training with others, and says how to fix it.

Each check yields a :class:`~.findings.Finding`: a verdict, what was found, and what to do. In reading order:
:mod:`~.findings` checks this machine alone. :mod:`~.peer` checks one address step by step, from name resolution to
bandwidth. :mod:`~.reach` checks how others reach this machine, and whether the peer at an address works as a relay.
:mod:`~.device` trains on a graphics card and on the CPU, and compares. :mod:`~.command` runs and prints the checks.
"""
