"""Streams over TCP with TLS 1.3, on which both sides prove who they are.

Read :mod:`~.transport` first. :mod:`~.connect` and :mod:`~.punch` open sockets; :mod:`~.listener` accepts connections
and limits what strangers may take. A :mod:`~.handshake` proves both identities; :mod:`~.sessions` are raw connections
that begin with a cookie instead. A :mod:`~.stream` moves the bytes.
"""
