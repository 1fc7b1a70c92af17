"""``shoal plan``: which way to train fits a model, and how much of the time peers would compute.

:mod:`~.arithmetic` computes memory, bytes and times from sizes and lines. :mod:`~.command` reads options and prints.
"""
