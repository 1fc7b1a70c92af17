"""Nested structures, under the import path that users know."""

from shoal.nested import nested_compare, nested_flatten, nested_map, nested_pack

__all__ = ["nested_compare", "nested_flatten", "nested_map", "nested_pack"]
