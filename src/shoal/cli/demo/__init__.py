"""``shoal demo``: a swarm on one machine that loses a peer, gains a peer, and keeps training.

In reading order: :mod:`~.model` is a small language model and its text. :mod:`~.peer` is a program that trains it with
shoal's public interface, in a process of its own. :mod:`~.messages` are lines of JSON between these processes and their
runner, and the :class:`~.messages.Story` of what has happened. :mod:`~.command` is the runner: it starts the peers,
kills one, adds one, and stops all. :mod:`~.report` shows the story while it happens, and writes it down at the end.
"""
