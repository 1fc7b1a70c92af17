"""``shoal doctor``: finds what may keep this machine from training with others, and says how to fix it.

Each check yields a :class:`~.findings.Finding`: a verdict, what was found, and what to do. In reading order:
:mod:`~.findings` checks this machine alone. :mod:`~.peer` checks one address step by step, as a connection does, from
the name to the bandwidth, and :mod:`~.reach` what the peer there does as a relay, and how others reach this machine.
:mod:`~.device` trains on a graphics card and on the CPU, and compares. :mod:`~.command` runs and prints the checks.
"""
