"""Seeing a run from outside, without taking part in it.

An :class:`~shoal.monitor.observer.Observer` reads what peers publish in the DHT, and a
:class:`~shoal.monitor.prober.Prober` calls the peers, to see which of them are still there. Both put what they find
into a :class:`~shoal.monitor.run.RunView`. That is a plain object without network or threads. Whatever shows the run
reads it::

    DHT ────► Observer ──► RunView ──► terminal        (shoal monitor)
    peers ──► Prober ───────┘ │   ├──► page            (--web)
                           History └──► exporters      (--tensorboard, --wandb, --prometheus)

Nobody waits for an observer: it joins the DHT as a client, stores nothing, and reads rarely enough that the peers that
hold the records do not notice.
"""
