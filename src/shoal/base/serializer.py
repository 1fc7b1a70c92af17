"""Turns plain Python values into msgpack and back, for the values that users put into the DHT.

Tuples have an extension type of their own, so that they stay tuples, and a tuple key differs from a list key. Decoding
creates only plain values and registered types.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, cast

import msgpack

from shoal.base.logs import Seldom, one_line

logger = logging.getLogger(__name__)

# Deeper nested tuples could exhaust the reader's stack. Chosen.
_MAX_DEPTH = 64


warn_seldom = Seldom(logger.warning)
# Each unknown extension costs a Python call, and a newer version may use a few. Chosen.
_MAX_UNKNOWN_EXTENSIONS = 1024
# A dictionary with this many keys of one hash is refused: building it takes quadratic time. Chosen.
_MAX_KEYS_OF_A_HASH = 64


def check_keys(keys: Sequence[Hashable]) -> None:
    """Refuse keys that were chosen to have the same hash.

    Anybody can compute hashes of tuples and numbers; those of strings and bytes differ in each process.

    Raises:
        ValueError: many of the keys have the same hash.
    """
    if len(keys) >= _MAX_KEYS_OF_A_HASH and max(Counter(map(hash, keys)).values()) >= _MAX_KEYS_OF_A_HASH:
        raise ValueError(f"at least {_MAX_KEYS_OF_A_HASH} of {len(keys)} keys have the same hash")


def _as_dictionary(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if len(pairs) >= _MAX_KEYS_OF_A_HASH:
        check_keys([key for key, _ in pairs])
    return dict(pairs)


class SerializerBase(ABC):
    """Turns a value into bytes and back."""

    @staticmethod
    @abstractmethod
    def dumps(obj: object) -> bytes: ...

    @staticmethod
    @abstractmethod
    def loads(buf: bytes) -> Any: ...


class ExtSerializable(Protocol):
    """The methods that :meth:`MSGPackSerializer.ext_serializable` requires of a class."""

    def packb(self) -> bytes: ...

    @classmethod
    def unpackb(cls, data: bytes, /) -> Any: ...


_T = TypeVar("_T", bound=type[Any])


class MSGPackSerializer(SerializerBase):
    """msgpack with strict types: ``None``, bool, int, float, str, bytes, list, dict, tuple and registered classes."""

    _ext_types: ClassVar[dict[type[Any], int]] = {}
    _ext_type_codes: ClassVar[dict[int, type[Any]]] = {}
    _TUPLE_CODE: ClassVar[int] = 0x40

    @classmethod
    def ext_serializable(cls, type_code: int) -> Callable[[_T], _T]:
        """Class decorator: objects of this class are packed by their ``packb`` and restored by ``unpackb``.

        Args:
            type_code: msgpack extension code, 0 to 127, the same on all peers.

        Raises:
            ValueError: the code is out of range or taken.
            TypeError: the class lacks ``packb`` or ``unpackb``.
        """
        if not isinstance(type_code, int) or not 0 <= type_code <= 127 or type_code == cls._TUPLE_CODE:
            raise ValueError(f"type_code must be an int from 0 to 127 other than {cls._TUPLE_CODE}, got {type_code!r}")

        def register(wrapped: _T) -> _T:
            if not (callable(getattr(wrapped, "packb", None)) and callable(getattr(wrapped, "unpackb", None))):
                raise TypeError(f"{wrapped!r} must define packb() and the class method unpackb(bytes)")
            taken = cls._ext_type_codes.get(type_code)
            if taken is not None and taken.__qualname__ != wrapped.__qualname__:
                raise ValueError(f"extension code {type_code:#x} is taken by {taken!r}; choose another one")
            cls._ext_type_codes[type_code] = wrapped
            cls._ext_types[wrapped] = type_code
            return wrapped

        return register

    @classmethod
    def _encode_ext(cls, obj: object) -> msgpack.ExtType:
        code = cls._ext_types.get(type(obj))
        if code is not None:
            return msgpack.ExtType(code, cast("ExtSerializable", obj).packb())
        if isinstance(obj, tuple):
            packed = b"".join(cls.dumps(item) for item in obj)
            return msgpack.ExtType(cls._TUPLE_CODE, msgpack.Packer().pack_array_header(len(obj)) + packed)
        raise TypeError(
            f"cannot serialize {obj!r} of type {type(obj).__name__}: use plain values, lists, dicts, tuples"
        )

    @classmethod
    def _decode_ext(cls, code: int, data: bytes, depth: int, unknown: Iterator[int]) -> Any:
        if code == cls._TUPLE_CODE:
            return tuple(cls._loads(data, depth + 1, unknown))
        known = cls._ext_type_codes.get(code)
        if known is not None:
            return known.unpackb(data)
        if next(unknown) >= _MAX_UNKNOWN_EXTENSIONS:
            raise ValueError(f"more than {_MAX_UNKNOWN_EXTENSIONS} values of unknown extension types")
        warn_seldom("unknown msgpack extension code %#x: the value is kept as raw bytes", code)
        return data

    @classmethod
    def dumps(cls, obj: object) -> bytes:
        """Pack a value.

        Raises:
            TypeError: the value, or something inside it, is not a plain value or a registered type.
        """
        return cast("bytes", msgpack.dumps(obj, use_bin_type=True, strict_types=True, default=cls._encode_ext))

    @classmethod
    def loads(cls, buf: bytes) -> Any:
        """Restore a value.

        Raises:
            ValueError: the bytes are not exactly one msgpack value, or are nested too deeply.
        """
        return cls._loads(buf, 0, itertools.count())

    @classmethod
    def _loads(cls, buf: bytes, depth: int, unknown: Iterator[int]) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"tuples are nested more than {_MAX_DEPTH} deep")
        try:
            return msgpack.loads(
                buf,
                ext_hook=lambda code, data: cls._decode_ext(code, data, depth, unknown),
                object_pairs_hook=_as_dictionary,
                raw=False,
                strict_map_key=False,
            )
        except (TypeError, ValueError, msgpack.exceptions.UnpackException) as e:
            # Unhashable keys, or bytes that are truncated or too many.
            if depth:
                raise  # the outermost value reports it, once
            raise ValueError(f"not a valid msgpack value: {type(e).__name__}: {one_line(str(e))}") from e
