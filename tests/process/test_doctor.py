"""`turnkeep doctor` finds what would stop a worker, and says how to fix it."""

import asyncio
import dataclasses
import errno
import json
import os
import re
import shutil
import socket
from pathlib import Path

import nats
import pytest
from click.testing import CliRunner
from nats.aio.client import Client, ServerVersion

import commands.checks
from commands.checks import Diagnosis, checks, exit_code
from commands.cli import main
from commands.ports import Beside
from tests.commands.command_runs import turnkeep
from tests.model.tiny_gguf import TinyLlama
from turnkeep_client.subjects import Subjects
from worker.cluster.liveness import Members
from worker.process.datadir import DataDir
from worker.process.limits import limits_of
from worker.process.setting_kinds import Endpoint


async def examine(settings):
    return {check.name: check for check in await asyncio.to_thread(checks, settings)}


@pytest.fixture
def small(settings):
    """Return settings that need so little disk that any machine has it."""
    return dataclasses.replace(settings, max_disk=2**20, min_free_disk=0)


async def test_the_command_doctor_passes_every_check_on_a_machine_without_faults(small):
    found = await examine(small)
    assert list(found) == [
        "Python",
        "MLX",
        "BLAS",
        "memory",
        "data directory",
        "disk",
        "NATS",
        "port",
        "model",
    ]
    assert {check.name for check in found.values() if check.state == "fail"} == set()
    assert exit_code(found.values()) == 0
    assert found["MLX"].found.split(" on ")[1] in ("cpu", "metal", "cuda")
    assert str(small.nats_port) in found["port"].found


async def test_the_command_doctor_reports_no_fault_while_the_worker_of_the_data_directory_runs(
    server, small, directory
):
    await server.start()
    found = await examine(small)
    assert "in use by worker test" in found["data directory"].found
    assert found["port"] == Diagnosis(
        "port", "ok", f"{small.nats_port} is held by this data directory's own server"
    )


async def test_the_command_doctor_checks_the_nats_server_of_the_worker_that_runs_on_the_data_directory(
    foreign_server, small, tmp_path
):
    other = dataclasses.replace(small, nats_port=1)
    with DataDir.open(small.data_dir, "test", small.nats_port):
        assert (await examine(other))["port"].found == f"{small.nats_port} is free"
    assert (await examine(other))["port"].found != f"{small.nats_port} is free", "no worker runs now"
    url = await foreign_server(jetstream={"store_dir": str(tmp_path / "js")}, max_payload=2**21)
    with DataDir.open(small.data_dir, "test", url):
        found = await examine(other)
    assert "answers" in found["NATS"].found
    assert "port" not in found


async def test_the_command_doctor_fails_with_advice_if_another_nats_server_holds_the_port(
    foreign_server, small
):
    await foreign_server(server_name="stranger")
    found = await examine(small)
    assert re.fullmatch(r"nats-server \d+\.\d+\.\d+", found["NATS"].found)
    assert (found["port"].state, found["port"].found) == ("fail", f"{found['NATS'].found}, named stranger")
    assert "--nats-port" in found["port"].mend


async def test_the_command_doctor_says_that_another_worker_holds_the_nats_port(server, small, tmp_path):
    await server.start()
    other = dataclasses.replace(small, data_dir=tmp_path / "other")
    port = (await examine(other))["port"]
    assert (port.state, port.found) == ("fail", "the NATS server of another Turnkeep worker")
    assert port.missing == f"port {small.nats_port} of 127.0.0.1 is taken by it"
    assert port.mend.startswith("choose another with --nats-port, or, ")
    serve = ("serve", "--data-dir", other.data_dir, "--nats-port", small.nats_port)
    done = await asyncio.to_thread(turnkeep, *serve)
    assert done.stderr.endswith(f" is taken by another program; {port.mend}\n")


@pytest.mark.parametrize("option", ["--gateway", "--console", "--health", "--nats-websocket"])
def test_the_command_doctor_fails_and_names_the_option_of_a_port_that_another_program_holds(small, option):
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = Endpoint(*other.getsockname())
        changed = {"--health": {"health": at}, "--nats-websocket": {"nats_websocket": at.port}}
        beside = {"--gateway": Beside(gateway=at.port), "--console": Beside(console=at.port)}
        settings = dataclasses.replace(small, **changed.get(option, {}))
        found = {check.name: check for check in checks(settings, beside=beside.get(option))}
        with DataDir.open(small.data_dir, "test"):
            running = checks(settings, beside=beside.get(option))
    assert found[option] == Diagnosis(
        option,
        "fail",
        "",
        f"port {at.port} of 127.0.0.1 is taken by another program",
        f"choose another with {option}",
    )
    assert option not in {check.name for check in running}, "a worker that runs has its ports"


