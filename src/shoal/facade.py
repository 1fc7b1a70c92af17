"""Base class of the objects that users hold: they must be shut down, and cannot be copied."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, NoReturn, TypeVar

Self = TypeVar("Self", bound="Facade")
Options = TypeVar("Options")

# For each DHT, the object that holds each name; a name must be unique on its DHT.
_holders: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[str, Facade]] = weakref.WeakKeyDictionary()


class Facade:
    """An object with connections and background work, which end with ``shutdown`` or at the end of a ``with`` block."""

    instead_of_a_copy: ClassVar[str] = "make a new one"
    """What users should do instead of copying or saving such an object."""

    def is_alive(self) -> bool:
        """Whether it is running."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Stop it. Idempotent."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
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
            name: kind and purpose of the object, such as ``"an Optimizer with run_id 'my_run'"``.

        Raises:
            ValueError: another living object holds the name.
        """
        holders = _holders.setdefault(dht, weakref.WeakValueDictionary())
        if _is_held(holders, name, self):
            gc.collect()  # the holder may be garbage already
        if _is_held(holders, name, self):
            raise ValueError(
                f"{name} is at work on this DHT already: call its shutdown() before you make another one, as when a "
                "notebook cell is run again, or use it in a `with` block"
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
