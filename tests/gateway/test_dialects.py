"""What each API of the gateway must do alike: stream what it answers, and find the conversation again."""

from typing import Any

import httpx2
import pytest
from apis import APIS, how
from crafted import LETTERS, user

NUM = 12


@pytest.mark.serves("endless_model")
@pytest.mark.parametrize("name", APIS)
async def test_each_api_gives_the_same_text_streamed_or_whole_and_prefills_only_the_new_messages(
    name: str, http: httpx2.AsyncClient
) -> None:
    """Also if a message has a part that the model cannot read, of which each answer warns."""
    api = APIS[name]
    first = user([{"type": "text", "text": "One?"}, api.picture] if api.picture else "One?")

    async def ask(*said: dict[str, Any], **more: Any) -> httpx2.Response:
        body = api.body([*said], NUM, logit_bias=LETTERS, temperature=0.9, **more)
        answer = await http.post(api.path, json=body)
        assert ("x-turnkeep-warnings" in answer.headers) == (said[0] == first and bool(api.picture))
        return answer

    whole, streamed = await ask(first, seed=5), await ask(first, seed=5, stream=True)
    text, (num_prompt, _, num_made) = api.text(whole.json()), api.usage(whole.json())
    assert "".join(api.text(one) for one in api.events(streamed.text)) == text != ""
    assert num_made == NUM
    told = [first, {"role": "assistant", "content": text}]
    for question, expected in (("Two?", "continued"), ("Too?", "forked")):
        more = await ask(*told, user(question))
        assert how(more) == expected
        assert name == "ollama" or api.usage(more.json())[1] >= num_prompt + NUM - 1
    assert how(await ask(user("Else?"), *told[1:], user("Two?"))) == "begun"


async def test_an_error_has_the_json_form_of_the_api_to_which_the_requests_path_or_header_belongs(
    http: httpx2.AsyncClient,
) -> None:
    anthropic = {"anthropic-version": "2023-06-01"}
    for path, headers, shape in [
        ("/v1/nothing", {}, {"error": dict}),
        ("/nothing", {}, {"error": dict}),
        ("/v2/nothing", {}, {"error": dict}),
        ("/v1/responses/x/y/z", {}, {"error": dict}),
        ("/v1/messages/x/y/z", {}, {"type": str, "error": dict}),
        ("/v1/nothing", anthropic, {"type": str, "error": dict}),
        ("/api/tags/x/y", {}, {"error": str}),
        ("/api/tags/x/y", anthropic, {"type": str, "error": dict}),
    ]:
        answer = await http.get(path, headers=headers)
        assert answer.status_code == 404, path
        assert {name: type(one) for name, one in answer.json().items()} == shape, path
