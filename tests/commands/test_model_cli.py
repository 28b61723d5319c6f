"""`turnkeep model`: list, show, pull, convert and remove models."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_runs import command, turnkeep

from tests.parts import WorkerProcess


async def test_model_rm_refuses_to_remove_a_model_that_a_running_worker_serves(
    worker_process: Callable[..., WorkerProcess], tmp_path: Path, tiny_model: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "data" / "models" / "mine")
    worker = worker_process("--model", "mine", model=None)
    worker.start()
    async with await worker.client() as client:
        assert (await client.session("s").append(text="hello")).position > 0

    def run(*arguments: str) -> Any:
        return turnkeep("model", *arguments, "--data-dir", tmp_path / "data")

    assert "\nmine " in run("list").stdout
    listed = {entry["name"]: entry for entry in json.loads(run("list", "--json").stdout)}
    assert listed["mine"]["in_use"]
    refused = run("rm", "mine")
    assert (refused.returncode, refused.stderr) == (
        1,
        "turnkeep: mine is in use; stop the worker that serves it, then remove it\n",
    )
    worker.stop()
    shown = run("show", "mine").stdout
    told = "messages        developer as system; calls as text"
    for line in ("architecture    llama", "parameters      0.0906 million", told, "in use          no"):
        assert f"\n{line}\n" in shown, shown
    assert run("rm", "mine").stdout.startswith("removed mine, which frees ")
    assert "\nmine " not in run("list").stdout
    shutil.copytree(tiny_model, tmp_path / "data" / "models" / "mine")  # the fixture starts it again


async def test_model_list_shows_truncated_models_with_their_faults_and_model_rm_removes_them(
    tmp_path: Path, tiny_model: Path
) -> None:
    """As after a copy or a download by hand that has ended too early."""
    models = tmp_path / "models"
    for name in ("config", "weights", "sound"):
        shutil.copytree(tiny_model, models / name)
    (models / "config" / "config.json").write_text("{")
    with (models / "weights" / "model.safetensors").open("r+b") as weights:
        weights.truncate(1000)

    async def run(*arguments: str) -> Any:
        return await command("model", *arguments, "--data-dir", tmp_path)

    listed = await run("list", "--json")
    assert "sound" in {entry["name"] for entry in json.loads(listed.stdout)}
    told = listed.stderr.splitlines()
    assert [line.split(":")[0] for line in told] == ["config is broken", "weights is broken"], told
    for name in ("config", "weights"):
        assert (await run("rm", name)).stdout.startswith(f"removed {name}, which frees ")
    assert [path.name for path in models.glob("[!.]*")] == ["sound"]


async def test_model_show_prints_how_the_chat_template_of_the_model_treats_messages(
    tmp_path: Path, model_with_template: Callable[[str, str], Path]
) -> None:
    users = "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}"
    said = {}
    for name, template in {"silent": users, "refuses": "{{ raise_exception('no') }}", "broken": "{%"}.items():
        folder = model_with_template(f"shown-{name}", template)
        done = await command("model", "show", folder, "--json", "--data-dir", tmp_path)
        said[name] = json.loads(done.stdout)["messages"]
    assert "system at the head of the first user message" in said["silent"]
    assert (said["refuses"], said["broken"]) == ([], []), "what renders no conversation is not asked"


def test_the_command_pull_refuses_a_name_that_is_not_a_hugging_face_id_and_shows_the_right_form(
    tmp_path: Path,
) -> None:
    done = turnkeep("model", "pull", "qwen3:0.6b", "--data-dir", tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "turnkeep: qwen3:0.6b is no id of the hub; give org/name, or org/name:Q4_K_M for a GGUF file\n"
    )


async def test_the_model_commands_accept_a_unique_part_of_a_model_name_and_refuse_an_ambiguous_one(
    tmp_path: Path, tiny_model: Path
) -> None:
    for name in ("Tiny-4B-4bit", "Tiny-4B-8bit", "Tiny-4B", "Other"):
        shutil.copytree(tiny_model, tmp_path / "models" / name)

    async def run(*arguments: str) -> Any:
        return await command(*arguments, "--data-dir", tmp_path)

    for typed, name in (("oth", "Other"), ("8BIT", "Tiny-4B-8bit"), ("tiny-4b", "Tiny-4B")):
        done = await run("model", "show", typed)
        assert done.stdout.startswith(f"model           {name}\n"), done.stderr
    for words in (("show",), ("rm",), ("path", "--model")):
        done = await run("model", *words, "tiny")
        several = "Tiny-4B, Tiny-4B-4bit, Tiny-4B-8bit"
        assert done.stderr == (f"turnkeep: tiny is a part of several names; give more of one: {several}\n")
        done = await run("model", *words, "toher")
        assert done.stderr == "turnkeep: there is no model toher; did you mean Other?\n"
        done = await run("model", *words, "zzz")
        assert done.stderr.startswith("turnkeep: there is no model zzz; give a model folder")
    assert (await run("model", "path", "--model", "oth")).stdout == f"{tmp_path / 'models' / 'Other'}\n"
    assert (await run("model", "rm", "oth")).stdout.startswith("removed Other, which frees ")
