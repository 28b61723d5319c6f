"""Converts the settings for NATS users and TLS to nats-py's options.

Files are read once, at the start. No error message contains the content of a file.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final

from turnkeep_client.errors import NoServerError
from worker.process import nats_context
from worker.process.datadir import TOKEN_NAME, is_unused
from worker.process.settings import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

    from worker.process.nats_context import NatsContext
    from worker.process.settings import Settings

#: The settings of this module, for commands that connect to NATS.
CREDENTIAL_SETTINGS: Final = ("nats_context", "nats_creds", "nats_ca")
_JWT: Final = re.compile(r"-----BEGIN NATS USER JWT-----\s+(\S+)\s")
_SEED: Final = re.compile(r"-----BEGIN USER NKEY SEED-----\s+(\S+)\s")
_SEED_SHAPE: Final = re.compile(r"SU[A-Z2-7]{56}")
_MAX_BYTES: Final = 2**20


def nats_options(settings: Settings) -> dict[str, Any]:
    """Read nats-py's options from the context, credentials and TLS files. Raises `SettingsError`."""
    context = _context(settings)
    ways = _of_context(context) if context else []
    if settings.nats_creds is not None:
        ways.append(("nats_creds", _of_file("nats_creds", settings.nats_creds)))
    if ways and any("@" in url for url in (settings.nats or "").split(",")):
        raise SettingsError(f"nats and {ways[0][0]} both hold credentials; keep one of them")
    if len(ways) > 1:
        raise SettingsError(f"{ways[0][0]} and {ways[1][0]} are both set; a NATS user has one of them")
    return (ways[0][1] if ways else {}) | _tls(settings, context)


def worker_options(settings: Settings) -> dict[str, Any]:
    """Read nats-py's options for a worker. Raises `SettingsError`, also for options of its own server."""
    options = nats_options(settings)
    if options and settings.nats is None:
        raise SettingsError("the worker's own NATS server makes its token itself; set nats too")
    return options


def client_options(settings: Settings) -> dict[str, Any]:
    """Read nats-py's options for a command; without credentials, has the token of the worker's own server.

    Raises `SettingsError`, and `NoServerError` if the server of that token cannot run.
    """
    options = nats_options(settings)
    if settings.nats is None and options.keys() <= {"tls"} and (token := running_token(settings.data_dir)):
        options["token"] = token
    return options


def running_token(data_dir: Path) -> str | None:
    """Return the `own_token`; raises `NoServerError` if the data directory is unused, as a copy is.

    With its token and port, a copy would otherwise lead to the original's server.
    """
    token = own_token(data_dir)
    if token and is_unused(data_dir):
        raise NoServerError(f"no worker runs on the data directory {data_dir}")
    return token


def own_token(data_dir: Path) -> str | None:
    """Read the token of a data directory's own NATS server; None without one. Raises `SettingsError`."""
    path = data_dir / TOKEN_NAME
    try:
        return path.read_text("utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingsError(
            f"{path} cannot be read: {reason}; run as the worker's user, or name a folder with a copy"
            " as --data-dir"
        ) from None


def over_tls(settings: Settings, urls: str) -> str:
    """Return `urls`, with tls:// for nats:// and wss:// for ws:// if there is a CA or a certificate."""
    context = _context(settings)
    if settings.nats_ca is None and not (context and context.files.keys() & {"ca", "cert"}):
        return urls
    return ",".join(re.sub("^ws://", "wss://", re.sub("^nats://", "tls://", url)) for url in urls.split(","))


def _context(settings: Settings) -> NatsContext | None:
    return None if settings.nats_context is None else nats_context.read(settings.nats_context)


def _of_context(context: NatsContext) -> list[tuple[str, dict[str, Any]]]:
    """Return, for each way in which a context logs in, its name and nats-py's options."""
    ways: list[tuple[str, dict[str, Any]]] = []
    login = {name: context.texts[name] for name in ("user", "password") if name in context.texts}
    if len(login) == 1:
        raise SettingsError(f"nats_context: {context.path} must have both user and password")
    if login:
        ways.append((f"user in {context.path}", login))
    if "token" in context.texts:
        ways.append((f"token in {context.path}", {"token": context.texts["token"]}))
    ways += [
        (f"{name} in {context.path}", _of_file("nats_context", path))
        for name, path in context.files.items()
        if name in {"creds", "nkey"}
    ]
    return ways


def _of_file(name: str, path: Path) -> dict[str, Any]:
    """Read a credentials file, or an nkey seed alone."""
    text = _read(name, path)
    if text.lstrip().startswith("-----BEGIN"):
        return {"user_credentials": _credentials(name, path, text + "\n")}
    return {"nkeys_seed_str": _seed(name, path, text.strip())}


def _credentials(name: str, path: Path, text: str) -> Any:
    from nats.aio.client import RawCredentials

    jwt, seed = _JWT.search(text), _SEED.search(text)
    if jwt is None or seed is None:
        raise SettingsError(
            f"{name}: {path} is no NATS credentials file; it must hold a user's JWT and nkey seed"
        )
    key = _seed(name, path, seed[1])
    # nats-py finds the lines by their ends, and fails on other line ends than its own.
    return RawCredentials(
        f"-----BEGIN NATS USER JWT-----\n{jwt[1]}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{key}\n------END USER NKEY SEED------\n"
    )


def _seed(name: str, path: Path, seed: str) -> str:
    import nkeys

    if _SEED_SHAPE.fullmatch(seed):
        with contextlib.suppress(nkeys.NkeysError, ValueError):
            nkeys.from_seed(bytearray(seed.encode()))
            return seed
    raise SettingsError(
        f"{name}: {path} holds no nkey seed of a user; it must begin with SU and have 58 characters"
    )


def _tls(settings: Settings, context: NatsContext | None) -> dict[str, Any]:
    import ssl  # here, as most commands need none

    files = context.files if context else {}
    ca, cert, key = settings.nats_ca or files.get("ca"), files.get("cert"), files.get("key")
    ca_from = "nats_context" if settings.nats_ca is None else "nats_ca"
    if key is not None and cert is None:
        raise SettingsError("the key of nats_context has no certificate; the context must have cert")
    if ca is None and cert is None:
        return {}
    for name, path in ((ca_from, ca), ("nats_context", cert), ("nats_context", key)):
        if path is not None:
            _read(name, path)
    try:
        tls = ssl.create_default_context(cafile=ca)
    except (ssl.SSLError, ValueError):
        raise SettingsError(f"{ca_from}: {ca} holds no certificate; it must be a PEM file") from None
    if cert is not None:
        try:
            # An encrypted key fails here; OpenSSL would ask the terminal.
            tls.load_cert_chain(cert, key, password="")
        except (ssl.SSLError, ValueError):
            raise SettingsError(
                f"nats_context: {cert} and {key or 'itself'} are no certificate and its key;"
                " they must be PEM files, and the key not encrypted"
            ) from None
    return {"tls": tls}


def _read(name: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode()
    except OSError as error:
        raise SettingsError(
            f"{name}: {path} cannot be read: {error.strerror}; name a file of yours"
        ) from None
    except UnicodeDecodeError:
        raise SettingsError(f"{name}: {path} is not text; name another file") from None
