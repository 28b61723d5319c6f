"""Images in the console: asked about, shown by their digests, and exported with the conversation."""

from __future__ import annotations

import io
import zipfile
from base64 import b64encode
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

import pytest

from tests.device import tiny_seeing
from tests.ops.test_console import opened
from tests.parts import LocalWorker, png
from turnkeep_client import image

Start = Callable[..., Awaitable[LocalWorker]]
PNG = png(1)
DIGEST = sha256(PNG).hexdigest()


async def test_a_question_with_images_is_shown_with_the_digests_by_which_their_files_are_served(
    local_worker: Start,
) -> None:
    worker = await local_worker()
    async with opened(worker.client) as page:
        data = b64encode(PNG).decode()
        await page.post("a/ask", {"id": "one", "text": "Which colour?", "images": [data, data]})
        await page.post("a/ask", {"id": "two", "text": "", "images": [data]})
        await worker.client.session("a").generate(max_tokens=1)
        asked = [turn["said"][0] for turn in (await page.get("sessions/a"))["turns"][:2]]
        assert [(one.get("text", ""), one["images"]) for one in asked] == [
            ("Which colour?", [DIGEST, DIGEST]),
            ("", [DIGEST]),
        ]
        file = await page.http.get(f"/api/sessions/a/images/{DIGEST}")
        assert (file.status_code, file.content) == (200, PNG)
        assert file.headers["content-type"] == "image/png"
        assert file.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in file.headers["content-security-policy"]
        for name in ("0" * 64, "x", "*"):
            assert (await page.http.get(f"/api/sessions/a/images/{name}")).status_code == 400
        listed = (await page.get("sessions"))["rows"]
        assert [one["begins"] for one in listed] == ["Which colour?"]


async def test_the_console_refuses_a_bad_image_and_stores_nothing(local_worker: Start) -> None:
    worker = await local_worker()
    async with opened(worker.client) as page:
        for wrong in ("", "not base64!", b64encode(b"a text").decode()):
            said = await page.post("a/ask", {"id": "one", "text": "See.", "images": [wrong]}, 400)
            assert "image" in said["error"]
        assert not await worker.client.log("a")


async def test_an_export_has_the_files_of_images_beside_its_markdown_and_as_urls_in_its_json(
    local_worker: Start,
) -> None:
    worker = await local_worker()
    content = [image(PNG), {"type": "text", "text": "Which colour?"}]
    await worker.client.session("a").generate(messages=[{"role": "user", "content": content}], max_tokens=1)
    async with opened(worker.client) as page:
        answer = await page.http.get("/api/sessions/a/export?form=md")
        assert answer.headers["content-disposition"] == 'attachment; filename="a.zip"'
        with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
            name = f"a-images/{DIGEST[:16]}.png"
            assert archive.namelist() == ["a.md", name]
            assert archive.read(name) == PNG
            assert f"## You\n\n![]({name})\n\nWhich colour?\n" in archive.read("a.md").decode()
        (asked, _) = (await page.http.get("/api/sessions/a/export?form=json")).json()
        url = {"url": f"data:image/png;base64,{b64encode(PNG).decode()}"}
        assert asked["content"] == [{"type": "image_url", "image_url": url}, content[1]]


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (b"\xff\xd8\xff\xe0 <script>", "image/jpeg"),
        (b"GIF89a <script>", "image/gif"),
        (b"RIFF\0\0\0\0WEBP<script>", "image/webp"),
    ],
)
async def test_the_console_serves_each_image_as_an_image_whatever_else_is_in_its_file(
    local_worker: Start, file: bytes, kind: str
) -> None:
    worker = await local_worker()
    await worker.client.session("a").append(messages=[{"role": "user", "content": [image(file)]}])
    async with opened(worker.client) as page:
        answer = await page.http.get(f"/api/sessions/a/images/{sha256(file).hexdigest()}")
        assert (answer.headers["content-type"], answer.content) == (kind, file)


async def test_a_turns_figures_have_the_tokens_of_its_images(local_worker: Start, tmp_path: Path) -> None:
    tiny_seeing.write("smolvlm", tmp_path / "model")
    template = (
        "{% for one in messages %}{% if one.content is string %}{{ one.content }}{% else %}<image>{% endif %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template + "{% endfor %}")
    worker = await local_worker(model=str(tmp_path / "model"))
    said = [{"role": "user", "content": [image(tiny_seeing.picture(1))]}]
    made = await worker.client.session("a").generate(messages=said, max_tokens=2)
    await worker.client.session("a").generate(messages=[{"role": "user", "content": "So?"}], max_tokens=2)
    async with opened(worker.client) as page:
        first, second = (turn["spent"] for turn in (await page.get("sessions/a"))["turns"])
    assert 0 < first["images"] <= first["prefilled"] == made.usage.prompt_tokens
    assert "images" not in second
