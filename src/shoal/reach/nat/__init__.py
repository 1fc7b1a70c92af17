"""The router of a private network forwards a port: :mod:`~.port_mapping` keeps it, by :mod:`~.pcp` or :mod:`~.upnp`."""
