"""Settings come from flags, environment, file and defaults; wrong ones are refused with advice."""

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache.names.policy import FULL, Policy
from commands import serve
from commands.ports import NOTHING, Beside, ports_of
from turnkeep_client.subjects import check_id
from worker.process import settings as module
from worker.process.contradictions import check_together
from worker.process.setting_kinds import Endpoint, TenantLimits
from worker.process.setting_sources import load, load_models
from worker.process.settings import Settings, SettingsError, describe


def write(folder: Path, text: str) -> Path:
    path = folder / "turnkeep.toml"
    path.write_text(text)
    return path


def refusal(flags=None, environ=None, toml: str | None = None, *, cwd: Path) -> str:
    if toml is not None:
        write(cwd, toml)
    with pytest.raises(SettingsError) as caught:
        load(flags or {}, environ or {}, None, cwd)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_settings_have_their_default_values_without_flags_variables_and_file(tmp_path):
    settings = load({}, {}, None, tmp_path)
    assert settings == Settings()
    assert settings.nats is None
    assert settings.sync_interval == "always"
    assert settings.max_message_bytes == 2**20
    assert check_id("worker", settings.worker)


def test_flags_override_the_environment_which_overrides_the_settings_file(tmp_path):
    write(tmp_path, "max_batch = 2\nmax_disk = '20MiB'\nmax_context = 200\n")
    environ = {"TURNKEEP_MAX_BATCH": "3", "TURNKEEP_MAX_DISK": "30MiB"}
    settings = load({"max_batch": 4, "max_disk": None}, environ, None, tmp_path)
    assert (settings.max_batch, settings.max_disk, settings.max_context) == (4, 30 * 2**20, 200)
    assert settings.min_free_disk == 2**30


def test_each_setting_has_a_description_a_flag_an_environment_variable_and_a_valid_default(
    tmp_path,
):
    """The name in the file, the flag and the variable match, and each variable is read."""
    for described in describe():
        assert described.flag == "--" + described.variable.removeprefix("TURNKEEP_").lower().replace("_", "-")
        assert described.purpose
        assert described.wants
        if described.name not in ("data_dir", "worker"):
            read = load({}, {described.variable: described.default}, None, tmp_path)
            assert getattr(read, described.name) == getattr(Settings(), described.name), described
        with contextlib.suppress(SettingsError):
            read = load({}, {described.variable: "?"}, None, tmp_path)
            assert getattr(read, described.name) != getattr(Settings(), described.name), described


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("device_memory", "8GiB", 8 * 2**30),
        ("device_memory", "500MB", 500_000_000),
        ("device_memory", "1.5 GiB", 3 * 2**29),
        ("device_memory", "2000000", 2_000_000),
        ("device_memory", "64m", 2**26),
        ("unload_after_s", "5", 5.0),
        ("unload_after_s", "2m", 120.0),
        ("unload_after_s", "1750ms", 1.75),
        ("unload_after_s", "1.5s", 1.5),
        ("unload_after_s", "1h", 3600.0),
        ("kv_bits", "8", 8),
        ("kv_bits", "full", None),
        ("cache_policy", "full", FULL),
        ("cache_policy", "sink_window", Policy(4, 1024)),
        ("cache_policy", "sink_window:2,64", Policy(2, 64)),
        ("nats", "queue:4333, tls://b", "nats://queue:4333,tls://b"),
        ("sync_interval", "2000ms", "2s"),
        ("health", "9424", ("127.0.0.1", 9424)),
        ("health", "0.0.0.0:80", ("0.0.0.0", 80)),
        ("health", "[::1]:9424", ("::1", 9424)),
        ("health", "box.example:9424", ("box.example", 9424)),
    ],
)
def test_a_setting_accepts_common_spellings_of_its_value_in_flags_environment_variables_and_the_file(
    tmp_path, name, given, read
):
    assert getattr(load({name: given}, {}, None, tmp_path), name) == read
    assert getattr(load({}, {f"TURNKEEP_{name.upper()}": given}, None, tmp_path), name) == read
    for value in (given, read) if isinstance(read, int | float) else (given,):
        write(tmp_path, f"{name} = {value!r}\n")
        assert getattr(load({}, {}, None, tmp_path), name) == read


def test_the_flag_values_embedded_auto_and_packaged_reset_settings_of_the_file_to_their_defaults(tmp_path):
    write(tmp_path, 'nats = "nats://queue:4222"\ndevice_memory = "1GiB"\nmodel = "some/model"\n')
    settings = load({"nats": "embedded", "device_memory": "auto", "model": "packaged"}, {}, None, tmp_path)
    assert (settings.nats, settings.device_memory, settings.model) == (None, None, None)


