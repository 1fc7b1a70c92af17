"""Has the router of a private network forward a port to this peer.

:mod:`~.port_mapping` keeps the mapping. :mod:`~.routers` finds the routers. :mod:`~.pcp` asks them by PCP or NAT-PMP;
:mod:`~.upnp_search` looks for UPnP, and :mod:`~.upnp` asks by it.
"""
