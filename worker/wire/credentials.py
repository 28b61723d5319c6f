"""Converts the settings for NATS users and TLS to nats-py's options.

Files are read once, at the start. No error message contains the content of a file or of a secret setting.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final

from worker.process.datadir import TOKEN_NAME
from worker.process.settings import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

    from worker.process.settings import Settings

#: The settings of this module, for commands that connect to NATS.
CREDENTIAL_SETTINGS: Final = (
    *("nats_creds", "nats_nkey", "nats_user", "nats_password", "nats_password_file"),
    *("nats_token", "nats_token_file", "nats_ca", "nats_cert", "nats_key"),
)
_JWT: Final = re.compile(r"-----BEGIN NATS USER JWT-----\s+(\S+)\s")
_SEED: Final = re.compile(r"-----BEGIN USER NKEY SEED-----\s+(\S+)\s")
_SEED_SHAPE: Final = re.compile(r"SU[A-Z2-7]{56}")
_MAX_BYTES: Final = 2**20


def nats_options(settings: Settings) -> dict[str, Any]:
    """Read the credentials and TLS files. Raises `SettingsError`, also for contradictory settings."""
    given = {name for name in CREDENTIAL_SETTINGS if getattr(settings, name) is not None}
    ways = {
        "nats_creds": {"nats_creds"},
        "nats_nkey": {"nats_nkey"},
        "nats_user": {"nats_user", "nats_password", "nats_password_file"},
        "nats_token": {"nats_token", "nats_token_file"},
    }
    used = [way for way, names in ways.items() if names & given]
    if used and any("@" in url for url in (settings.nats or "").split(",")):
        raise SettingsError(f"nats and {used[0]} both hold credentials; keep one of them")
    if len(used) > 1:
        raise SettingsError(f"{' and '.join(used)} are both set; a NATS user has one of them")
    return (_user(settings, used[0]) if used else {}) | _tls(settings)


def worker_options(settings: Settings) -> dict[str, Any]:
    """Read a worker's credentials. Raises `SettingsError` if some are set without an external server."""
    options = nats_options(settings)
    if options and settings.nats is None:
        raise SettingsError("the worker's own NATS server makes its token itself; set nats too")
    return options


def client_options(settings: Settings) -> dict[str, Any]:
    """Read the credentials of a command; if none are set, the token of the worker's own server."""
    options = nats_options(settings)
    if settings.nats is None and options.keys() <= {"tls"} and (token := own_token(settings.data_dir)):
        options["token"] = token
    return options


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
            f"{path} cannot be read: {reason}; run as the worker's user, or set nats_token_file"
        ) from None


def over_tls(settings: Settings, urls: str) -> str:
    """Change nats:// and ws:// URLs to tls:// and wss:// if the settings name a CA or a certificate."""
    if settings.nats_ca is None and settings.nats_cert is None:
        return urls
    return ",".join(re.sub("^ws://", "wss://", re.sub("^nats://", "tls://", url)) for url in urls.split(","))


def _user(settings: Settings, way: str) -> dict[str, Any]:
    if settings.nats_creds is not None:
        return {"user_credentials": _credentials(settings.nats_creds)}
    if settings.nats_nkey is not None:
        seed = _read("nats_nkey", settings.nats_nkey).strip()
        return {"nkeys_seed_str": _seed("nats_nkey", settings.nats_nkey, seed)}
    if way == "nats_token":
        return {"token": _secret(settings, "nats_token")}
    if settings.nats_user is None:
        raise SettingsError("nats_password has no user; set nats_user")
    return {"user": settings.nats_user, "password": _secret(settings, "nats_password")}


def _credentials(path: Path) -> Any:
    from nats.aio.client import RawCredentials

    text = _read("nats_creds", path) + "\n"
    jwt, seed = _JWT.search(text), _SEED.search(text)
    if jwt is None or seed is None:
        raise SettingsError(
            f"nats_creds: {path} is no NATS credentials file; it must hold a user's JWT and nkey seed"
        )
    key = _seed("nats_creds", path, seed[1])
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


def _secret(settings: Settings, name: str) -> str:
    value: str | None = getattr(settings, name)
    path: Path | None = getattr(settings, f"{name}_file")
    if value is not None and path is not None:
        raise SettingsError(f"{name} and {name}_file are both set; keep one of them")
    if value is None and path is None:
        raise SettingsError(f"nats_user has no password; set {name}_file, or TURNKEEP_{name.upper()}")
    secret = value if path is None else _read(f"{name}_file", path).strip("\r\n")
    if not secret:
        raise SettingsError(f"{name}_file: {path} is empty; it must hold one line")
    return secret


def _tls(settings: Settings) -> dict[str, Any]:
    import ssl  # here, as most commands need none

    ca, cert, key = settings.nats_ca, settings.nats_cert, settings.nats_key
    if key is not None and cert is None:
        raise SettingsError("nats_key has no certificate; set nats_cert")
    if ca is None and cert is None:
        return {}
    for name, path in (("nats_ca", ca), ("nats_cert", cert), ("nats_key", key)):
        if path is not None:
            _read(name, path)
    try:
        context = ssl.create_default_context(cafile=ca)
    except (ssl.SSLError, ValueError):
        raise SettingsError(f"nats_ca: {ca} holds no certificate; it must be a PEM file") from None
    if cert is not None:
        try:
            # An encrypted key fails here; OpenSSL would ask the terminal.
            context.load_cert_chain(cert, key, password="")
        except (ssl.SSLError, ValueError):
            raise SettingsError(
                f"nats_cert: {cert} and {key or 'itself'} are no certificate and its key;"
                " they must be PEM files, and the key not encrypted"
            ) from None
    return {"tls": context}


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
