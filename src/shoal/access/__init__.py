"""Who may take part in a private run: peers show :mod:`~.badges`, made from :mod:`~.tokens`; :mod:`~.membership`
judges."""
