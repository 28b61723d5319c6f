"""Reads a context of the `nats` command line: a JSON file that says how to log in to NATS servers.

`setting_sources` takes the servers from it, `wire.credentials` the rest. No error message has a value of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .setting_kinds import context_folder
from .settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEFAULT_URL: Final = "nats://127.0.0.1:4222"
#: Fields that concern people or other programs.
_IGNORED: Final = frozenset({"name", "description", "color_scheme", "jetstream_event_prefix"})
_TEXTS: Final = ("url", "user", "password", "token")
_FILES: Final = ("creds", "nkey", "cert", "key", "ca")


@dataclass(frozen=True, slots=True)
class NatsContext:
    """The fields of a context that are used and not empty, by their names in the file `path`."""

    path: Path
    texts: Mapping[str, str] = field(repr=False)
    files: Mapping[str, Path]

    @property
    def url(self) -> str:
        """The URLs of the servers."""
        return self.texts.get("url", _DEFAULT_URL)


def read(path: Path) -> NatsContext:
    """Read the context in a file. Relative paths in it start at its folder. Raises `SettingsError`."""
    found = _fields(path)
    unused = [name for name in found.keys() - _IGNORED - {*_TEXTS, *_FILES} if found[name]]
    if unused:
        raise SettingsError(
            f"nats_context: {path} has {', '.join(sorted(unused))}, which is not supported; make a context"
            f" that has only {', '.join((*_TEXTS, *_FILES))}"
        )
    if wrong := [name for name in (*_TEXTS, *_FILES) if not isinstance(found.get(name) or "", str)]:
        raise SettingsError(f"nats_context: {wrong[0]} in {path} is no text; it must be one")
    texts = {name: found[name] for name in _TEXTS if found.get(name)}
    files = {name: path.parent / Path(found[name]).expanduser() for name in _FILES if found.get(name)}
    return NatsContext(path, texts, files)


def _fields(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        if path.parent != context_folder():
            raise SettingsError(f"nats_context: there is no file {path}; name a context, or a file") from None
        known = ", ".join(sorted(one.stem for one in path.parent.glob("*.json"))) or "none"
        raise SettingsError(
            f"nats_context: there is no context {path.stem} in {path.parent}, which has {known};"
            " nats context save makes one"
        ) from None
    except OSError as error:
        raise SettingsError(
            f"nats_context: {path} cannot be read: {error.strerror}; name a file of yours"
        ) from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SettingsError(f"nats_context: {path} is no JSON object; nats context save writes one")
    return found
