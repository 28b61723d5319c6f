"""The files of ops/deploy: validators check them, and their services run here as plain processes."""

import asyncio
import json
import os
import plistlib
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from packaging.requirements import Requirement

from ops import units
from ops.nats.tenants import main as tenants
from tests.commands.command_runs import environment
from tests.parts import free_port, nats_server_program
from turnkeep_client.client import connect

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "ops" / "deploy"
MANIFEST = (DEPLOY / "kubernetes.yaml").read_text()
TOOLS = ROOT / ".venv" / "tools" / "bin"


def check(program: str, *arguments: object, cwd: Path = DEPLOY, **env: str) -> None:
    """Run a validator; skip the test if it is not installed (by `make tools` or the system)."""
    path = shutil.which(program, path=os.pathsep.join([str(TOOLS), os.environ["PATH"]]))
    if path is None:
        pytest.skip(f"{program} is not installed")
    command = [path, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def documents(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((DEPLOY / name).read_text()) if one]


def services() -> dict[str, Any]:
    return dict(documents("compose.yaml")[0]["services"])


def test_hadolint_finds_no_fault_in_the_dockerfile() -> None:
    check("hadolint", "Dockerfile")


def test_the_compose_file_is_valid_under_its_schema() -> None:
    check("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml")


def test_the_kubernetes_manifests_are_valid_under_the_kubernetes_schemas() -> None:
    check("kubernetes-validate", "--strict", "kubernetes.yaml")


@pytest.mark.parametrize("unit", sorted(path.name for path in DEPLOY.glob("*.service")))
def test_systemd_analyze_accepts_each_committed_unit_file(unit: str, tmp_path: Path) -> None:
    """This Python stands for the installed program in the files."""
    text = (DEPLOY / unit).read_text()
    (tmp_path / unit).write_text(text.replace("/opt/turnkeep/bin/turnkeep", sys.executable))
    check("systemd-analyze", "verify", "--man=no", f"./{unit}", cwd=tmp_path)


def test_systemd_analyze_accepts_the_generated_user_unit(tmp_path: Path) -> None:
    (tmp_path / "turnkeep.service").write_text(
        units.unit([sys.executable, "serve", "--config", "/a b/c%d.toml"])
    )
    verify = ("--user", "verify", "--man=no", "./turnkeep.service")
    check("systemd-analyze", *verify, cwd=tmp_path, XDG_RUNTIME_DIR=str(tmp_path))


def test_the_committed_systemd_and_launchd_files_equal_the_generated_ones() -> None:
    """`python -m ops.units` writes these files."""
    assert {path: path.read_bytes() for path in units.example_files()} == units.example_files()


def test_the_launchd_plist_has_only_known_keys_with_values_of_the_right_type() -> None:
    agent = plistlib.loads((DEPLOY / "turnkeep.plist").read_bytes())
    times = {"ThrottleInterval", "ExitTimeOut"}
    flags = {"RunAtLoad"}
    texts = {"Label", "WorkingDirectory", "ProcessType", "StandardErrorPath"}
    assert set(agent) == times | flags | texts | {"ProgramArguments", "EnvironmentVariables", "KeepAlive"}
    assert {type(agent[name]) for name in times} == {int}
    assert {type(agent[name]) for name in flags} == {bool}
    assert agent["ProgramArguments"][1:] == ["serve", "--config", "/opt/turnkeep/turnkeep.toml"]


def test_the_lock_files_contain_all_packages_that_container_images_extras_and_build_need() -> None:
    """dev.lock has all packages that the Dockerfile selects from it; with base.lock, none is missing."""
    (names,) = re.findall(r"\^\(([a-z0-9|-]+)\)==", (DEPLOY / "Dockerfile").read_text())
    lock = (ROOT / "requirements" / "dev.lock").read_text()
    assert set(names.split("|")) <= set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    base = (ROOT / "requirements" / "base.lock").read_text()
    there = set(names.split("|")) | set(re.findall(r"^([a-z0-9-]+)==", base, re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {
        "hatchling",
        *(
            Requirement(row).name
            for row in (*extras["ops"], *extras["traces"], *extras["encryption"], *extras["gateway"])
        ),
    }
    for name in set(wanted):
        needed = [Requirement(row) for row in requires(name) or ()]
        wanted |= {one.name for one in needed if not one.marker or one.marker.evaluate({"extra": ""})}
    assert {name.replace("_", "-").lower() for name in wanted} <= there


def test_every_file_that_the_compose_file_mounts_exists() -> None:
    mounted = [volume for one in services().values() for volume in one.get("volumes", ())]
    files = [volume.split(":")[0] for volume in mounted if volume.startswith(".")]
    assert files
    assert [file for file in files if not (DEPLOY / file).is_file()] == []


@pytest.mark.parametrize("source", ["docs/operating.md", "ops/deploy/prometheus.yml"])
def test_promtool_accepts_each_prometheus_configuration(tmp_path: Path, source: str) -> None:
    text = (ROOT / source).read_text()
    if source.endswith(".md"):
        (text,) = re.findall(r"```yaml\n(rule_files:.*?)```", text, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(ROOT / "ops" / "prometheus" / "alerts.yml", tmp_path)
    check("promtool", "check", "config", "prometheus.yml", cwd=tmp_path)


def test_turnkeep_containers_run_as_non_root_with_a_read_only_file_system() -> None:
    assert re.findall(r"^USER (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE) == ["10001:10001"]
    ours = [one for one in services().values() if one["image"] == "turnkeep"]
    assert len(ours) == 9
    assert all(one["read_only"] and one["cap_drop"] == ["ALL"] for one in ours)
    specs = [one.get("spec", {}) for one in documents("kubernetes.yaml")]
    pods = [spec["template"]["spec"] for spec in specs if "template" in spec]
    assert len(pods) == 4
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]


class Here:
    """Runs the commands of containers as processes, with folders below `tmp_path` and free local ports."""

    def __init__(self, tmp_path: Path, model: Path) -> None:
        self._ports = {port: free_port() for port in (4222, 8080, 8222, 9422, 9424)}
        self._folders = {path: tmp_path / path.strip("/").replace("/", "-") for path in FOLDERS}
        for folder in self._folders.values():
            folder.mkdir()
        self._model = model
        self._started: list[subprocess.Popen[bytes]] = []

    def text(self, value: str) -> str:
        # All ports at once, before folders: what replaces one may spell another.
        value = re.sub("|".join(map(str, self._ports)), lambda at: str(self._ports[int(at[0])]), value)
        for path, folder in self._folders.items():
            value = value.replace(path, str(folder))
        return value.replace("//nats:", "//127.0.0.1:").replace("0.0.0.0", "127.0.0.1")

    def command(self, service: dict[str, Any], words: list[str]) -> tuple[list[str], dict[str, str]]:
        program, *rest = map(self.text, words)
        programs = {
            "python": [sys.executable],
            "turnkeep": [sys.executable, "-m", "commands"],
            "cp": ["cp"],
            "nats-server": [nats_server_program(), "-p", self.text("4222")],  # else the file's
        }
        settings = {name: self.text(value) for name, value in service.get("environment", {}).items()}
        name = settings.get("TURNKEEP_WORKER", "")
        settings["TURNKEEP_HEALTH"] = "off" if name == "two" else self.text("127.0.0.1:9424")  # the image's
        settings["TURNKEEP_DATA_DIR"] = self.text(f"/var/lib/turnkeep/{name}")  # each has a volume
        settings["TURNKEEP_MODEL"] = str(self._model)
        path = os.pathsep.join([str(ROOT), str(ROOT / "protocol")])
        return [*programs[program], *rest], environment() | settings | {"PYTHONPATH": path}

    def run(self, service: dict[str, Any], words: list[str]) -> subprocess.CompletedProcess[str]:
        command, env = self.command(service, words)
        return subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60)

    def start(self, service: dict[str, Any]) -> None:
        command, env = self.command(service, service["command"])
        folder = self.text(service.get("working_dir", "/var/lib/turnkeep"))
        self._started.append(subprocess.Popen(command, env=env, cwd=folder, stderr=subprocess.DEVNULL))

    def wait_for(self, service: dict[str, Any], words: list[str]) -> None:
        """Run a service's health check until it succeeds."""
        deadline = time.monotonic() + 60
        while (done := self.run(service, words)).returncode:
            assert time.monotonic() < deadline, done.stdout + done.stderr

    def stop(self) -> list[int]:
        codes = []
        while self._started:
            self._started[-1].terminate()
            codes.append(self._started.pop().wait(60))
        return codes


FOLDERS = ("/etc/nats", "/var/lib/nats", "/var/lib/turnkeep", "/var/lib/kv")


@pytest.fixture
def here(tmp_path: Path, tiny_model: Path) -> Iterator[Here]:
    here = Here(tmp_path, tiny_model)
    yield here
    here.stop()


def test_gateway_and_exporter_containers_do_not_mount_the_workers_secret_key() -> None:
    ours = {name: one for name, one in services().items() if one["image"] == "turnkeep"}
    seen = {name for name, one in ours.items() if any("accounts:" in volume for volume in one["volumes"])}
    assert seen == {"accounts", "nats", "mirrors", "seed", "gateway-seed", "worker", "worker-two"}
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in documents("kubernetes.yaml")
        if "template" in one.get("spec", {})
    }
    assert {name for name, pod in pods.items() if "worker.nk" in json.dumps(pod)} == {"turnkeep"}


def test_the_kubernetes_probes_of_the_worker_use_its_health_port_and_paths() -> None:
    (worker,) = (
        pod["spec"]["template"]["spec"]["containers"][0]
        for pod in documents("kubernetes.yaml")
        if pod["kind"] == "StatefulSet" and pod["metadata"]["name"] == "turnkeep"
    )
    settings = {one["name"]: one.get("value") for one in worker["env"]}
    assert settings["TURNKEEP_HEALTH"] == "0.0.0.0:9424"
    assert worker["ports"] == [{"name": "health", "containerPort": 9424}]
    probes = {kind: worker[f"{kind}Probe"]["httpGet"] for kind in ("readiness", "liveness")}
    assert probes == {
        "readiness": {"path": "/readyz", "port": "health"},
        "liveness": {"path": "/livez", "port": "health"},
    }


@pytest.mark.process
async def test_all_services_of_the_compose_file_become_healthy_and_answer_a_tenant(here: Here) -> None:
    def checked(service: dict[str, Any]) -> list[str]:
        return list(service["healthcheck"]["test"][1:])

    def serve() -> None:
        of = services()
        assert here.run(of["accounts"], of["accounts"]["command"]).returncode == 0
        here.start(of["nats"])
        here.wait_for(of["nats"], checked(of["nats"]))
        made = here.run(of["mirrors"], of["mirrors"]["command"])
        assert made.returncode == 0, made.stderr
        here.start(of["worker"])
        image = (DEPLOY / "Dockerfile").read_text()
        (words,) = re.findall(r"HEALTHCHECK .*\\\n +CMD (\[.*\])", image)
        assert "TURNKEEP_HEALTH=127.0.0.1:9424 " in image
        here.wait_for(of["worker"], yaml.safe_load(words))
        here.start(of["worker-two"])
        assert here.run(of["gateway-seed"], of["gateway-seed"]["command"]).returncode == 0
        here.start(of["gateway"])
        here.wait_for(of["gateway"], checked(of["gateway"]))
        assert here.run(of["seed"], of["seed"]["command"]).returncode == 0
        here.start(of["exporter"])
        here.wait_for(of["exporter"], checked(of["exporter"]))

    await asyncio.to_thread(serve)
    seed = here.text("/etc/nats/default.client.nk")
    async with connect(here.text("nats://nats:4222"), nkeys_seed=seed) as client:
        appended = await client.session("s1").append(text="hello")
    assert appended.position == 5
    question = {"model": "any", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
    asked = urllib.request.Request(
        here.text("http://127.0.0.1:8080/v1/chat/completions"),
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    answered = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(asked, timeout=60)))
    assert answered["usage"]["completion_tokens"] > 0
    page = here.text("http://127.0.0.1:9422/metrics")
    async with asyncio.timeout(30):
        shown = ""
        while set(re.findall(r'^turnkeep_up\{.*worker="(\w+)".* 1\.0$', shown, re.MULTILINE)) != {
            "one",
            "two",
        }:
            shown = await asyncio.to_thread(lambda: urllib.request.urlopen(page, timeout=5).read().decode())
    assert "\nturnkeep_consumer_pending 0.0\n" in shown
    assert await asyncio.to_thread(here.stop) == [143, 143, 0, 0, 0]


def test_the_nats_server_accepts_the_configuration_that_the_kubernetes_manifest_generates(
    tmp_path: Path,
) -> None:
    """`nats-server -t` only checks the configuration; tests/ops/test_cluster.py runs three such nodes."""
    (line,) = re.findall(
        r"^#   python -m ops\.nats\.tenants (nats default --cluster \S+)", MANIFEST, re.MULTILINE
    )
    folder, *arguments = line.split()
    done = CliRunner().invoke(tenants, [str(tmp_path / folder), *arguments])
    assert done.exit_code == 0, done.output
    (nodes,) = (
        one["spec"]
        for one in documents("kubernetes.yaml")
        if one["kind"] == "StatefulSet" and one["metadata"]["name"] == "nats"
    )
    hosts = [f"nats-{n}.{nodes['serviceName']}" for n in range(nodes["replicas"])]
    routes = (tmp_path / folder / "routes.conf").read_text()
    assert re.findall(r"@([\w.-]+):6222", routes) == hosts
    pod = nodes["template"]["spec"]
    (settings,) = (one["secret"] for one in pod["volumes"] if one["name"] == "settings")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for item in settings["items"]:
        shutil.copy(tmp_path / folder / item["key"], mounted / item["path"])
    (container,) = pod["containers"]
    program, *options = container["command"]
    store = re.findall(r"store_dir: (\w+)", (mounted / "cluster.conf").read_text())
    assert {one["mountPath"] for one in container["volumeMounts"]} >= {
        f"{container['workingDir']}/{store[0]}"
    }
    assert program == "nats-server"
    values = {"/etc/nats": str(mounted), "$(POD_NAME)": "nats-0"}
    for name, value in values.items():
        options = [option.replace(name, value) for option in options]
    checked = subprocess.run(
        [nats_server_program(), "-t", *options], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
