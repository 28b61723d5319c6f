"""The protocol (messages, subjects, error codes, the AsyncAPI document) and the Python client.

Imports nothing else of Turnkeep, so it can be installed without MLX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import connect
    from .images import image
    from .loop import run_tools
    from .retrying import retry

__version__ = "0.1.0"
__all__ = ["connect", "image", "retry", "run_tools"]


def __getattr__(name: str) -> Any:
    """Import the client, and with it nats-py, on first use: messages alone need neither."""
    if name in __all__:
        from . import client, images, loop, retrying

        owners = {"connect": client, "image": images, "retry": retrying, "run_tools": loop}
        return getattr(owners[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
