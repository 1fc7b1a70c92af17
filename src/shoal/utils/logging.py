"""Printed log lines, under the import path that users know."""

from shoal.logs import (
    HandlerMode,
    TextStyle,
    get_logger,
    golog_level_to_python,
    python_level_to_golog,
    use_hivemind_log_handler,
)

__all__ = [
    "HandlerMode",
    "TextStyle",
    "get_logger",
    "golog_level_to_python",
    "python_level_to_golog",
    "use_hivemind_log_handler",
]
