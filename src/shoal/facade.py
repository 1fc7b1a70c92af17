"""What all objects have in common that users hold: they have a life, and cannot be copied."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, NoReturn, TypeVar

Self = TypeVar("Self", bound="Facade")
Options = TypeVar("Options")

# Who uses a name, by the DHT on which it must be the only one.
_holders: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[str, Facade]] = weakref.WeakKeyDictionary()


class Facade:
    """Has connections and work in the background of this process: ``shutdown`` ends it, a ``with`` block does, too."""

    instead_of_a_copy: ClassVar[str] = "make a new one"
    """What users do who want to copy or save such an object."""

    def is_alive(self) -> bool:
        """Whether it is at work."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """End it. Idempotent."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # Pickle, torch.save, copy.copy and copy.deepcopy ask this.
    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, copied or saved: it has connections and threads. "
            f"Instead, {self.instead_of_a_copy}"
        )

    def be_the_only(self, name: str, dht: Any) -> None:
        """From now on, and as long as it lives, this object alone has this name on a DHT.

        Args:
            name: what it is and for what, such as ``"an Optimizer with run_id 'my_run'"``.

        Raises:
            ValueError: another one has it.
        """
        holders = _holders.setdefault(dht, weakref.WeakValueDictionary())
        if _is_held(holders, name, self):
            gc.collect()  # it may be out of use already
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
    """All options of a facade as one object, from the arguments that its constructor got.

    Args:
        kind: a dataclass; its fields are named as the arguments are.
        arguments: the constructor's ``locals()``; what is no field is left out.
        resolved: values that are not those of the arguments.
    """
    assert dataclasses.is_dataclass(kind)
    names = {option.name for option in dataclasses.fields(kind)}
    return kind(**{**{name: value for name, value in arguments.items() if name in names}, **resolved})
