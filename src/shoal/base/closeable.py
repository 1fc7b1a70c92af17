"""Base class of the objects that users hold: they must be shut down, and cannot be copied.

An error that a user can fix is told in a sentence, without the frames between it and the user's own line
(:func:`at_the_door`). For an unknown argument it suggests the one that may be meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import gc
import inspect
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar

from shoal.errors import ShoalError

logger = logging.getLogger(__name__)

_NOT_OF_USERS = {"shoal", "torch", *sys.stdlib_module_names}

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self", bound="Facade")
Options = TypeVar("Options")

# For each DHT, the object that holds each name; a name must be unique on its DHT.
_holders: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[str, Facade]] = weakref.WeakKeyDictionary()


def at_the_door(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that users call: errors that they can fix leave it without the frames of shoal.

    The full traceback is logged at level ``DEBUG``.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if not _says_enough(error):
                raise
            logger.debug("%s ends with an error", method.__qualname__, exc_info=True)
            raise error.with_traceback(None) from None

    return call


def _says_enough(error: Exception) -> bool:
    """Whether the text of an error is meant for users, and no code of theirs is among the hidden frames."""
    frames = traceback.walk_tb(error.__traceback__)
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames]
    is_meant_for_users = isinstance(error, ShoalError) or (
        isinstance(error, (ValueError, TypeError)) and packages[-1] == "shoal"
    )
    return is_meant_for_users and all(package in _NOT_OF_USERS for package in packages)


def unknown_argument(owner: str, name: str, known: Collection[str]) -> TypeError:
    """The error for an unknown argument, with the one that may be meant."""
    meant = difflib.get_close_matches(name, known, n=1)
    return TypeError(f"{owner} has no argument {name!r}{f': did you mean {meant[0]}?' if meant else ''}")


class Facade:
    """An object with connections and background work, which end with ``shutdown`` or at the end of a ``with`` block."""

    instead_of_a_copy: ClassVar[str] = "make a new one"
    """What users should do instead of copying or saving such an object."""

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        # Python names an unknown argument, too, but suggests no other one before 3.13.
        parameters = inspect.signature(cls.__init__).parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            for name in kwargs:
                if name not in parameters:
                    raise unknown_argument(cls.__name__, name, parameters)
        return super().__new__(cls)

    def is_alive(self) -> bool:
        """Whether it is running."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Stop it. Idempotent."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # Called by pickle, torch.save, copy.copy and copy.deepcopy.
    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, copied or saved: it has connections and threads. "
            f"Instead, {self.instead_of_a_copy}"
        )

    def be_the_only(self, name: str, dht: Any) -> None:
        """Reserve a name on a DHT for this object, as long as it is alive.

        Args:
            name: the object in words, such as ``"an Optimizer with run_id 'my_run'"``.

        Raises:
            ValueError: another living object holds the name.
        """
        holders = _holders.setdefault(dht, weakref.WeakValueDictionary())
        if _is_held(holders, name, self):
            gc.collect()  # the holder may be garbage already
        if _is_held(holders, name, self):
            raise ValueError(
                f"{name} is at work on this DHT already: call its shutdown() before you make another one, for example "
                "when you run a notebook cell again, or use it in a `with` block"
            )
        holders[name] = self


def _is_held(holders: weakref.WeakValueDictionary[str, Facade], name: str, wanted_by: Facade) -> bool:
    holder = holders.get(name)
    return holder is not None and holder is not wanted_by and holder.is_alive()


def options_from(kind: type[Options], arguments: Mapping[str, Any], **resolved: Any) -> Options:
    """Collect the options of a facade in one object, from the arguments of its constructor.

    Args:
        kind: a dataclass whose fields have the names of the arguments.
        arguments: the constructor's ``locals()``; names that are not fields are ignored.
        resolved: values that replace those of the arguments.
    """
    assert dataclasses.is_dataclass(kind)
    names = {option.name for option in dataclasses.fields(kind)}
    return kind(**{**{name: value for name, value in arguments.items() if name in names}, **resolved})