def test_tenant_limits_can_be_given_as_a_table_of_the_settings_file_or_as_one_string(tmp_path):
    write(tmp_path, "[tenants]\nrows = 2\nmemory = '1GiB'\n[models.a]\nmodel = 'x'\n")
    expected = TenantLimits(rows=2, memory=2**30)
    assert load({}, {}, None, tmp_path).tenants == expected
    assert load_models({}, {}, None, tmp_path)["a"].tenants == expected
    told = {"TURNKEEP_TENANTS": "sessions=3, metrics=50,rows=off"}
    assert load({}, told, None, tmp_path).tenants == TenantLimits(sessions=3, metrics=50), "the whole table"


def test_a_relative_data_dir_is_resolved_from_the_settings_file_or_the_current_folder(tmp_path):
    folder = tmp_path / "etc"
    folder.mkdir()
    config = write(folder, 'data_dir = "state"\n')
    assert load({}, {}, config, tmp_path).data_dir == folder / "state"
    assert load({"data_dir": "here"}, {}, config, tmp_path).data_dir == tmp_path / "here"
    assert load({"data_dir": Path("/srv/x")}, {}, config, tmp_path).data_dir == Path("/srv/x")


def test_a_data_dir_in_an_unknown_users_home_directory_is_refused(tmp_path):
    message = refusal(environ={"TURNKEEP_DATA_DIR": "~nobody-here/x"}, cwd=tmp_path)
    why = "no home directory is known for '~nobody-here/x'; write the whole path"
    assert message == f"TURNKEEP_DATA_DIR: {why}"


def test_an_empty_environment_variable_or_one_reserved_for_tests_changes_no_setting(tmp_path):
    environ = {"TURNKEEP_MAX_BATCH": "", "TURNKEEP_TEST_WHATEVER": "1", "OTHER": "x"}
    assert load({}, environ, None, tmp_path) == Settings()


def test_an_unknown_setting_is_refused_with_its_source_and_the_most_similar_name(tmp_path):
    message = refusal(environ={"TURNKEEP_MAX_BACH": "3"}, cwd=tmp_path)
    assert message == "TURNKEEP_MAX_BACH is not a setting; did you mean TURNKEEP_MAX_BATCH?"
    message = refusal(toml="data-dir = 'x'\n", cwd=tmp_path)
    assert "data-dir in " in message
    assert message.endswith("turnkeep.toml is not a setting; did you mean data_dir?")
    assert "turnkeep serve --help-all" in refusal(toml="colour = 'red'\n", cwd=tmp_path)


HEALTHLESS = ("", "box", "box:", "0", "65536", "::1", "::1:80", "[::1]", "a b:80", True)


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("max_batch", "0", "a whole number from 1 to 1024"),
        ("max_batch", "many", "a whole number"),
        ("max_batch", True, "a whole number"),
        ("max_batch", 2.5, "a whole number"),
        ("nats_port", 70000, "from 1 to 65535"),
        ("max_disk", "20 parsecs", "such as 8GiB"),
        ("max_disk", "-1", "such as 8GiB"),
        ("max_message_bytes", "1GiB", "from 1KiB to 32MiB"),
        ("device_memory", "9" * 5000, "such as 8GiB"),
        ("closed_ttl_s", "soon", "such as 5, 5s or 2m"),
        ("unload_after_s", float("nan"), "from 1 to 2592000 seconds"),
        ("closed_ttl_s", "inf", "a duration"),
        ("dtype", "int4", "one of auto, keep, float32, float16, bfloat16"),
        ("kv_bits", "6", "'full' or 4 or 8"),
        ("kv_bits", 8.0, "'full' or 4 or 8"),
        ("kv_bits", True, "'full' or 4 or 8"),
        ("cache_policy", "lru", "'full' or sink_window:SINK,WINDOW"),
        ("cache_policy", "sink_window:0,64", "two numbers of tokens from 1, such as sink_window:4,1024"),
        ("cache_policy", "sink_window:4,0", "two numbers of tokens from 1"),
        ("cache_policy", "sink_window:4", "two numbers of tokens from 1"),
        ("cache_policy", "sink_window:4,-9", "two numbers of tokens from 1"),
        ("cache_policy", "full:4,64", "'full' or sink_window:SINK,WINDOW"),
        ("cache_policy", 4, "'full' or sink_window:SINK,WINDOW"),
        ("tenants", "sessions=0", "some of rows, memory, sessions and metrics, such as rows=4,memory=2GiB"),
        ("tenants", "rows=2,rows=3", "some of rows, memory, sessions and metrics"),
        ("tenants", "rows", "some of rows, memory, sessions and metrics"),
        ("tenants", {"row": 4}, "some of rows, memory, sessions and metrics"),
        ("prefix", "a..b", "joined by dots"),
        ("worker", "my host", "1 to 64 of the characters"),
        ("nats", "http://queue", "nats://host:4222"),
        ("nats", "nats://queue:99999", "nats://host:4222"),
        ("sync_interval", "never", "'always' or a duration"),
        ("data_dir", 7, "a path"),
        ("model", "  ", "text"),
        *(("health", text, "HOST:PORT, or a port of 127.0.0.1") for text in HEALTHLESS),
        ("log_level", ["info"], "one of auto, debug, info, warning, error"),
    ],
)
def test_a_setting_of_another_type_or_out_of_range_is_refused_with_the_allowed_values(
    tmp_path, name, value, right
):
    message = refusal({name: value}, cwd=tmp_path)
    assert message.startswith("--" + name.replace("_", "-") + ": ")
    assert right in message


