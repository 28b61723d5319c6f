"""Results of parallel calls: the model reads them in the order of the calls, however they came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_fold import World
from test_tools import STRICT, WEATHER, WITH_TOOLS, Script, ask, generated, user, world_of

from turnkeep_client.messages import Append, Appended, Function, Message, ToolCall
from worker.models.tokenizer import Tokenizer

CALLS = "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in ("Aachen", "Bonn", "Celle")
)


@pytest.fixture(scope="module", params=["with-tools", "strict"])
def tokenizer(request: pytest.FixtureRequest, model_with_template: Callable[[str, str], Path]) -> Tokenizer:
    """One template that shows results as such, and one that has no tools and joins messages."""
    template = {"with-tools": WITH_TOOLS, "strict": STRICT}[request.param]
    return Tokenizer.from_folder(model_with_template(request.param, template))


def result(call_id: str, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


def said(*ids: str) -> Message:
    """An answer with a call of each of these ids."""
    calls = tuple(ToolCall(id=one, function=Function(name="weather", arguments="{}")) for one in ids)
    return Message(role="assistant", tool_calls=calls)


def last_context(world: World) -> list[int]:
    engine = world.engine
    assert isinstance(engine, Script)
    return engine.contexts[-1]


async def context_after(tokenizer: Tokenizer, num_turns: int, groups: str) -> list[int]:
    """Return the prompt after three calls, whose results come in groups, each in a request of its own."""
    world = world_of(tokenizer, *["Yes."] * num_turns, CALLS, "Fine.")
    for number in range(num_turns):
        await generated(world, ask(number, user("So?")))
    called = await generated(world, ask(100, user("Weather?"), tools=(WEATHER,)))
    results = {
        name: result(one.id, f"it is {name}") for name, one in zip("abc", called.tool_calls, strict=True)
    }
    *before, last = groups.split()
    for number, group in enumerate(before):
        appended = await world.ask(Append(id=f"a{number}", messages=[results[one] for one in group]))
        assert isinstance(appended, Appended)
    await generated(world, ask(101, *(results[one] for one in last)))
    await world.assert_fold_is_life()
    return last_context(world)


@pytest.mark.parametrize("num_turns", [0, 30], ids=["short", "long"])
@pytest.mark.parametrize("came", ["cab", "b a c", "c b a", "bc a", "ca", "c a"])
async def test_results_are_read_in_the_order_of_their_calls(
    tokenizer: Tokenizer, came: str, num_turns: int
) -> None:
    in_order = "".join(sorted(came.replace(" ", "")))
    assert await context_after(tokenizer, num_turns, came) == await context_after(
        tokenizer, num_turns, in_order
    )


async def test_an_id_of_a_call_names_the_last_call_with_this_id(tokenizer: Tokenizer) -> None:
    """In the second answer the ids are in another order; in the third both calls have the same id."""

    async def context(*told: Message) -> list[int]:
        world = world_of(tokenizer, "Fine.")
        await generated(world, ask(1, *told))
        return last_context(world)

    first, again = [result("x", "1"), result("y", "2")], [result("y", "3"), result("x", "4")]
    twice = [result("z", "5"), result("z", "6")]
    rows = [user("So?"), said("x", "y"), first, user("And?"), said("y", "x"), again, said("z", "z"), twice]

    def flat(*, backwards: bool) -> list[Message]:
        found = list[Message]()
        for row in rows:
            one = row if isinstance(row, list) else [row]
            found += reversed(one) if backwards and one is not twice else one
        return found

    assert await context(*flat(backwards=True)) == await context(*flat(backwards=False))


async def test_a_result_that_answers_no_call_of_the_last_answer_stays_where_it_came(
    tokenizer: Tokenizer,
) -> None:
    world = world_of(tokenizer, "Fine.")
    told = [user("So?"), said("x", "y"), result("y", "late"), user("Wait."), result("x", "early")]
    await generated(world, ask(1, *told))
    text = tokenizer.decode(last_context(world))
    assert text.index("late") < text.index("Wait.") < text.index("early")


@pytest.mark.parametrize("came", ["c b a", "bc a", "c a"])
async def test_results_of_calls_that_a_client_tells_are_read_in_the_order_of_the_calls(
    tokenizer: Tokenizer, came: str
) -> None:
    async def context(groups: str) -> list[int]:
        world = world_of(tokenizer, "Fine.")
        told = [
            [user("So?"), said(*"abc")],
            *([result(one, one) for one in group] for group in groups.split()),
        ]
        for number, messages in enumerate(told):
            assert isinstance(await world.ask(Append(id=f"a{number}", messages=messages)), Appended)
        await generated(world, ask(1, user("Well?")))
        await world.assert_fold_is_life()
        return last_context(world)

    in_order = "".join(sorted(came.replace(" ", "")))
    assert await context(came) == await context(in_order)
