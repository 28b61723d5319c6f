"""Collects a worker's settings from their sources.

The command line overrides the `TURNKEEP_*` environment, which overrides `turnkeep.toml`, which overrides the
defaults. A table `[models.NAME]` of the file holds settings of one model, which override the file's others.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from turnkeep_client.subjects import DEFAULT_PREFIX, Subjects

from . import nats_context
from .setting_kinds import NATS_URLS, Kind
from .settings import ENV, SHARED, Settings, SettingsError, word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CONFIG_NAME: Final = "turnkeep.toml"
_MODELS: Final = "models"
#: Environment variables that are not settings: of tests, `turnkeep launch`, launchd's service.
_OTHER_ENV: Final = ("TURNKEEP_TEST_", "TURNKEEP_GATEWAY_KEY", "TURNKEEP_SERVICE_LOG")


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_path: Path | None = None,
    cwd: Path | None = None,
    of: str | None = None,
) -> Settings:
    """Collect the settings from all four sources; raises `SettingsError`.

    `flags` maps setting names to values of the command line, None for options that were not given.
    `config_path` must exist if given; without it `turnkeep.toml` in `cwd` is read if it exists. An empty
    environment variable counts as unset. Relative paths start at `cwd`; in the file, at the file's folder.

    If the file has tables of models, returns the settings of the model `of`, by default of the first one.

    NATS_URL names the server of a client if no source names a server or a data directory. The `flags` of a
    client have the key `nats` but not `model`.
    """
    given = _Given.read(flags, environ, config_path, cwd)
    if of is not None and of not in given.tables:
        names = "; without such tables, turnkeep serve --model chooses the only model"
        if given.tables:
            names = f"; it has {', '.join(given.tables)}"
        raise SettingsError(f"there is no table [models.{_key(of)}] in {given.path}{names}")
    name = of if of is not None or given.is_one else next(iter(given.tables), None)
    return Settings(**given.common if name is None else given.of(name))


def load_models(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_path: Path | None = None,
    cwd: Path | None = None,
) -> dict[str, Settings]:
    """Return the settings of each model with a table in the file; raises `SettingsError`.

    Empty if the command line or the environment gives a model or a prefix.
    """
    given = _Given.read(flags, environ, config_path, cwd)
    if given.is_one:
        return {}
    if given.tables and "model" in given.common:
        raise SettingsError(
            f"model in {given.path} is one model, and its [models] are others; make it one of them"
        )
    models = {name: Settings(**given.of(name)) for name in given.tables}
    owners: dict[str, str] = {}
    for name, settings in models.items():
        other = owners.setdefault(Subjects(settings.prefix).log_stream, name)
        if other != name:
            raise SettingsError(
                f"the models {other} and {name} in {given.path} have the same prefix {settings.prefix};"
                " give one of them another"
            )
    return models


class _Given(NamedTuple):
    """The values of all sources: `common` to all models, and those of one model from the file's `tables`.

    The values `above`, from the command line and the environment, override both.
    """

    path: Path
    common: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    above: dict[str, Any]

    @classmethod
    def read(
        cls,
        flags: Mapping[str, object],
        environ: Mapping[str, str],
        config_path: Path | None,
        cwd: Path | None,
    ) -> _Given:
        cwd = cwd or Path.cwd()
        path = (cwd / config_path) if config_path else cwd / CONFIG_NAME
        written = _file(path, required=config_path is not None)
        tables = _tables(written.pop(_MODELS, {}), path)
        values = _read(written, lambda name: f"{name} in {path}", path.parent)
        variables = {
            key.removeprefix(ENV).lower(): value
            for key, value in environ.items()
            if key.startswith(ENV) and not key.startswith(_OTHER_ENV) and value.strip()
        }
        above = _read(variables, lambda name: ENV + name.upper(), cwd)
        given = {name: value for name, value in flags.items() if value is not None}
        above |= _read(given, lambda name: "--" + name.replace("_", "-"), cwd)
        _add_servers(values, above)
        is_open = (values | above).keys().isdisjoint({"nats", "nats_port", "data_dir"})
        if is_open and "nats" in flags and "model" not in flags and environ.get("NATS_URL", "").strip():
            above |= _read({"nats": environ["NATS_URL"]}, lambda _: "NATS_URL", cwd)
        return cls(path, values | above, tables, above)

    @property
    def is_one(self) -> bool:
        """Whether the command line or the environment chose a single model."""
        return not self.above.keys().isdisjoint({"model", "prefix"})

    def of(self, name: str) -> dict[str, Any]:
        """Return the values for the model of this name in the file."""
        prefix = f"{self.common.get('prefix', DEFAULT_PREFIX)}-{word(name)}"
        return {**self.common, "prefix": prefix, **self.tables[name], **self.above}


def _add_servers(values: dict[str, Any], above: dict[str, Any]) -> None:
    """Add the servers of a context of NATS, unless its source, or one above that, names servers."""
    for source in (above, values):
        if "nats" in source:
            return
        if (named := source.get("nats_context")) is not None:
            source.update(_read({"nats": nats_context.read(named).url}, "{0} of nats_context".format, Path()))
            return


def _tables(written: object, path: Path) -> dict[str, dict[str, Any]]:
    """Parse the tables `[models.NAME]` of the file. Raises `SettingsError`."""
    if not isinstance(written, dict) or not all(isinstance(one, dict) for one in written.values()):
        raise SettingsError(f"models in {path} must be tables: [models.NAME], with model = ... in each")
    tables = {}
    for name, table in written.items():
        place = f"[models.{_key(name)}] of {path}"
        if shared := sorted(SHARED & table.keys()):
            raise SettingsError(f"{shared[0]} in {place} is for all models; write it above the tables")
        nested = next((key for key, value in table.items() if isinstance(value, dict)), None)
        if nested is not None:
            whole = _key(f"{name}.{nested}")
            raise SettingsError(
                f"{place} holds a table {nested}; a name with dots is in quotes: [models.{whole}]"
            )
        if "model" not in table:
            raise SettingsError(f"{place} names no model; give it model = ..., as turnkeep serve takes it")
        tables[name] = _read(table, partial("{1} in {0}".format, place), path.parent)
    return tables


def _key(name: str) -> str:
    """Return a name as a TOML key, in quotes if needed."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def _read(raw: Mapping[str, object], source: Callable[[str], str], base: Path) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    values = {}
    for name, value in raw.items():
        if name not in fields:
            known = ("models", "tenants") if isinstance(value, dict) else fields
            raise SettingsError(f"{source(name)} is not a setting{_suggest(name, known, source)}")
        kind: Kind = fields[name].metadata["kind"]
        try:
            parsed = kind.parse(value)
            values[name] = base / parsed.expanduser() if isinstance(parsed, Path) else parsed
        except RuntimeError:
            why = f"no home directory is known for {str(value)!r}; write the whole path"
            raise SettingsError(f"{source(name)}: {why}") from None
        except (ValueError, OverflowError):
            shown = "its value" if kind is NATS_URLS else repr(value)
            raise SettingsError(f"{source(name)}: {shown} is not valid: it must be {kind.wants}") from None
    return values


def _file(path: Path, *, required: bool) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise SettingsError(f"there is no settings file {path}; --config must name a TOML file") from None
    except OSError as error:
        raise SettingsError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {path} is not valid TOML: {error}") from None


def _suggest(name: str, known: Iterable[str], source: Callable[[str], str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_").lower(), list(known), n=1)
    spelled = source(near[0]).partition(" in ")[0] if near else ""  # the message has named the file already
    return f"; did you mean {spelled}?" if near else "; see turnkeep serve --help-all for the list"
