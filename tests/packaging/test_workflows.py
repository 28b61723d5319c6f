"""The CI workflows (valid, pinned, with minimal permissions), and the scripts that they call."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TOOLS = ROOT / ".venv" / "tools" / "bin"

each = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text())["jobs"])


def script(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), cwd=ROOT, check=False, capture_output=True, text=True)


def test_every_ci_workflow_is_valid_under_githubs_schema() -> None:
    program = shutil.which("check-jsonschema", path=os.pathsep.join([str(TOOLS), os.environ["PATH"]]))
    if program is None:
        pytest.skip("check-jsonschema is not installed; make tools")
    done = script(program, "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    assert done.returncode == 0, done.stdout


@each
def test_every_github_action_is_pinned_to_a_commit_with_its_version_in_a_comment(path: Path) -> None:
    used = re.findall(r"uses: (.*)$", path.read_text(), re.MULTILINE)
    assert used
    for one in used:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\.github/workflows/\w+\.yml", one), one


def test_a_github_action_is_pinned_to_the_same_commit_in_all_workflows() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    pins = set(re.findall(r"uses: ([\w/-]+)@(.*)$", text, re.MULTILINE))
    assert len(pins) == len({name for name, _ in pins})


@each
def test_all_jobs_of_a_workflow_have_a_timeout_read_only_permissions_and_bash_as_their_shell(
    path: Path,
) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["defaults"] == {"run": {"shell": "bash"}}
    for name, job in jobs(path).items():
        assert "timeout-minutes" in job or "uses" in job, name


@each
def test_no_shell_script_in_a_workflow_step_contains_a_workflow_expression(path: Path) -> None:
    """GitHub replaces an expression before the shell runs, so a branch's name could inject a command."""
    for job in jobs(path).values():
        for step in job.get("steps", ()):
            assert "${{" not in step.get("run", "")


def test_code_from_a_forked_repository_never_runs_on_a_self_hosted_ci_machine() -> None:
    apple = jobs(ROOT / ".github" / "workflows" / "apple.yml")
    own = "github.event.pull_request.head.repo.full_name == github.repository"
    assert own in apple["label"]["if"]
    assert apple["integration"]["needs"] == "label"
    assert "needs.label.outputs.labels, 'apple-silicon'" in apple["integration"]["if"]
    others = [job for path in WORKFLOWS if path.stem != "apple" for job in jobs(path).values()]
    assert {job["runs-on"] for job in others if "uses" not in job} == {"ubuntu-24.04"}


def test_the_paths_that_set_the_pull_request_label_for_apple_silicon_exist() -> None:
    (rule,) = yaml.safe_load((ROOT / ".github" / "labeler.yml").read_text())["apple-silicon"]
    (globs,) = (one["any-glob-to-any-file"] for one in rule["changed-files"])
    for pattern in globs:
        before, _, after = pattern.partition("{")
        words, _, rest = after.partition("}")
        for word in words.split(","):
            assert list(ROOT.glob((before + word + rest).replace("/**", ""))), f"{pattern}: {word}"


def test_the_release_script_refuses_a_tag_that_differs_from_the_version() -> None:
    done = script(".ci/release", "v9.9.9")
    assert done.returncode == 1
    assert done.stderr.startswith("the tag is v9.9.9 and the version ")


def test_the_first_errors_script_prints_the_lint_type_and_test_failures_of_a_ci_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = ["worker/app.py:3:1: F401 unused", "worker/app.py:5: error: no", *["fine"] * 100]
    lines += ["E   assert 1 == 2", "FAILED tests/test_rooms.py::test_a", "= 1 failed, 2 passed in 3.21s ="]
    log.write_text("\n".join(lines) + "\n")
    done = script(".ci/first-errors", log)
    assert done.returncode == 0
    shown = set(done.stdout.splitlines())
    assert shown == {"```", *lines[:2], *lines[-3:]}
