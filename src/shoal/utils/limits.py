"""Limits of this process, under the import path that users know."""

from shoal.p2p.open_files import increase_file_limit

__all__ = ["increase_file_limit"]
