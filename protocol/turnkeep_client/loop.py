"""Runs the functions that a model calls, until an answer calls none. A rerun after a crash is safe."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from .errors import InvalidMessageError, RequestFailedError
from .options import check_options
from .subjects import check_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Unpack

    from .messages import Called, Generated
    from .sampling import Sampling
    from .session import Messages, Session


async def run_tools(
    session: Session,
    functions: Mapping[str, Callable[..., Any]],
    *,
    messages: Messages | None = None,
    most: int = 8,
    request_id: str | None = None,
    **sampling: Unpack[Sampling],
) -> Generated:
    """Generate, run the functions that the answer calls, and send their results, until an answer calls none.

    Returns the last answer, after `most` answers at the latest. `sampling` has the `tools` that describe the
    functions. A function gets its arguments by keyword; it can be async, and return any value that JSON can
    hold. If it raises an exception, the model reads that as the call's result. With a `request_id`, the
    caller can run this again after a crash: functions are called again, but the session keeps the results
    that were sent first, and no answer is generated twice. The id must be some ten characters shorter than
    others, since each step adds its number.

    Raises `InvalidMessageError` if a tool has no function, and what `Session.generate` raises.
    """
    check_options(functions=functions, most=most)
    if unknown := {name for name in _names(sampling) if name not in functions}:
        raise InvalidMessageError(f"there is no function for {', '.join(sorted(unknown))}")
    steps = uuid4().hex[:24] if request_id is None else request_id
    if most > 1:  # before a function is called
        check_id("request id", f"{steps}-{most - 1}-results")
    said: Any = messages
    for number in range(max(most, 1)):
        if number:
            await _append(session, said, f"{steps}-{number}-results")
        given = {} if number else {"messages": said}
        answer = await session.generate(request_id=f"{steps}-{number}", **given, **sampling)
        if not answer.tool_calls or number + 1 >= most:
            break
        said = [
            {"role": "tool", "tool_call_id": call.id, "content": await _result(functions, call)}
            for call in answer.tool_calls
        ]
        sampling.pop("tools", None)  # the session has them
        sampling["tool_choice"] = "auto"  # a forced call would never end
    return answer


async def _append(session: Session, results: Messages, request_id: str) -> None:
    try:
        await session.append(messages=results, request_id=request_id)
    except RequestFailedError as error:
        if error.code != "id_conflict":  # an earlier run has sent other results: they stay
            raise


def _names(sampling: Sampling) -> list[str]:
    """Return the names of the tools, as far as they are tools: `Session.generate` refuses others."""
    tools: Any = msgspec.to_builtins(sampling.get("tools") or ())
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    return [str(one["name"]) for one in functions if isinstance(one, dict) and "name" in one]


async def _result(functions: Mapping[str, Callable[..., Any]], call: Called) -> str:
    """Run the function that `call` names; return its result, or the exception that it raised, as text."""
    function = functions.get(call.function.name)
    if function is None:
        return f"there is no function {call.function.name}"
    try:
        found = function(**json.loads(call.function.arguments))
        if inspect.isawaitable(found):
            found = await found
        return found if isinstance(found, str) else msgspec.json.encode(found).decode()
    except Exception as error:  # noqa: BLE001  # the caller's functions raise anything
        return f"{type(error).__name__}: {error}"
