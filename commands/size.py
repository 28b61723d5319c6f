"""`turnkeep size`: estimates memory, disk and SSD writes of a number of sessions."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from worker.observe.logs import logs_on_stderr
from worker.process.constants import CONSTANTS
from worker.process.formatting import size as in_units
from worker.process.setting_kinds import parse_size, policy_text
from worker.process.settings import SettingsError

from .flags import Number, as_json, with_settings
from .printing import table
from .progress import terminal_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.models.model import LoadedModel
    from worker.process.settings import Settings
    from worker.sizing import Load, Plan, Sized
    from worker.supervisor import Needs

    from .flags import Given

_SETTINGS: Final = (
    *("data_dir", "model", "draft_model", "dtype", "kv_bits", "cache_policy", "device_memory"),
    *("snapshots", "max_disk", "max_batch", "max_context"),
)
#: A supervisor gives each model enough memory for one session of this length.
_USUAL_TOKENS: Final = 32_768
_UNKNOWN: Final = "not known before it is measured; turnkeep bench load measures it on this machine"


def _size(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    try:
        found = None if value is None else parse_size(value)
    except (ValueError, OverflowError):
        found = 0
    if found == 0:
        raise click.BadParameter(f"{value!r} is no size; it must be like 512GB or 1TiB")
    return found


def _tokens(flag: str, name: str, default: int, purpose: str, least: int = 0) -> Callable[[Any], Any]:
    kind = click.IntRange(least, 2**31)
    return click.option(flag, name, metavar="N", type=kind, default=default, show_default=True, help=purpose)


@click.command()
@click.option(
    "--sessions", metavar="N", type=click.IntRange(1), required=True, help="Sessions that are in use."
)
@click.option(
    "--turns-per-hour",
    metavar="T",
    type=Number(0),
    required=True,
    help="Turns of one session in an hour, all day long.",
)
@_tokens(
    "--prompt-tokens", "prompt_tokens", 200, "Tokens that a turn adds before its answer, the template's too."
)
@_tokens("--answer-tokens", "answer_tokens", 300, "Tokens of an answer.", least=1)
@_tokens(
    "--context", "context_tokens", 4096, "Tokens at which a session ends, and another one begins.", least=1
)
@click.option(
    "--drive", metavar="SIZE", callback=_size, help="Size of the SSD, to count its drive writes per day."
)
@as_json
@with_settings(*_SETTINGS)
@logs_on_stderr()
def size(given: Given, drive: int | None, as_json: bool, **asked: Any) -> None:
    """Estimate memory, disk and SSD writes for a number of sessions.

    Uses the worker's own estimator, for this machine or, with --device-memory and --dtype, for another one.
    Reads weights only with --kv-bits, and for models with windows.
    """
    from worker.sizing import Load, measure, plan

    settings, load = given.load(), Load(**asked)
    loaded, draft, dtype = _loaded(settings)
    max_context = min(settings.max_context or loaded.context_tokens, loaded.context_tokens)
    if settings.cache_policy.window is None and (context := load.context_tokens) > max_context:
        raise SettingsError(f"--context is {context}; under the policy full it must be {max_context} or less")
    block, limit_bytes = CONSTANTS.block_tokens, settings.device_memory
    sizes = {"block": block, "max_context": max_context}
    try:
        sized = measure(loaded, settings.cache_policy, draft=draft, limit_bytes=limit_bytes, **sizes)
    except ValueError as error:
        raise SettingsError(f"--cache-policy: {error}") from None
    max_disk = 0 if settings.snapshots == "off" else settings.max_disk
    max_batch = settings.max_batch
    found = plan(sized, load, max_batch=max_batch, max_memory=None, max_disk=max_disk, **sizes)
    per_day = found.written_bytes_per_day
    drive_writes = None if drive is None or per_day is None else per_day / drive
    if as_json:
        more = {"expected_tokens_per_s": None, "drive_writes_per_day": drive_writes}
        kv = {"kv_bytes_per_token": sized.kv.bytes_per_token}
        click.echo(json.dumps({"model": loaded.name, **asdict(load), **asdict(found), **kv, **more}))
        return
    form = f"KV {settings.kv_bits or 'full'}, policy {policy_text(settings.cache_policy)}"
    table(("model", f"{loaded.name}, {dtype}, {form}"), _rows(settings, sized, load, found, drive_writes))


def weigh(settings: Settings) -> Needs:
    """Return the memory that a model needs with its draft model. Raises `ModelError`, `SettingsError`."""
    from worker.sizing import device_bytes, measure
    from worker.supervisor import Needs

    loaded, draft, _ = _loaded(settings)
    max_context = min(settings.max_context or loaded.context_tokens, loaded.context_tokens)
    block, sizes = CONSTANTS.block_tokens, {"max_batch": settings.max_batch, "max_context": max_context}
    policy = settings.cache_policy
    try:
        sized = measure(loaded, policy, draft=draft, block=block, max_context=max_context, limit_bytes=None)
    except ValueError as error:
        raise SettingsError(f"cache_policy: {error}") from None
    least = sized.estimator.kv.held(block, ahead=block)
    usual = max(least, sized.kv.held(min(max_context, _USUAL_TOKENS), ahead=block))
    return Needs(
        folder=str(loaded.folder.absolute()),
        model=loaded.name,
        context_tokens=max_context,
        sampling=loaded.sampling,
        reasoning=loaded.tokenizer.markup.has_reasoning,
        makes=loaded.makes(),
        weight_bytes=loaded.weight_bytes,
        model_changed_s=loaded.changed_s,
        least_bytes=device_bytes(sized, least, block=block, **sizes),
        usual_bytes=device_bytes(sized, usual, block=block, **sizes),
        memory_bytes=sized.estimator.limit_bytes,
        draft_folder=str(draft.folder.absolute()) if draft is not None else None,
    )


def _loaded(settings: Settings) -> tuple[LoadedModel, LoadedModel | None, str]:
    """Load the model and the draft model, without their weights; also return the dtype of the weights."""
    from worker.models import model as models

    dtype = settings.dtype if settings.dtype != "auto" else models.default_dtype()

    def load(spec: str | None, kv_bits: int | None) -> LoadedModel:
        with terminal_progress(lambda what: click.echo(what, err=True)) as progress:
            folder = models.resolve(spec, settings.data_dir, dtype=dtype, progress=progress)
        return models.load(folder, dtype=dtype, kv_bits=kv_bits, lazy=True)

    draft = load(settings.draft_model, None) if settings.draft_model is not None else None
    return load(settings.model, settings.kv_bits), draft, dtype


def _rows(
    settings: Settings, sized: Sized, load: Load, found: Plan, drive_writes: float | None
) -> list[tuple[str, str]]:
    device, weights, room = map(
        in_units, (found.device_memory_bytes, found.weight_bytes, found.kv_limit_bytes)
    )
    session, bounded = in_units(found.session_kv_bytes), in_units(sized.kv.bounded_bytes)
    grows = f", {in_units(sized.kv.bytes_per_token)} more with each" if sized.kv.bytes_per_token else ""
    at_most = f"; windows and states take {bounded} at the most" if sized.kv.bounded_bytes else ""
    of = f"of {load.sessions} sessions"
    running = min(settings.max_batch, found.sessions_on_device)
    rows = [
        ("device memory", f"{device}: weights {weights}, KV {room}, the rest for steps"),
        ("a session's KV", f"{session} for {load.context_tokens} tokens{grows}{at_most}"),
        ("on the device", f"{found.sessions_on_device} {of}; up to {running} answer at once"),
        *_disk_rows(settings, found, drive_writes, of),
    ]
    if found.sessions_nowhere:
        rows.append(("prefilled again", f"{found.sessions_nowhere} {of}, whole, when they come back"))
    generated, prefilled = found.wanted_generated_tokens_per_s, found.wanted_prefilled_tokens_per_s
    more = ", and what is prefilled again" if found.sessions_nowhere else ""
    wanted = f"{generated:.4g} generated, {prefilled:.4g} prefilled{more}"
    return [*rows, ("tokens/s wanted", wanted), ("tokens/s to expect", _UNKNOWN)]


def _disk_rows(settings: Settings, found: Plan, drive_writes: float | None, of: str) -> list[tuple[str, str]]:
    if found.session_disk_bytes is None:
        why = "snapshots are off" if settings.snapshots == "off" else "this model's KV cannot be kept there"
        return [("on the SSD", f"nothing: {why}")]
    whole, session = in_units(found.disk_bytes or 0), in_units(found.session_disk_bytes)
    holds = f"max_disk {in_units(settings.max_disk)} holds {found.sessions_on_disk} {of}"
    per_day, per_turn = map(in_units, (found.written_bytes_per_day or 0, found.written_bytes_per_turn or 0))
    writes = "" if drive_writes is None else f", {drive_writes:.3g} drive writes a day"
    return [
        ("not on the device", f"{found.sessions_off_device} {of}, restored from the SSD or prefilled again"),
        ("on the SSD", f"{session} a session, {whole} in all; {holds}"),
        ("written to the SSD", f"{per_turn} a turn, {per_day} a day{writes}"),
    ]
