"""Models are downloaded from the hub completely or not at all; a fake hub serves them here."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from fake_hub import ID, FakeHub
from gguf import GGMLQuantizationType as Kind
from tiny_gguf import TinyLlama

from tests.parts import free_port
from worker.models import catalog, hub, model
from worker.models.model_files import Hold, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable


#: Resolves the default model as if its package were not installed, and prints the progress reports.
RESOLVE = """
import json, sys
from pathlib import Path
from worker.models import model
model.packaged_gguf = lambda: None
reports = []
try:
    tell = lambda *report: reports.append(report)
    folder = model.resolve(None, Path(sys.argv[1]), dtype="keep", progress=tell)
    model.check_folder(folder)
    print(json.dumps({"reports": reports}))
except model.ModelError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture
def resolved(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Resolve the default model in a new process, to which environment variables give the hub's address."""

    def resolve(endpoint: str, **more: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE, str(tmp_path)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), **more},
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return resolve


def refused(spec: str, dtype: str = "keep") -> str:
    with pytest.raises(ModelError) as caught:
        hub.fetch(spec, dtype=dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(data_dir: Path) -> list[str]:
    return [entry.name for entry in catalog.list_models(data_dir) if entry.origin != "packaged"]


def test_the_default_model_is_downloaded_once_with_progress_and_afterwards_found_offline(
    server: FakeHub, resolved: Callable[..., dict[str, Any]], tiny_model: Path
) -> None:
    reports = resolved(server.url)["reports"]
    assert {what for _, _, what in reports} == {f"downloading {model.DEFAULT_ID}"}
    size = sum(path.stat().st_size for path in tiny_model.iterdir())
    assert reports[-1][:2] == [size, size]
    assert resolved(f"http://127.0.0.1:{free_port()}") == {"reports": []}


@pytest.mark.parametrize("offline", [False, True])
def test_an_unreachable_hub_raises_an_error_with_the_command_that_installs_a_model(
    resolved: Callable[..., dict[str, Any]], offline: bool
) -> None:
    error = resolved(f"http://127.0.0.1:{free_port()}", HF_HUB_OFFLINE=str(int(offline)))["error"]
    why = "while HF_HUB_OFFLINE is set" if offline else "at http://127.0.0.1:"
    assert error.startswith(
        f"there is no model yet: {model.DEFAULT_ID} is not in the hub's cache and the hub cannot be reached"
        f" {why}"
    )
    assert error.endswith(
        f"; install one from the package index with {model.INSTALL_DEFAULT}, or give a model folder or a"
        " .gguf file with --model"
    )


def size_of(path: Path) -> int:
    """Return a file's size; 0 if it has just been renamed."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def test_a_model_download_killed_halfway_resumes_at_the_byte_where_the_download_stopped(
    server: FakeHub, tmp_path: Path
) -> None:
    server.cuts, server.stalled = [50_000], threading.Event()
    command = [sys.executable, "-m", "commands", "model", "pull", ID, "--data-dir", str(tmp_path)]
    environ = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path)}
    with subprocess.Popen([*command, "--dtype", "keep"], env=environ) as first:
        deadline = time.monotonic() + 60
        while 50_000 not in map(size_of, tmp_path.rglob("*.part")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        first.kill()
    server.stalled.set()
    assert not [*tmp_path.rglob("snapshots")], "what is not whole is not in use"
    server.asked.clear()
    second = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert server.asked == [("model.safetensors", "bytes=50000-")]
    assert second.stderr == f"downloading {ID}\n"
    assert model.load(Path(second.stdout.strip()), dtype="keep").name == ID


def test_a_model_download_reconnects_after_a_broken_connection_and_resumes_at_the_same_byte(
    server: FakeHub, cache: Path
) -> None:
    server.cuts = [20_000, 30_000]
    server.about[ID] = {"id": "org/now-named-so"}
    reports: list[tuple[int, int, str]] = []
    folder = hub.fetch(ID, lambda *report: reports.append(report))
    ranges = [asked for name, asked in server.asked if name == "model.safetensors"]
    assert ranges == [None, "bytes=20000-", "bytes=50000-"]
    assert reports[-1][0] == reports[-1][1] == sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_downloaded_model_file_with_a_wrong_checksum_is_refused_and_can_be_downloaded_again(
    server: FakeHub, cache: Path, tmp_path: Path, name: str
) -> None:
    server.broken = {name}
    assert f"{name} from {server.url}/{ID} is broken: its checksum is not the hub's" in refused(ID)
    assert names(tmp_path) == []
    server.broken = set()
    assert hub.fetch(ID).joinpath(name).read_bytes() == server.repositories[ID][name]
    assert names(tmp_path) == [ID]


def test_a_second_download_of_a_complete_model_transfers_no_file(server: FakeHub, cache: Path) -> None:
    hub.fetch(ID)
    server.asked.clear()
    hub.fetch(ID)
    assert server.asked == []
    assert catalog.find(ID, cache) == hub.downloaded(f"hf.co/{ID}")


def test_of_the_subfolders_of_a_hub_model_only_those_for_pooling_and_scoring_are_downloaded(
    server: FakeHub, cache: Path, embedding_model: Path
) -> None:
    """Without these folders, a model with mean pooling would use the last token's vector instead."""
    server.add(ID, embedding_model)
    server.repositories[ID] |= {"1_LogitScore/config.json": b"{}", "2_Dense/config.json": b"{}"}
    folder = hub.fetch(ID)
    assert {path.parent.name for path in folder.glob("*/*")} == {"1_Pooling", "1_LogitScore"}
    assert hub.downloaded(ID) == folder


def test_a_model_too_large_for_disk_or_memory_is_refused_before_the_download(
    server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.claimed = {"model.safetensors": 10**15}
    assert "org/tiny needs 931322.6 GiB in " in refused(ID)
    server.claimed = {}
    there = psutil.virtual_memory()
    weights = len(server.repositories[ID]["model.safetensors"])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there._replace(total=2 * weights - 1))
    config = json.loads(server.repositories[ID]["config.json"]) | {"dtype": "float16"}
    server.repositories[ID]["config.json"] = json.dumps(config).encode()
    assert "of memory for its weights, and this machine has" in refused(ID, "float32")
    assert "model.safetensors" not in dict(server.asked)
    hub.fetch(ID, dtype="float16")


def test_gguf_files_of_a_hub_repository_are_downloaded_listed_and_removed_by_quantisation(
    server: FakeHub, cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ggufs"
    folder.mkdir()
    for kind in (Kind.Q8_0, Kind.F16):
        TinyLlama(kind=kind).write(folder / f"tiny-{kind.name}.gguf")
    for name in ("mmproj-Q4_K_M.gguf", "a.mmproj-F16.gguf", "tiny-mmproj-BF16.gguf"):
        (folder / name).write_bytes(b"what images become for another program")
    server.add("org/tiny-GGUF", folder)
    assert refused("org/tiny-GGUF") == (
        "org/tiny-GGUF has no GGUF file Q4_K_M; it has F16, Q8_0: name one as org/tiny-GGUF:QUANTISATION"
    )
    found = hub.fetch("hf.co/org/tiny-GGUF:q8_0")
    assert found.name == "tiny-Q8_0.gguf"
    assert [name for name, _ in server.asked] == [found.name]
    entry = catalog.named("tiny-GGUF:Q8_0", tmp_path)
    assert (entry.name, entry.origin, entry.dtype, entry.context_tokens) == (
        "org/tiny-GGUF:Q8_0",
        "hub",
        "Q8_0",
        512,
    )
    made = model.resolve("org/tiny-GGUF:Q8_0", tmp_path, dtype="float32")
    assert catalog.named("org/tiny-GGUF", tmp_path).conversions == (made,)
    hub.fetch("org/tiny-GGUF:F16")
    found.with_name("._tiny-F16.gguf").write_bytes(b"macOS writes such files on disks of other systems")
    assert names(tmp_path) == ["org/tiny-GGUF:F16", "org/tiny-GGUF:Q8_0"]
    catalog.remove(catalog.located("org/tiny-GGUF:Q8_0", tmp_path), tmp_path)
    assert not made.exists()
    assert names(tmp_path) == ["org/tiny-GGUF:F16"]
    catalog.remove(catalog.located("org/tiny-GGUF:F16", tmp_path), tmp_path)
    assert not [path for path in cache.glob("**/*") if path.is_file() and path.stat().st_size > 1000]


def test_removing_a_gguf_file_keeps_the_conversion_of_another_gguf_file_with_the_same_name(
    server: FakeHub, cache: Path, tmp_path: Path
) -> None:
    made = []
    for number, org in enumerate(("one", "two")):
        (folder := tmp_path / org).mkdir()
        TinyLlama().but(general__author=org).write(folder / "tiny-F32.gguf")
        server.add(f"{org}/tiny-GGUF", folder)
        made.append(model.resolve(f"{org}/tiny-GGUF:F32", tmp_path, dtype="float32"))
        assert catalog.named(f"{org}/tiny-GGUF:F32", tmp_path).conversions == (made[number],)
    with contextlib.closing(Hold(made[1])):
        catalog.remove(catalog.located("one/tiny-GGUF:F32", tmp_path), tmp_path)
    assert [path.exists() for path in made] == [False, True]


def test_removing_the_only_gguf_file_of_a_hub_repository_keeps_its_other_weights(
    server: FakeHub, cache: Path, tmp_path: Path
) -> None:
    (folder := tmp_path / "both").mkdir()
    TinyLlama().write(folder / "tiny-F32.gguf")
    server.add("org/both", folder)
    path = hub.fetch("org/both:F32")
    (other := path.with_name("model.safetensors")).write_bytes(b"weights")
    catalog.remove(catalog.located("org/both:F32", tmp_path), tmp_path)
    assert (path.exists(), other.read_bytes()) == (False, b"weights")


def test_a_hub_model_of_an_unsupported_kind_or_size_is_refused_before_any_file_is_downloaded(
    server: FakeHub, cache: Path
) -> None:
    server.repositories["org/Phi-9-mini-GGUF"] = {"Phi-9-mini-Q6_K.gguf": b"GGUF"}
    server.about["org/Phi-9-mini-GGUF"] = {"gguf": {"architecture": "phi9", "total": 10}}
    said = refused("org/Phi-9-mini-GGUF:Q6_K")
    assert "has the architecture 'phi9'; GGUF files of the families gemma3, llama, qwen2, qwen3" in said
    assert said.endswith("usually named mlx-community/Phi-9-mini-6bit on the hub")
    server.about["org/Phi-9-mini-GGUF"] = {"gguf": {"architecture": "llama", "total": 10**13}}
    assert "needs 18626.5 GiB of memory" in refused("org/Phi-9-mini-GGUF", "float16")
    server.repositories["org/torch"] = {"pytorch_model.bin": b"", "config.json": b"{}"}
    assert refused("org/torch").endswith("usually named mlx-community/torch-4bit")
    server.repositories["org/forged"] = {"config.json": b"{}", "model.safetensors": b""}
    server.about["org/forged"] = {"siblings": [{"rfilename": "model.safetensors", "blobId": "../../etc"}]}
    assert "no checksum of model.safetensors" in refused("org/forged")
    assert f"{server.url} has no model org/none" in refused("org/none")
    assert server.asked == []


def test_a_downloaded_model_that_a_worker_uses_is_listed_as_in_use_and_cannot_be_removed(
    server: FakeHub, cache: Path, tmp_path: Path
) -> None:
    folder = hub.fetch(ID)
    with contextlib.closing(Hold(folder)):
        assert catalog.named("tiny", tmp_path).in_use
        with pytest.raises(ModelError, match="org/tiny is in use; stop the worker"):
            catalog.remove(catalog.located("tiny", tmp_path), tmp_path)
    freed = catalog.remove(catalog.located(ID, tmp_path), tmp_path)
    assert freed >= sum(map(len, server.repositories[ID].values()))
    assert names(tmp_path) == []
    assert not [*cache.glob("models--org--tiny")]


def test_a_cached_hub_repository_without_a_main_branch_is_loaded_from_its_newest_snapshot(
    tmp_path: Path,
) -> None:
    for name, fetched_s in (("a" * 40, 1), ("c" * 40, 3), ("b" * 40, 2)):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
        os.utime(tmp_path / "snapshots" / name, (fetched_s, fetched_s))
    assert hub.snapshot_folder(tmp_path) == tmp_path / "snapshots" / ("c" * 40)
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_text("b" * 40)
    assert hub.snapshot_folder(tmp_path) == tmp_path / "snapshots" / ("b" * 40)


def test_loading_a_hub_model_that_another_program_downloaded_in_part_downloads_the_missing_files(
    server: FakeHub, cache: Path, tmp_path: Path
) -> None:
    """The hub's library links each file as soon as it has it, and a user may stop it after any."""
    from huggingface_hub import snapshot_download

    snapshot_download(ID, allow_patterns=["config.json", "model.safetensors"])
    server.asked.clear()
    folder = model.resolve(ID, tmp_path, dtype="keep")
    assert model.load(folder, dtype="keep").name == ID
    asked = {name for name, _ in server.asked}
    assert "tokenizer.json" in asked
    assert "model.safetensors" not in asked
    server.asked.clear()
    assert model.resolve(ID, tmp_path, dtype="keep") == folder
    assert server.asked == [], "it is whole now"
