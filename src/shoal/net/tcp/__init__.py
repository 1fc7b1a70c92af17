"""Streams over TCP with TLS 1.3, on which both sides prove who they are.

Read :mod:`~.transport` first. :mod:`~.connect` and :mod:`~.punch` open sockets, :mod:`~.listener` accepts them and
limits what strangers may take. A :mod:`~.handshake` proves both identities, and :mod:`~.sessions` tells which of
several uses a new connection is for. A :mod:`~.stream` moves the bytes.
"""
