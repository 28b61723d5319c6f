"""Images with questions on the command line: by an option, or by their paths in a terminal."""

import asyncio
import subprocess
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
from command_runs import turnkeep, where

from commands.pictures import dragged
from tests.parts import LocalWorker, png
from turnkeep_client.client import Client

RED, BLUE = png(1), png(2)


def digest(file: bytes) -> str:
    return sha256(file).hexdigest()


def part(file: bytes) -> dict[str, str]:
    return {"type": "image", "digest": digest(file)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    red, blue = tmp_path / "red one.png", tmp_path / "it's blue.PNG"
    red.write_bytes(RED)
    blue.write_bytes(BLUE)
    return red, blue


async def run(
    name: str, worker: LocalWorker, *options: object, **more: Any
) -> subprocess.CompletedProcess[str]:
    given = ("--session", "s", "--max-tokens", 2, *where(worker), *options)
    return await asyncio.to_thread(turnkeep, name, *given, **more)


async def questions(client: Client) -> list[Any]:
    messages = (await client.session("s").history()).messages
    return [one.content for one in messages if one.role == "user"]


async def test_ask_sends_image_files_and_refuses_any_other_file_with_an_error_that_names_the_file(
    worker: LocalWorker, files: tuple[Path, Path], tmp_path: Path
) -> None:
    (wrong := tmp_path / "notes.png").write_text("These are notes.")
    done = await run("ask", worker, "--image", wrong, "What?", text="")
    assert done.returncode == 2
    assert f"{wrong}: the image is of no known format; send a PNG, JPEG, WebP or GIF" in done.stderr
    missing = await run("ask", worker, "--image", tmp_path / "none.png", "What?", text="")
    assert "does not exist" in missing.stderr
    assert not await worker.client.log("s")
    images = [word for file in files for word in ("--image", file)]
    assert (await run("ask", worker, *images, "Which?", text="")).returncode == 0
    assert await questions(worker.client) == [(part(RED), part(BLUE), text("Which?"))]
    shown = await asyncio.to_thread(turnkeep, "show", "s", *where(worker))
    assert f"[image {digest(RED)[:12]}][image {digest(BLUE)[:12]}]Which?" in shown.stdout


def test_a_chat_line_attaches_images_only_if_the_whole_line_consists_of_existing_image_paths(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    red, blue = files
    (tmp_path / "notes.txt").write_text("a")
    escaped = str(red).replace(" ", "\\ ")
    for line, found in (
        (f"'{red}'", [red]),
        (f'"{red}"', [red]),
        (escaped, [red]),
        (f"{escaped} ", [red]),
        (str(red), [red]),
        (str(blue), [blue]),
        (f"'{red}' \"{blue}\"", [red, blue]),
        (f"{escaped} \"{blue}\" '{red}'", [red, blue, red]),
        (f"What is {escaped}", []),
        (f"{escaped} shows what?", []),
        (f"{escaped} {tmp_path / 'none.png'}", []),
        (str(tmp_path / "notes.txt"), []),
        (str(tmp_path), []),
        (f"'{red}", []),
        ("a.png\0.png", []),
        ("/" + 5000 * "a" + ".png", []),
        ("", []),
    ):
        assert dragged(line) == found, line


async def test_a_chat_sends_and_saves_images_dragged_into_the_terminal_also_when_the_question_is_retried(
    worker: LocalWorker, files: tuple[Path, Path], tmp_path: Path
) -> None:
    red, blue = files
    (wrong := tmp_path / "wrong.png").write_text("no picture")
    saved = tmp_path / "talk.md"
    lines = [
        "First?",
        quote(str(blue)),
        str(wrong),
        quote(str(red)),
        "Second?",
        "Third?",
        "/rewind",
        "/retry",
    ]
    done = await run("chat", worker, "--image", red, text="\n".join([*lines, f"/save {saved}", ""]))
    assert done.returncode == 0, done.stderr
    assert "Images for the next question: 2" in done.stderr
    assert "wrong.png: the image is of no known format" in done.stderr
    assert await questions(worker.client) == [
        (part(RED), text("First?")),
        (part(BLUE), part(RED), text("Second?")),
    ]
    names = {one: f"talk-images/{digest(one)[:16]}.png" for one in (RED, BLUE)}
    assert f"![]({names[BLUE]})\n\n![]({names[RED]})\n\n> Second?\n\n" in saved.read_text()
    assert all((tmp_path / name).read_bytes() == file for file, name in names.items())
