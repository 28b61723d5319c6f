"""What goes over the wire (messages, subjects, error codes, the AsyncAPI document) and the Python client.

Imports nothing else of Turnkeep, so that it can be installed without MLX.
"""

from .client import connect

__all__ = ["connect"]
