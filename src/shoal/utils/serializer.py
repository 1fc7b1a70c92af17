"""Plain values to bytes and back, under the import path that users know."""

from shoal.serializer import MSGPackSerializer, SerializerBase

__all__ = ["MSGPackSerializer", "SerializerBase"]
