"""Deletes messages in such a way that the NATS server also overwrites them in its files.

After a purge, and after a message has expired, the bytes stay in the server's file until the server removes
the whole file. A delete with overwriting rewrites that file, of up to 8 MB, so it is only for what was
forgotten. Several deletes at the same time take as long in all, and delay other writers more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nats.js.errors import APIError, NotFoundError

if TYPE_CHECKING:
    from nats.js import JetStreamContext

#: JetStream's error codes if a delete finds no message, the second one if its file has other messages. The
#: first one also stands for all other reasons why a delete fails, such as a full disk.
_NO_MESSAGE: Final = (10057, 10043)


async def overwrite(js: JetStreamContext, stream: str, seq: int) -> None:
    """Delete and overwrite one message, if it exists. Raises nats-py's errors."""
    try:
        await js.delete_msg(stream, seq)  # nats-py leaves out `no_erase`
    except APIError as error:
        if error.err_code not in _NO_MESSAGE or await _is_there(js, stream, seq):
            raise


async def _is_there(js: JetStreamContext, stream: str, seq: int) -> bool:
    try:
        await js.get_msg(stream, seq)
    except NotFoundError:
        return False
    return True
