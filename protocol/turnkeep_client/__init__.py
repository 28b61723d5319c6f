"""What goes over the wire (messages, subjects, error codes, the AsyncAPI document) and the Python client.

Imports nothing else of Turnkeep, so that it can be installed without MLX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import connect

__version__ = "0.1.0"
__all__ = ["connect"]


def __getattr__(name: str) -> Any:
    """Import the client, and nats-py with it, for those who connect: messages need neither."""
    if name in __all__:
        from . import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