def test_a_missing_unreadable_or_malformed_settings_file_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"there is no settings file .*absent\.toml"):
        load({}, {}, Path("absent.toml"), tmp_path)
    with pytest.raises(SettingsError, match=r"cannot be read: Is a directory"):
        load({}, {}, tmp_path, tmp_path)
    assert "is not valid TOML" in refusal(toml="max_batch = = 3\n", cwd=tmp_path)
    assert "a whole number" in refusal(toml="[max_batch]\nx = 1\n", cwd=tmp_path)


@pytest.mark.parametrize(
    ("host", "worker"),
    [
        ("queue-1.example.org", "queue-1"),
        ("Ma c's", "Ma-c-s"),
        ("_x", "x"),
        ("-" * 5, "worker"),
        ("a" * 99, "a" * 64),
    ],
)
def test_the_default_worker_name_is_made_from_the_host_name_as_a_valid_id(monkeypatch, host, worker):
    monkeypatch.setattr(module.socket, "gethostname", lambda: host)
    assert check_id("worker", module.default_worker()) == worker


MODELS = """
max_batch = 2
max_context = 20
[models.small]
model = "org/small"
max_batch = 3
[models."coder:30b"]
model = "org/coder"
prefix = "coder"
unload_after_s = "off"
"""


def test_a_model_table_overrides_the_rest_of_the_settings_file_but_not_flags_and_variables(tmp_path):
    write(tmp_path, MODELS)
    models = load_models({"kv_bits": "8"}, {"TURNKEEP_MAX_CONTEXT": "30"}, None, tmp_path)
    assert [*models] == ["small", "coder:30b"]
    small, coder = models.values()
    assert (small.model, small.prefix, small.max_batch, small.unload_after_s) == (
        "org/small",
        "turnkeep-small",
        3,
        600.0,
    )
    assert (coder.model, coder.prefix, coder.max_batch, coder.unload_after_s) == (
        "org/coder",
        "coder",
        2,
        None,
    )
    assert {(one.kv_bits, one.max_context) for one in models.values()} == {(8, 30)}
    assert load({"kv_bits": 8, "max_context": 30}, {}, None, tmp_path) == small, "the first one"
    assert load({}, {}, None, tmp_path, of="coder:30b").model == "org/coder"


