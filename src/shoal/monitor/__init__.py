"""Seeing a run from outside, without taking part in it.

An :class:`~shoal.monitor.observer.Observer` reads what peers publish in the table, and puts it into a
:class:`~shoal.monitor.run.RunView`. That is a plain object without network or threads. Whatever shows the run reads
it::

    table ──► Observer ──► RunView ──► terminal        (shoal monitor)
                              │   ├──► page            (--web)
                           History └──► exporters      (--tensorboard, --wandb, --prometheus)

Nobody waits for an observer: it joins the table as a client, stores nothing, and reads rarely enough that the peers
that hold the records do not notice.
"""
