"""Watching a run from outside, without taking part in it.

An :class:`~shoal.monitor.observer.Observer` reads the records that peers publish in the DHT, and a
:class:`~shoal.monitor.prober.Prober` calls peers, to see which of them are still there. Both fill a
:class:`~shoal.monitor.run.RunView`, a plain object without network or threads, which keeps a
:class:`~shoal.monitor.history.History`. The terminal, the page and the exporters read it::

    DHT ────► Observer ──► RunView ──► terminal        (shoal monitor)
    peers ──► Prober ───────┘ │   ├──► page            (--web)
                           History └──► exporters      (--tensorboard, --wandb, --prometheus)

No peer waits for an observer: it joins the DHT as a client, stores nothing, and reads so rarely that the peers that
hold the records do not notice.
"""