def test_the_model_tables_of_the_settings_file_are_ignored_if_a_model_or_subject_prefix_is_given(tmp_path):
    write(tmp_path, MODELS)
    for given in ({"model": "org/other"}, {"prefix": "other"}):
        assert load_models(given, {}, None, tmp_path) == {}
        assert load(given, {}, None, tmp_path) == Settings(max_batch=2, max_context=20, **given)
    write(tmp_path, "max_batch = 2\n")
    assert load_models({}, {}, None, tmp_path) == {}


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("models = 3", r"models in .*turnkeep.toml must be tables: \[models.NAME\]"),
        ("[models]\nsmall = 'org/small'", r"must be tables: \[models.NAME\]"),
        ("[modles.small]\nmodel = 'x'", r"modles in .* is not a setting; did you mean models\?$"),
        ("[models.small]", r"\[models.small\] of .* names no model; give it model = "),
        (
            "[models.a]\nmodel = 'x'\nmax_bach = 3",
            r"max_bach in \[models.a\] of .*; did you mean max_batch\?$",
        ),
        ("[models.a]\nmodel = 'x'\nkv_bits = 3", r"kv_bits in \[models.a\] of .*: 3 is not valid"),
        ("[models.a]\nmodel = 'x'\nnats_port = 3", r"nats_port in \[models.a\] of .* is for all models"),
        (
            "[models.a]\nmodel = 'x'\n[models.a.tenants]\nrows = 2",
            "tenants in .* is for all models",
        ),
        ("[models.qwen2.5]\nmodel = 'x'", r'is in quotes: \[models."qwen2.5"\]'),
        (
            "[models.'a:b']\nmodel = 'x'\n[models.a-b]\nmodel = 'y'",
            "the models a:b and a-b in .* same prefix",
        ),
        ("model = 'z'\n[models.a]\nmodel = 'x'", "make it one of them"),
    ],
)
def test_a_model_table_without_a_model_or_with_unknown_settings_is_refused_with_advice(tmp_path, toml, says):
    write(tmp_path, toml)
    with pytest.raises(SettingsError, match=says) as caught:
        load_models({}, {}, None, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_name_without_a_table_in_the_settings_file_is_refused_with_the_names_of_the_tables(tmp_path):
    for toml, says in (
        ("", r"no table \[models.x\].*; without such tables, turnkeep"),
        ("[models.a]\nmodel = 'x'\n", r"there is no table \[models.x\] in .*; it has a$"),
        (MODELS, r"no table \[models.x\] in .*; it has small, coder:30b"),
    ):
        write(tmp_path, toml)
        with pytest.raises(SettingsError, match=says):
            load({}, {}, None, tmp_path, of="x")


#: Settings of which each is valid, and the ports of what runs beside the worker.
CONTRADICTIONS = [
    ({"nats_port": 9560, "health": Endpoint("0.0.0.0", 9560)}, NOTHING, "--nats-port and --health have"),
    ({"nats_websocket": 4222}, NOTHING, "--nats-port and --nats-websocket have the same port 4222"),
    ({"nats": "nats://far"}, Beside(9560, 9560), "--gateway and --console have the same port 9560"),
    (
        {"snapshots": "off", "remote_tier": "tier"},
        NOTHING,
        "remote_tier is for snapshots, and snapshots is off",
    ),
    (
        {"snapshots": "off", "cache_policy": Policy(4, 2108, 1984)},
        NOTHING,
        "cache_policy paged.* needs snapshots",
    ),
    ({"log_replicas": 3}, NOTHING, "log_replicas needs a cluster of NATS servers"),
    (
        {"min_free_disk": 900 * 2**40},
        NOTHING,
        "min_free_disk is 921600 GiB, and the disk of .* in all; lower it",
    ),
]


@pytest.mark.parametrize(("changes", "beside", "says"), CONTRADICTIONS)
def test_settings_that_contradict_each_other_or_exceed_the_disk_are_refused(changes, beside, says, tmp_path):
    settings = Settings(**{"data_dir": tmp_path / "new" / "data"} | changes)

    def check() -> None:
        check_together(settings)
        ports_of(settings, beside)

    with pytest.raises(SettingsError, match=says):
        check()


def test_settings_with_different_ports_or_port_0_are_accepted_together_even_on_a_small_disk(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**20))
    settings = Settings(data_dir=tmp_path, nats="nats://127.0.0.1:9560", log_replicas=3)
    check_together(settings)
    assert ports_of(settings, Beside(9560, 0)) == {"--gateway": Endpoint("127.0.0.1", 9560)}


def test_a_settings_reload_reads_a_changed_file_in_the_current_folder_and_fails_if_the_file_is_gone(
    tmp_path, monkeypatch
):
    """Without its file it would apply the defaults, and perhaps evict snapshots."""
    monkeypatch.chdir(tmp_path)
    given = []
    monkeypatch.setattr(serve, "run", lambda *all_: given.extend(all_))
    write(tmp_path, f"data_dir = '{tmp_path}'\nmax_disk = '1GiB'")
    serve.serve(["--nats-port", "4299"], standalone_mode=False)
    _, _, reload, _ = given
    write(tmp_path, f"data_dir = '{tmp_path}'\nmax_disk = '2GiB'")
    assert reload()[0].max_disk == 2 * 2**30
    (tmp_path / "turnkeep.toml").unlink()
    with pytest.raises(SettingsError, match="there is no settings file"):
        reload()
