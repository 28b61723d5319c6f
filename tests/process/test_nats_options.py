"""A worker and its commands log in to real NATS servers by each kind of credentials, and over TLS."""

import asyncio
import base64
import json
import os
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nkeys
import pytest
from click.testing import CliRunner
from nats.aio.client import Client, ServerVersion
from structlog.testing import capture_logs

from commands import serve
from commands.cli import main
from tests.parts import NatsServer, until
from turnkeep_client.client import connect as client
from turnkeep_client.errors import NotPermittedError, TurnkeepError
from worker.app import App
from worker.process.setting_sources import load
from worker.process.settings import Settings, SettingsError
from worker.wire.connection import BrokerError, _Watch, connect
from worker.wire.credentials import nats_options, over_tls

PASSWORD = "s3cr3t w0rd/#@"
HOST_NAMES = "subjectAltName=IP:127.0.0.1"


def seed_of(kind: int) -> bytes:
    return bytes(nkeys.encode_seed(os.urandom(32), kind))


def public(seed: bytes) -> str:
    return str(nkeys.from_seed(bytearray(seed)).public_key.decode())


def jwt(claims: dict[str, Any], subject: str, issuer: bytes) -> str:
    """Sign claims as `nsc` does."""

    def part(value: Any) -> str:
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    body = {"jti": "x", "iat": 1700000000, "iss": public(issuer), "name": "n", "sub": subject}
    signed = (
        f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part({**body, 'nats': {**claims, 'version': 2}})}"
    )
    return f"{signed}.{part(nkeys.from_seed(bytearray(issuer)).sign(signed.encode()))}"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a CA, certificates and keys of a server and of a client, and another CA."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    signs = ("-addext", "keyUsage=critical,keyCertSign")  # which Python 3.13 asks of a CA
    for ca in ("ca", "other"):
        named = ("-subj", f"/CN={ca}")
        openssl("req", "-x509", *new_key, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", *named, *signs)
    for name in ("server", "user"):
        asked = ("-subj", f"/CN={name}", "-addext", HOST_NAMES)
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", *asked)
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-copy_extensions", "copy")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder


async def reaches(url: str, settings: Settings) -> None:
    """Check that both a worker and a command can connect."""
    options = nats_options(settings)
    url = over_tls(settings, url)
    await (await connect(url, name="test", **options)).close()
    await (await client(url, **options)).close()


async def refused(url: str, settings: Settings, why: str) -> None:
    """Check that both a worker and a command are refused at once, with the reason `why`."""
    options = nats_options(settings)
    url = over_tls(settings, url)
    with pytest.raises(BrokerError, match=why) as by_worker:
        await connect(url, name="test", timeout_s=300, **options)
    with pytest.raises(NotPermittedError, match=why) as by_client:
        await client(url, connect_timeout_s=300, **options)
    for caught in (by_worker, by_client):
        assert "\n" not in str(caught.value)
        assert PASSWORD not in str(caught.value)


def context(path: Path, **fields: object) -> Path:
    """Write a context as `nats context save` does, with empty fields too."""
    empty = {"description": "", "nsc": "", "socks_proxy": "", "tls_first": False, "creds": "", "user": ""}
    return write(path, json.dumps({**empty, **fields}))


async def test_workers_and_commands_log_in_to_nats_with_user_and_password_from_a_url_or_a_nats_context(
    foreign_server: Any, tmp_path: Path
) -> None:
    url = await foreign_server(
        jetstream={"store_dir": str(tmp_path / "js")}, authorization={"user": "me", "password": PASSWORD}
    )
    file = context(tmp_path / "me.json", url=url, user="me", password=PASSWORD)
    settings = load({"nats_context": str(file)}, {}, None, tmp_path)
    assert settings.nats == url
    await reaches(url, settings)
    assert PASSWORD not in repr(settings)
    told = {"TURNKEEP_NATS": url.replace("://", f"://me:{quote(PASSWORD, safe='')}@")}
    settings = load({}, told, None, tmp_path)
    assert settings.nats
    await reaches(settings.nats, settings)
    wrong = context(tmp_path / "wrong.json", user="me", password="wrong")
    await refused(url, Settings(nats=url, nats_context=wrong), "refuses the credentials")


async def test_workers_and_commands_log_in_to_nats_with_a_token_from_a_named_nats_context(
    foreign_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await foreign_server(
        jetstream={"store_dir": str(tmp_path / "js")}, authorization={"token": PASSWORD}
    )
    (tmp_path / "nats" / "context").mkdir(parents=True)
    for name, token in (("mine", PASSWORD), ("wrong", "wrong")):
        context(tmp_path / "nats" / "context" / f"{name}.json", url=url, token=token)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    await reaches(url, load({}, {"TURNKEEP_NATS_CONTEXT": "mine"}, None, tmp_path))
    await refused(url, load({"nats_context": "wrong"}, {}, None, tmp_path), "refuses the credentials")


async def test_workers_and_commands_log_in_to_nats_with_an_nkey_from_a_seed_file(
    foreign_server: Any, tmp_path: Path
) -> None:
    seed, other = (seed_of(nkeys.PREFIX_BYTE_USER) for _ in range(2))
    url = await foreign_server(
        jetstream={"store_dir": str(tmp_path / "js")}, authorization={"users": [{"nkey": public(seed)}]}
    )
    file = write(tmp_path / "seed", seed + b"\n")
    await reaches(url, Settings(nats=url, nats_creds=file))
    await reaches(url, Settings(nats=url, nats_context=context(tmp_path / "a.json", nkey="seed")))
    wrong = Settings(nats=url, nats_creds=write(tmp_path / "other", other))
    await refused(url, wrong, "refuses the credentials")


async def test_workers_and_commands_log_in_to_nats_with_a_credentials_file_of_any_line_ending(
    foreign_server: Any, tmp_path: Path
) -> None:
    kinds = (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER)
    operator, account, user = (seed_of(kind) for kind in kinds)
    plain = {
        **dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1),
        "wildcards": True,
    }
    limits = {**plain, "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    token = jwt({"type": "operator"}, public(operator), operator)
    system = public(seed_of(nkeys.PREFIX_BYTE_ACCOUNT))
    accounts = {  # JetStream is not for the system account
        public(account): jwt({"type": "account", "limits": limits}, public(account), operator),
        system: jwt({"type": "account", "limits": plain}, system, operator),
    }
    url = await foreign_server(
        jetstream={"store_dir": str(tmp_path / "js")},
        operator=token,
        resolver="MEMORY",
        resolver_preload=accounts,
        system_account=system,
    )

    def credentials(issuer: bytes) -> str:
        inner = jwt({"type": "user", "subs": -1, "data": -1, "payload": -1}, public(user), issuer)
        return (
            f"-----BEGIN NATS USER JWT-----\n{inner}\n------END NATS USER JWT------\n\n*** IMPORTANT ***\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.decode()}\n------END USER NKEY SEED------\n"
        )

    right = credentials(account)
    for text in (right, right.replace("\n", "\r\n")):
        await reaches(url, Settings(nats=url, nats_creds=write(tmp_path / "me.creds", text)))
    stranger = credentials(seed_of(nkeys.PREFIX_BYTE_ACCOUNT))
    wrong = Settings(nats=url, nats_creds=write(tmp_path / "other.creds", stranger))
    await refused(url, wrong, "refuses the credentials")


async def test_workers_and_commands_connect_to_nats_over_tls_with_a_ca_and_a_client_certificate(
    foreign_server: Any, tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = {"cert_file": str(keys / "server.pem"), "key_file": str(keys / "server.key")}
    url = await foreign_server(
        jetstream={"store_dir": str(tmp_path / "js")},
        tls={**tls, "ca_file": str(keys / "ca.pem"), "verify": True},
    )
    ca, cert, key = keys / "ca.pem", keys / "user.pem", keys / "user.key"
    whole = context(tmp_path / "a.json", url=url, ca=str(ca), cert=str(cert), key=str(key))
    await reaches(url, Settings(nats=url, nats_context=whole))
    write(tmp_path / "both.pem", cert.read_bytes() + key.read_bytes())
    both = context(tmp_path / "b.json", url=url, cert="both.pem")
    await reaches(url, Settings(nats=url, nats_ca=ca, nats_context=both))
    other = Settings(nats=url, nats_ca=keys / "other.pem", nats_context=whole)
    await refused(url, other, "certificate that is not trusted")
    await refused(url, Settings(nats=url), "certificate that is not trusted")
    await refused(url, Settings(nats=url, nats_ca=ca), "refuses the TLS connection")
    assert "eof_received" not in caplog.text, "asyncio warns at the end of each connection"


async def test_connecting_with_required_tls_to_a_nats_server_without_tls_fails(
    foreign_server: Any, tmp_path: Path, keys: Path
) -> None:
    """nats-py would connect without TLS, even for a tls:// URL, if the server does not require it."""
    url = await foreign_server(jetstream={"store_dir": str(tmp_path / "js")})
    await refused(url, Settings(nats=url, nats_ca=keys / "ca.pem"), "does not speak TLS")
    await refused(url.replace("nats://", "tls://"), Settings(), "does not speak TLS")


SEED = "SU" + "A" * 56


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nats_creds": "absent"}, "nats_creds: .*absent cannot be read: No such file or directory; "),
        ({"nats_creds": "."}, "nats_creds: .* cannot be read: Is a directory; "),
        ({"nats_creds": "begun"}, "nats_creds: .*begun is no NATS credentials file; it must hold"),
        ({"nats_creds": "junk"}, "nats_creds: .*junk holds no nkey seed of a user; it must begin with SU"),
        ({"nats_creds": "binary"}, "nats_creds: .*binary is not text; "),
        ({"nats_creds": "account"}, "nats_creds: .*account holds no nkey seed of a user; "),
        ({"nats_context": "some"}, r"no context some in .*context, which has none; nats context save makes"),
        ({"nats_context": "./some"}, "nats_context: there is no file .*some; name a context, or a file"),
        ({"nats_context": "./junk"}, "nats_context: .*junk is no JSON object; nats context save writes one"),
        ({"nats_context": "./list"}, "nats_context: .*list is no JSON object; "),
        ({"nats_context": "./."}, "nats_context: .* cannot be read: Is a directory; "),
        ({"nats_context": {"user": "me"}}, "must have both user and password"),
        ({"nats_context": {"password": PASSWORD}}, "must have both user and password"),
        ({"nats_context": {"token": PASSWORD, "nkey": "seed"}}, "token in .* and nkey in .* are both set; "),
        ({"nats_context": {"token": PASSWORD}, "nats_creds": "seed"}, "token in .* and nats_creds are both"),
        (
            {"nats_context": {"socks_proxy": "x", "nsc": "y"}},
            "has nsc, socks_proxy, which is not supp",
        ),
        ({"nats_context": {"token": 7}}, "token in .* is no text; "),
        ({"nats_context": {"creds": "absent"}}, "nats_context: .*absent cannot be read: No such file"),
        (
            {"nats_context": {"cert": "junk"}},
            "nats_context: .*junk and itself are no certificate and its key",
        ),
        ({"nats_context": {"key": "junk"}}, "the key of nats_context has no certificate; "),
        ({"nats_context": {"url": "http://x"}}, "nats of nats_context: its value is not valid: it must be"),
        ({"nats_ca": "junk"}, "nats_ca: .*junk holds no certificate; it must be a PEM file"),
        ({"nats_ca": "absent"}, "nats_ca: .*absent cannot be read: No such file or directory; "),
        ({"nats": "nats://me:x@h", "nats_creds": "seed"}, "nats and nats_creds both hold credentials; "),
    ],
)
def test_unreadable_or_contradictory_nats_login_settings_fail_with_one_line_without_a_secret(
    tmp_path: Path, given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    texts = {"junk": PASSWORD, "account": "SA" + "A" * 56, "begun": f"-----BEGIN {PASSWORD}", "list": "[]"}
    for name, content in texts.items():
        write(tmp_path / name, content)
    write(tmp_path / "binary", b"\xff\xfe")
    write(tmp_path / "seed", seed_of(nkeys.PREFIX_BYTE_USER))
    if isinstance(fields := given.get("nats_context"), dict):
        given = given | {"nats_context": str(context(tmp_path / "given.json", **fields))}
    environment = {"TURNKEEP_" + name.upper(): value for name, value in given.items()}
    with pytest.raises(SettingsError, match=said) as caught:
        nats_options(load({}, environment, None, tmp_path))
    assert "\n" not in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_an_encrypted_tls_private_key_for_nats_is_refused(tmp_path: Path, keys: Path) -> None:
    command = ["openssl", "pkey", "-in", keys / "user.key", "-aes256"]
    command += ["-passout", "pass:x", "-out", "locked.key"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    given = context(tmp_path / "a.json", cert=str(keys / "user.pem"), key="locked.key")
    with pytest.raises(SettingsError, match="the key not encrypted"):
        nats_options(Settings(nats_context=given))


@pytest.mark.parametrize("command", [("serve",), ("doctor",), ("info",), ("ask", "hi"), ("exporter",)])
def test_commands_have_an_option_for_a_nats_credentials_file_but_none_for_a_password(
    tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "configure", lambda *_: None)  # the log of this process is the tests'
    data = ("--data-dir", str(tmp_path / "data")) if command[0] in {"serve", "doctor"} else ()
    absent = ("--nats", "nats://127.0.0.1:1", "--nats-creds", str(tmp_path / "absent"))
    done = CliRunner().invoke(main, [*command, *absent, *data])
    assert done.exit_code == (1 if command == ("doctor",) else 2), done.output
    assert "cannot be read" in " ".join(done.output.split())
    done = CliRunner().invoke(main, [*command, "--nats-token", PASSWORD])
    assert done.exit_code == 2
    assert "No such option" in done.output


@pytest.mark.process
async def test_a_worker_warns_once_of_a_nats_server_version_that_can_lose_entries(
    local_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, num_lines in (("2.14.5", 1), ("2.15.1", 0)):
        monkeypatch.setattr(Client, "connected_server_version", ServerVersion(version))
        with capture_logs() as logs:
            worker = await local_worker()
            await worker.stop()
        lines = [one for one in logs if "#8475" in one["event"]]
        assert [one["version"] for one in lines] == [version] * num_lines
        assert all("install 2.12.16, 2.14.6, 2.15.0 or newer" in one["event"] for one in lines)


async def test_a_running_worker_whose_password_is_changed_at_the_server_ends_and_says_why(
    tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(f'authorization {{ users: [{{ user: w, password: "{PASSWORD}" }}] }}')
    server = NatsServer(tmp_path / "js", ("-c", str(config)))
    request.addfinalizer(server.kill)
    server.start()
    url = server.url.replace("//", f"//w:{quote(PASSWORD, safe='')}@")
    settings = Settings(data_dir=tmp_path / "data", nats=url, model=str(tiny_model), log_max_bytes=2**26)
    app = App(settings)
    running = asyncio.create_task(app.run())
    await until(lambda: app.ready.is_set() or running.done())
    config.write_text("authorization { users: [{ user: w, password: another }] }")
    assert server._process is not None
    server._process.send_signal(signal.SIGHUP)
    with pytest.raises(TurnkeepError, match="the NATS server refuses the credentials, or wants some; check"):
        async with asyncio.timeout(30):
            await running


async def test_a_server_certificate_that_is_not_trusted_at_a_reconnection_is_logged_with_a_remedy() -> None:
    """The server may have got another one; that it is away is logged at its disconnection alone."""
    watch = _Watch(Client(), "tls://there", None, None)
    watch.is_connected = True
    expired = ssl.SSLCertVerificationError()
    expired.verify_message = "certificate has expired"
    with capture_logs() as lines:
        await watch.error(ConnectionRefusedError("refused"))
        await watch.error(expired)
    assert [line["log_level"] for line in lines] == ["debug", "warning"]
    assert "is not trusted" in lines[1]["error"]