async def test_the_command_doctor_fails_with_advice_for_a_remote_nats_server_without_jetstream(
    foreign_server, small
):
    found = await examine(dataclasses.replace(small, nats=await foreign_server()))
    assert found["NATS"].state == "fail"
    assert "nats-server -js" in found["NATS"].mend
    assert "port" not in found
    assert exit_code(found.values()) == 1


async def test_the_command_doctor_without_credentials_says_that_a_secured_nats_server_wants_some(
    foreign_server, small
):
    url = await foreign_server(authorization={"users": [{"user": "w", "password": "p"}]})
    found = await examine(dataclasses.replace(small, nats=url))
    assert found["NATS"].state == "fail"
    assert "refuses the credentials, or wants some" in found["NATS"].missing


async def test_the_command_doctor_fails_for_a_too_old_nats_server_with_the_same_error_as_a_worker_start(
    foreign_server, small, tmp_path, monkeypatch
):
    """It would end the start later, with an error of a request that it does not know."""
    url = await foreign_server(jetstream={"store_dir": str(tmp_path / "js")})
    monkeypatch.setattr(Client, "connected_server_version", ServerVersion("2.10.25"))
    found = (await examine(dataclasses.replace(small, nats=url)))["NATS"]
    assert (found.state, found.mend) == ("fail", "install 2.15.0 or newer")
    assert found.missing.startswith(f"nats-server 2.10.25 at {url} is too old")
    monkeypatch.setattr(Client, "connected_server_version", ServerVersion("2.11.0"))
    assert (await examine(dataclasses.replace(small, nats=url)))["NATS"].state == "warn"


async def test_the_command_doctor_fails_if_a_remote_server_has_a_worker_of_the_same_name_and_another_data_dir(
    foreign_server, small, tmp_path
):
    url = await foreign_server(jetstream={"store_dir": str(tmp_path / "js")}, max_payload=2**21)
    client = await nats.connect(url)
    subjects = Subjects(small.prefix)
    elsewhere = Members(client, subjects, worker="test", directory="elsewhere", lost=print)
    await elsewhere.join()
    keeping = asyncio.create_task(elsewhere.keep())
    remote = dataclasses.replace(small, nats=url, worker="test")
    found = (await examine(remote))["worker name"]
    assert found.state == "fail"
    assert found.missing.startswith("worker 'test' (pid ")
    assert "under the same name" in found.missing
    assert found.mend == "stop it, or choose another --worker name"
    assert "worker name" not in await examine(dataclasses.replace(remote, worker="other"))
    keeping.cancel()
    with DataDir.open(small.data_dir, "test") as directory:
        own = Members(client, subjects, worker="own", directory=directory.name, lost=print)
        await own.join()
        keeping = asyncio.create_task(own.keep())
        assert "worker name" not in await examine(dataclasses.replace(remote, worker="own"))
        keeping.cancel()
    await client.close()


async def test_the_command_doctor_warns_of_a_nats_server_version_that_can_lose_entries(
    foreign_server, small, tmp_path, monkeypatch
):
    url = await foreign_server(jetstream={"store_dir": str(tmp_path / "js")}, max_payload=2**21)
    found = (await examine(dataclasses.replace(small, nats=url)))["NATS"]
    assert found.state == "ok"
    assert re.fullmatch(r"nats-server \d+\.\d+\.\d+ answers, JetStream is enabled", found.found)
    monkeypatch.setattr(Client, "connected_server_version", ServerVersion("2.14.5"))
    found = (await examine(dataclasses.replace(small, nats=url)))["NATS"]
    assert (found.state, found.found) == ("warn", "nats-server 2.14.5")
    assert "#8475" in found.missing
    assert found.mend.startswith("install 2.12.16, 2.14.6, 2.15.0 or newer")


