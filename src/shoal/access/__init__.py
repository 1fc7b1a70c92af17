"""Access to a private run: users get :mod:`~.tokens`, peers show :mod:`~.badges` made from them, and
:mod:`~.membership` decides which peers to accept."""
