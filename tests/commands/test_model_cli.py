"""`turnkeep model`: what is here, what it can, and what is in use."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from command_runs import turnkeep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.parts import WorkerProcess


async def test_a_model_is_served_by_name_and_not_removed_meanwhile(
    worker_process: Callable[..., WorkerProcess], tmp_path: Path, tiny_model: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "data" / "models" / "mine")
    worker = worker_process("--model", "mine", model=None)
    worker.start()
    async with await worker.client() as client:
        assert (await client.session("s").append(text="hello")).position > 0

    def run(*arguments: str) -> Any:
        return turnkeep("model", *arguments, "--data-dir", tmp_path / "data")

    listed = {entry["name"]: entry for entry in json.loads(run("list", "--json").stdout)}
    assert listed["mine"]["in_use"]
    refused = run("rm", "mine")
    assert (refused.returncode, refused.stderr) == (
        1,
        "turnkeep: mine is in use; stop the worker that serves it, then remove it\n",
    )
    worker.stop()
    shown = run("show", "mine").stdout
    for line in ("architecture    llama", "parameters      0.0906 million", "in use          no"):
        assert f"\n{line}\n" in shown, shown
    assert run("rm", "mine").stdout.startswith("removed mine, which frees ")
    assert "mine" not in run("list").stdout
    shutil.copytree(tiny_model, tmp_path / "data" / "models" / "mine")  # the fixture starts it again


def test_a_name_that_is_no_hub_id_cannot_be_pulled(tmp_path: Path) -> None:
    done = turnkeep("model", "pull", "qwen3:0.6b", "--data-dir", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("turnkeep: there is no model qwen3:0.6b; give a model folder")
    assert done.stderr.count("\n") == 1