async def test_the_command_doctor_fails_with_advice_if_the_data_directory_is_a_file(small, tmp_path):
    (tmp_path / "file").write_text("")
    found = await examine(dataclasses.replace(small, data_dir=tmp_path / "file"))
    assert found["data directory"].state == "fail"
    assert "there is a file in its place" in found["data directory"].missing
    assert "--data-dir" in found["data directory"].mend


def test_the_command_doctor_fails_for_a_remote_tier_that_would_end_the_start_of_a_worker(tmp_path):
    (tmp_path / "file").touch()
    words = ["doctor", "--data-dir", str(tmp_path / "data"), "--remote-tier", str(tmp_path / "file")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert f"remote_tier: {tmp_path}/file cannot be used" in done.output


def test_the_command_doctor_warns_of_little_disk_space_and_fails_with_almost_none(
    mounted, settings, monkeypatch
):
    folder = mounted("size=8m")
    assert commands.checks._disk(dataclasses.replace(settings, data_dir=folder))[1].state == "fail"
    monkeypatch.setattr(commands.checks, "_MIN_FREE_BYTES", 2**20)
    disk = commands.checks._disk(dataclasses.replace(settings, data_dir=folder))[1]
    assert disk.state == "warn"
    assert "--max-disk" in disk.mend
    assert "for snapshots (20 GiB) and the log" in disk.missing
    without = commands.checks._disk(dataclasses.replace(settings, data_dir=folder, snapshots="off"))[1]
    assert without.missing == "up to 64 MiB, for the log"


def test_the_command_doctor_reports_a_folder_of_models_that_it_may_not_read(small, monkeypatch):
    def fails(*_: object):
        raise PermissionError(errno.EACCES, "Permission denied", "data/models")

    monkeypatch.setattr("worker.models.catalog.find", fails)
    found = commands.checks._model(dataclasses.replace(small, model="some"), runs=True)
    assert (found.state, found.missing) == ("fail", "data/models: Permission denied")


def test_the_command_doctor_takes_the_disk_limits_of_the_worker_that_runs_on_the_data_directory(small):
    given = dataclasses.replace(small, max_disk=2**60)
    assert "by the limits of" not in commands.checks._disk(given)[1].missing
    with DataDir.open(small.data_dir, "test", limits=limits_of(small)) as directory:
        assert commands.checks._disk(given)[1].state == "ok"
        directory.note_limits(limits_of(given))
        assert f"by the limits of worker test (pid {os.getpid()})" in commands.checks._disk(small)[1].missing
    assert commands.checks._disk(small)[1].state == "ok"


def test_the_command_doctor_reports_an_mlx_that_fails_or_aborts_on_import_as_a_failed_check(monkeypatch):
    monkeypatch.setattr(
        commands.checks, "_ASK_MLX", "raise ImportError('libmlx.so: cannot open shared object file')"
    )
    found = commands.checks._mlx()
    assert found.state == "fail"
    assert "cannot open shared object file" in found.found
    assert "turnkeep[cpu]" in found.mend
    monkeypatch.setattr(commands.checks, "_ASK_MLX", "import os; os.abort()")
    assert commands.checks._mlx().state == "fail"


@pytest.mark.parametrize(
    ("spec", "state", "word"),
    [
        ("no/where/at/all", "fail", "org/name"),
        ("some-org/some-model", "warn", "downloads"),
        ("~nobody-here/model", "fail", "folder"),
        ("./missing", "fail", "folder"),
    ],
)
def test_the_command_doctor_reports_a_model_that_is_not_on_this_machine_with_advice(
    settings, spec, state, word
):
    found = commands.checks._model(dataclasses.replace(settings, model=spec), runs=True)
    assert found.state == state
    assert word in found.mend


@pytest.mark.parametrize("role", ["model", "draft_model"])
async def test_the_command_doctor_hides_the_password_in_the_url_of_a_model(small, role):
    url = "https://user:s3cret@huggingface.co/org/name?sig=s3cret"
    found = await examine(dataclasses.replace(small, **{role: url}))
    check = found[role.replace("_", " ")]
    assert (check.state, check.found) == ("fail", "nothing at https://huggingface.co/org/name?...")
    assert "s3cret" not in str(found)


def test_the_command_doctor_fails_for_truncated_or_incomplete_model_files_with_the_workers_error(
    settings, tiny_model
):
    models = settings.data_dir / "models"
    models.mkdir(parents=True)
    TinyLlama().write(models / "cut.gguf")
    os.truncate(models / "cut.gguf", 5000)
    TinyLlama(architecture="phi9").write(models / "strange.gguf")
    (models / "notes.txt").write_text("no model")
    for name, lacks in (("mute", "tokenizer.json"), ("light", "model.safetensors")):
        (shutil.copytree(tiny_model, models / name) / lacks).unlink()
    for spec, why in [
        ("cut", "truncated"),
        (str(models / "cut.gguf"), "truncated"),
        (str(models / "notes.txt"), "no model at"),
        ("strange", "has the architecture 'phi9'"),
        ("mute", "has no tokenizer.json"),
        (str(models / "light"), "has no model*.safetensors"),
        ("light", "has no model*.safetensors"),
    ]:
        found = commands.checks._model(dataclasses.replace(settings, model=spec), runs=True)
        assert (found.state, why in found.missing) == ("fail", True), found


@pytest.mark.mounts
@pytest.mark.parametrize("is_named", [True, False], ids=["a named model", "the packaged model"])
def test_the_doctor_fails_if_a_gguf_model_to_be_converted_does_not_fit_on_the_disk_of_the_data_directory(
    mounted, settings, tmp_path, monkeypatch, is_named
):
    path, folder = tmp_path / "tiny.gguf", mounted("size=8m")
    TinyLlama().write(path)
    (folder / "filled").write_bytes(bytes(8_300_000))
    monkeypatch.setattr("worker.models.catalog.packaged_gguf", lambda: path)
    there = dataclasses.replace(settings, model=str(path) if is_named else None, data_dir=folder)
    model = commands.checks._model(there, runs=True)
    assert model.state == "fail"
    assert re.search(r"needs [\d.]+ MiB in .*; it has", f"{model.missing}; {model.mend}")
    (folder / "filled").unlink()
    assert commands.checks._model(there, runs=True).state == "ok"


async def test_the_command_doctor_checks_each_of_several_configured_models(small, tmp_path):
    models = {"a": small, "b": dataclasses.replace(small, model=str(tmp_path))}
    found = await asyncio.to_thread(checks, small, models)
    assert [(check.name, check.state) for check in found[-2:]] == [("model a", "ok"), ("model b", "fail")]


@pytest.fixture
def pair(settings, tiny_model, tmp_path):
    """Return settings with a model, and with a draft model that has the same tokens."""
    draft = shutil.copytree(tiny_model, tmp_path / "draft")
    return dataclasses.replace(settings, model=str(tiny_model), draft_model=str(draft))


def draft_of(settings):
    _, draft = commands.checks._models(settings, runs=True)
    return draft


def test_the_command_doctor_checks_the_memory_of_a_draft_model_together_with_its_target_model(pair, tmp_path):
    draft = draft_of(pair)
    assert (draft.name, draft.state) == ("draft model", "ok")
    assert re.fullmatch(r".*/draft; with the model it needs \S+ MiB of \S+ \wiB", draft.found)
    assert draft_of(dataclasses.replace(pair, model=None)).state == "ok"
    assert draft_of(dataclasses.replace(pair, model=None, draft_model="packaged")).state == "ok"
    assert not [*pair.data_dir.glob("models/*")], "no file is converted for the check"
    draft = draft_of(dataclasses.replace(pair, draft_model=str(tmp_path / "missing")))
    assert (draft.name, draft.state) == ("draft model", "fail")
    draft = draft_of(dataclasses.replace(pair, device_memory=2**20))
    assert (draft.state, draft.missing) == ("fail", "memory for both")
    assert "leave draft_model out" in draft.mend


def test_the_command_doctor_fails_for_a_draft_model_with_another_vocabulary(pair):
    path = Path(pair.draft_model) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    names = tokenizer["model"]["vocab"]
    names["A"], names["B"] = names["B"], names["A"]
    path.write_text(json.dumps(tokenizer))
    draft = draft_of(pair)
    assert (draft.state, draft.mend) == ("fail", "take one with the same tokenizer")
    assert "has other tokens than" in draft.missing


def test_the_command_doctor_leaves_the_data_directory_unlocked_after_its_checks(settings):
    commands.checks._disk(settings)
    DataDir.open(settings.data_dir).close()
