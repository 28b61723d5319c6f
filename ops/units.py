"""Generates the files by which systemd and launchd run a worker. Pure, except `python -m ops.units`.

`turnkeep service` installs them for a user; `python -m ops.units` writes the examples in ops/deploy.
"""

from __future__ import annotations

import plistlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME: Final = "turnkeep"
FOLDER: Final = Path(__file__).with_name("deploy")

_UNIT: Final = """\
{about}
[Unit]
Description=Turnkeep, an LLM session worker for NATS
{after}StartLimitIntervalSec=0

[Service]
Type=exec
{place}ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
Restart=always
RestartSec=1
# 2: settings, which no restart mends.
RestartPreventExitStatus=2
# The worker's own NATS server is its to stop, after the last turn.
KillMode=mixed
TimeoutStopSec=60
# The worker sizes its KV by what this leaves.
MemoryMax=90%

UMask=0077
NoNewPrivileges=yes
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
SystemCallArchitectures=native
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
{walls}
[Install]
WantedBy={target}
"""

_SYSTEM: Final = {
    "about": """\
# A worker under systemd, installed in /opt/turnkeep; settings in /etc/turnkeep/turnkeep.toml.
#   systemctl enable --now turnkeep
# For OpenAI's and Anthropic's APIs on http://127.0.0.1:8080 append --gateway to ExecStart.
""",
    "after": "Wants=network-online.target\nAfter=network-online.target\n",
    "place": """\
DynamicUser=yes
StateDirectory=turnkeep
StateDirectoryMode=0700
Environment=TURNKEEP_DATA_DIR=%S/turnkeep HOME=%S/turnkeep TURNKEEP_LOG_FORMAT=json
# For a NATS server with users:
#LoadCredential=worker.nk:/etc/turnkeep/worker.nk
#Environment=TURNKEEP_NATS_CREDS=%d/worker.nk
""",
    "walls": """\
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
""",
    "target": "multi-user.target",
}
#: Without sandboxing (`walls`): a user's systemd needs a user namespace to hide parts of the machine.
_USER: Final = {
    "about": "# Written by `turnkeep service install`; `turnkeep service uninstall` removes it.\n",
    "after": "",
    "place": "Environment=TURNKEEP_LOG_FORMAT=json\n",
    "walls": "",
    "target": "default.target",
}
_PLAIN: Final = re.compile(r"[\w./:=@+,-]+")


def unit(command: Sequence[str], *, of_user: bool = True) -> str:
    """Return a systemd unit that runs a worker by `command`: of a user, or else of the system."""
    return _UNIT.format(command=" ".join(map(_quoted, command)), **(_USER if of_user else _SYSTEM))


def command_in(text: str) -> list[str]:
    """Return the words of the command in a unit file that `unit` has made; empty without a command."""
    found = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    words = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', found[1]) if found else []
    return [re.sub(r"\\(.)|%(%)|\$(\$)", r"\1\2\3", quoted) or plain for quoted, plain in words]


def _quoted(word: str) -> str:
    """Quote a word of a command for systemd, which replaces % and $."""
    if _PLAIN.fullmatch(word):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word).replace("%", "%%").replace("$", "$$") + '"'


def agent(command: Sequence[str], folder: Path, log: Path, user: str = "") -> bytes:
    """Return a launchd property list that runs a worker by `command` in `folder`, with stderr added to `log`.

    With a `user` it is for a daemon, which runs as that user from the start of the machine on.
    """
    return plistlib.dumps(
        {
            "Label": NAME,
            **({"UserName": user} if user else {}),
            "ProgramArguments": [*command],
            "WorkingDirectory": str(folder),
            # By the second one a worker knows that it is this service (`worker.process.launchd`).
            "EnvironmentVariables": {"TURNKEEP_LOG_FORMAT": "json", "TURNKEEP_SERVICE_LOG": str(log)},
            "RunAtLoad": True,
            # The worker exits with 0 for wrong settings, which no restart mends.
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": 60,
            "ProcessType": "Interactive",
            "StandardErrorPath": str(log),
        },
        sort_keys=False,
    )


def example_files() -> dict[Path, bytes]:
    """Return the example files in ops/deploy, by path; they run a program that is in /opt/turnkeep."""
    place = Path("/opt/turnkeep")
    serve = [f"{place}/bin/turnkeep", "serve", "--config"]
    system = unit([*serve, "/etc/turnkeep/turnkeep.toml"], of_user=False).encode()
    return {
        FOLDER / "turnkeep.service": system,
        FOLDER / "turnkeep.plist": agent([*serve, f"{place}/turnkeep.toml"], place, place / "worker.log"),
    }


if __name__ == "__main__":
    for path, content in example_files().items():
        path.write_bytes(content)
    sys.exit()
