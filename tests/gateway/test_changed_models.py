"""The worker gets another model between two turns: conversations go on over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.gateway.test_chat_served import LETTERS, ask, assistant, user
from tests.parts import make_tiny_model
from turnkeep_client.client import connect
from turnkeep_client.messages import Generated, decode_result

if TYPE_CHECKING:
    from pathlib import Path

Start = Any  # of `local_worker` and `door`


async def last_answer(worker: Any, session: str) -> Generated:
    results = [decode_result(one.body) for one in await worker.client.log(session) if one.kind == "out"]
    return next(one for one in reversed(results) if isinstance(one, Generated))


async def test_conversations_over_http_go_on_with_another_model(
    local_worker: Start, door: Start, endless_model: Path, tmp_path: Path
) -> None:
    """The other model has another tokenizer. A fresh session with the same messages gets the same answer."""
    worker = await local_worker(model=str(endless_model))
    gateway = await door(worker.settings.nats, worker.settings.prefix)
    first, http, _ = await ask(gateway, said := [user("One")], temperature=0)
    await worker.stop()

    other = make_tiny_model(tmp_path / "other", merges=[("O", "n"), ("On", "e"), ("T", "w"), ("Tw", "o")])
    worker = await local_worker(model=str(other))
    said += [assistant(first.choices[0].message.content), user("Two")]
    second, *where_to = await ask(gateway, said, temperature=0)
    assert where_to == [http, "continued"]
    result = await last_answer(worker, http)
    assert (result.model.name, result.previous_model.name, result.rewritten_from) == ("other", "endless", 0)
    async with await connect(worker.settings.nats, prefix=worker.settings.prefix, tenant="alone") as alone:
        fresh = await alone.session("s").generate(messages=said, max_tokens=8, logit_bias=LETTERS)
    assert (fresh.text, fresh.usage.prompt_tokens) == (
        second.choices[0].message.content,
        second.usage.prompt_tokens,
    )
    assert (await ask(gateway, said))[2] == "forked", "the last question is asked again"
    said += [assistant(second.choices[0].message.content), user("Three")]
    assert (await ask(gateway, said))[1:] == (http, "continued")
    await worker.stop()

    worker = await local_worker(model=str(endless_model), other_model="refuse")
    _, elsewhere, how = await ask(gateway, said)
    assert (elsewhere != http, how) == (True, "begun"), "the whole conversation was sent again"
