"""Fetches models from the Hugging Face hub into the hub's own cache. Must not import MLX.

huggingface_hub owns the cache, its environment variables (HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, HF_TOKEN) and
the links of a snapshot. This module downloads the files first, one by one, since the library neither resumes
a file that an earlier process began, nor checks its digest (ADR 0054). So a snapshot exists only when all of
its files are complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from logging import ERROR
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Self

from worker.process.formatting import size

from .gguf_family import FAMILIES, mlx_name, quantisation_of, unsupported
from .known import memory_bytes
from .model_files import GGUF_NAMES, ModelError, one_line, read_json, silent, weight_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from huggingface_hub.hf_api import ModelInfo, RepoSibling

    from .model_files import Progress

#: The top-level files of a repository that mlx-lm fetches; and `_SAYING`, files that `pooling` reads.
_PATTERNS: Final = (
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
_SAYING: Final = ("1_Pooling/config.json", "1_LogitScore/config.json")
#: Patterns of all other files in folders, to ignore.
_FOLDERS: Final = ("[!1]*/*", "1_[!PL]*/*")
_WEIGHTS: Final = "model*.safetensors"
#: The default quantisation of GGUF files, as in other programs.
_USUAL: Final = "Q4_K_M"
_HOSTS: Final = re.compile(r"^(https://)?(hf\.co|huggingface\.co)/")
_ID: Final = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(:[\w.-]+)?")
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PART: Final = ".part"
_PARTIAL: Final = 206
#: Attempts in a row that may fail without receiving any data.
_RETRIES: Final = 2
_ITEM_BITS: Final = {"float32": 32, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True, slots=True)
class _File:
    """One file of a repository. `digest` is its sha256 if it is in LFS, otherwise git's sha1."""

    name: str
    size_bytes: int
    digest: str
    is_large: bool

    @classmethod
    def of(cls, told: RepoSibling) -> Self:
        """Return a file as the hub describes it."""
        if told.lfs:
            return cls(told.rfilename, told.lfs.size or 0, told.lfs.sha256, is_large=True)
        return cls(told.rfilename, told.size or 0, str(told.blob_id), is_large=False)

    def digest_of(self, path: Path) -> str:
        """Compute the digest of a downloaded file."""
        from huggingface_hub.utils.sha import git_hash, sha_fileobj

        with path.open("rb") as file:
            return sha_fileobj(file).hex() if self.is_large else git_hash(file.read())


def is_id(spec: str) -> bool:
    """Return whether `spec` can be a hub id: org/name, or org/name:QUANTISATION of a GGUF file."""
    return _ID.fullmatch(plain(spec)) is not None and not fnmatch(spec, GGUF_NAMES)


def plain(spec: str) -> str:
    """Remove the hub's web address from the front of a model's name."""
    return _HOSTS.sub("", spec)


def cache_folder() -> Path:
    """Return the folder of the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def repository_folder(hub_id: str) -> Path:
    """Return the folder of a repository in the hub's cache, which need not exist."""
    return cache_folder() / f"models--{hub_id.replace('/', '--')}"


def repository_of(path: Path) -> Path | None:
    """Return the repository's folder in the hub's cache that contains `path`; None outside the cache."""
    return next((folder for folder in path.parents if folder.parent == cache_folder()), None)


def snapshot_folder(repository: Path) -> Path | None:
    """Return a repository's last fetched snapshot of the main branch, else the newest snapshot, or None."""
    main = repository / "refs" / "main"
    if main.exists() and (folder := repository / "snapshots" / main.read_text().strip()).is_dir():
        return folder
    snapshots = repository.glob("snapshots/*")
    return max(snapshots, key=lambda folder: folder.stat().st_mtime, default=None)


def downloaded(spec: str) -> Path | None:
    """Return the folder or GGUF file that was downloaded for `spec` earlier; None if none is complete.

    Contacts no server. Raises `ModelError` if `spec` is not a hub id.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    hub_id, quantisation = _split(spec)
    with _told(hub_id), contextlib.suppress(LocalEntryNotFoundError):
        whole = Path(
            snapshot_download(
                hub_id, local_files_only=True, allow_patterns=[*_PATTERNS], ignore_patterns=[*_FOLDERS]
            )
        )
        if not quantisation and any(whole.glob(_WEIGHTS)):
            return whole
    folder = snapshot_folder(repository_folder(hub_id))
    name = folder and _gguf_name([path.name for path in folder.glob(GGUF_NAMES)], quantisation)
    return folder / name if folder and name else None


def fetch(spec: str, progress: Progress = silent, dtype: str = "keep") -> Path:
    """Download missing files of a model on the hub; return its folder or GGUF file. Raises `ModelError`.

    Resumes files that an earlier call began. Refuses weights that exceed the free disk space or, loaded as
    `dtype`, the machine's memory. `progress` counts bytes. If the hub cannot be reached, returns the model
    that was downloaded before.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, logging  # type: ignore[attr-defined]

    hub_id, quantisation = _split(spec)
    logging.set_verbosity(ERROR)  # this module reports errors and progress
    disable_progress_bars()
    try:
        with _told(hub_id):
            found = HfApi().model_info(hub_id, files_metadata=True)
    except _UnreachableError as error:
        known = downloaded(spec)
        if known is None:
            raise ModelError(f"{spec} is not in the hub's cache and {error}") from None
        return known
    files = _wanted(found, spec, quantisation)
    with _told(hub_id):
        _bring(hub_id, found, files, progress, dtype)
        names = [file.name for file in files]
        try:
            folder = Path(snapshot_download(hub_id, allow_patterns=names, ignore_patterns=[*_FOLDERS]))
        except LocalEntryNotFoundError as error:
            raise _UnreachableError(one_line(error)) from None
    return folder / names[0] if fnmatch(names[0], GGUF_NAMES) else folder


def _split(spec: str) -> tuple[str, str]:
    hub_id, _, quantisation = plain(spec).partition(":")
    return hub_id, quantisation


class _UnreachableError(ModelError):
    """The hub does not answer, or HF_HUB_OFFLINE forbids asking it."""


@contextlib.contextmanager
def _told(hub_id: str) -> Iterator[None]:
    """Convert exceptions of huggingface_hub within the block to `ModelError`s of one line."""
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT

    try:
        yield
    except ModelError:
        raise
    except errors.HFValidationError as error:
        raise ModelError(f"{hub_id!r} is not a hub id: {one_line(error)}") from None
    except errors.OfflineModeIsEnabled:
        raise _UnreachableError(
            "the hub cannot be reached while HF_HUB_OFFLINE is set; unset it once to download it"
        ) from None
    except errors.GatedRepoError:
        raise ModelError(
            f"{hub_id} is gated; accept its terms at {ENDPOINT}/{hub_id}, and set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{ENDPOINT} has no model {hub_id} that is open to you; check the name, or set HF_TOKEN if it is"
            " private"
        ) from None
    except errors.HfHubHTTPError as error:
        raise ModelError(f"the hub refused {hub_id}: {one_line(error)}") from None
    except OSError as error:
        raise ModelError(f"{hub_id} cannot be downloaded: {one_line(error)}") from None
    except Exception as error:
        if _is_of_the_connection(error):
            raise _UnreachableError(
                f"the hub cannot be reached at {ENDPOINT} ({one_line(error)}); try again later, as a"
                " download goes on where it stopped, or name a mirror with HF_ENDPOINT"
            ) from None
        raise


def _wanted(found: ModelInfo, spec: str, quantisation: str) -> list[_File]:
    """Choose the files to fetch, weights last; raises `ModelError` if they form no usable model."""
    there = [
        _File.of(one) for one in found.siblings or () if "/" not in one.rfilename or one.rfilename in _SAYING
    ]
    if not quantisation and any(fnmatch(file.name, _WEIGHTS) for file in there):
        chosen = [file for file in there if any(fnmatch(file.name, pattern) for pattern in _PATTERNS)]
        return sorted(chosen, key=lambda file: (fnmatch(file.name, _WEIGHTS), file.size_bytes))
    ggufs = [file.name for file in there if fnmatch(file.name, GGUF_NAMES)]
    if not ggufs:
        raise ModelError(
            f"{spec} has no model*.safetensors and no .gguf file; for MLX this model is usually named"
            f" {mlx_name(found.id)}"
        )
    name = _gguf_name(ggufs, quantisation)
    if name is None:
        raise _no_quantisation(found.id, ggufs, quantisation)
    family = (found.gguf or {}).get("architecture")
    if family is not None and family not in FAMILIES:
        raise ModelError(unsupported(f"{found.id}/{name}", family, name))
    return [file for file in there if file.name == name]


def _no_quantisation(hub_id: str, names: Sequence[str], quantisation: str) -> ModelError:
    choice = sorted({quantisation_of(Path(name).stem) for name in names if _is_whole(name)})
    return ModelError(
        f"{hub_id} has no GGUF file {quantisation or _USUAL}; it has"
        f" {', '.join(choice) or 'only files in pieces, which cannot be used'}: name one as"
        f" {hub_id}:QUANTISATION"
    )


def _gguf_name(names: Sequence[str], quantisation: str) -> str | None:
    """Return the name of the GGUF file with this quantisation, or None.

    With an empty `quantisation`, return the only file, or the one of the default quantisation.
    """
    whole = [*filter(_is_whole, names)]
    if not quantisation and len(whole) == 1:
        return whole[0]
    wanted = (quantisation or _USUAL).upper()
    return next((name for name in whole if quantisation_of(Path(name).stem).upper() == wanted), None)


def _is_whole(name: str) -> bool:
    """Return whether a GGUF file has a whole language model: no piece of one, and no image projector."""
    return re.search(r"(?i)-\d{5}-of-\d{5}\.gguf$|\bmmproj\b", name) is None


def _bring(hub_id: str, found: ModelInfo, files: Sequence[_File], progress: Progress, dtype: str) -> None:
    """Check disk and memory, then download missing files into the cache. Raises `ModelError`."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE

    blobs = repository_folder(hub_id) / "blobs"  # not `found.id`, which differs after a renaming
    missing = _missing(hub_id, files, blobs)
    total = sum(file.size_bytes for file in missing)
    done = 0

    def advance(num: int) -> None:
        nonlocal done
        done += num
        progress(done, total, f"downloading {hub_id}")

    weights_bytes = sum(
        file.size_bytes for file in files if file.name.lower().endswith((".safetensors", ".gguf"))
    )
    if fnmatch(files[0].name, GGUF_NAMES):
        num = (found.gguf or {}).get("total")
        _check_memory(hub_id, num * _ITEM_BITS.get(dtype, 16) // 8 if num else weights_bytes)
    for file in missing:
        if file.name.endswith(".safetensors"):  # config.json is there by now
            config = next((blobs / other.digest for other in files if other.name == "config.json"), None)
            bits = weight_bits(read_json(config)) if config is not None else None
            factor = _ITEM_BITS[dtype] / bits if bits and dtype in _ITEM_BITS else 1
            _check_memory(hub_id, int(weights_bytes * factor))
        if file.size_bytes <= MAX_HTTP_DOWNLOAD_SIZE:  # the library downloads larger ones
            _bring_one(hf_hub_url(hub_id, file.name, revision=found.sha), blobs, file, advance)


def _missing(hub_id: str, files: Sequence[_File], blobs: Path) -> list[_File]:
    """Return the files that `blobs` lacks. Raises `ModelError` if they would not fit on the disk."""
    unnamed = next((file.name for file in files if not _DIGEST.fullmatch(file.digest)), None)
    if unnamed is not None:
        raise ModelError(f"the hub gives no checksum of {unnamed} in {hub_id}; use another HF_ENDPOINT")
    blobs.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not (blobs / file.digest).exists()]
    begun = sum(path.stat().st_size for file in missing if (path := _part(blobs, file)).exists())
    more = sum(file.size_bytes for file in missing) - begun
    if more > (free := shutil.disk_usage(blobs).free):
        raise ModelError(
            f"{hub_id} needs {size(more)} in {cache_folder()}, where {size(free)} are free; free"
            " some space, or name another folder with HF_HOME"
        )
    return missing


def _check_memory(hub_id: str, needed_bytes: int) -> None:
    if needed_bytes > (there := memory_bytes()):
        raise ModelError(
            f"{hub_id} needs {size(needed_bytes)} of memory for its weights, and this machine has"
            f" {size(there)}; take a smaller model, or one with fewer bits"
        )


def _bring_one(url: str, blobs: Path, file: _File, advance: Callable[[int], None]) -> None:
    """Download one file, resuming where an earlier process stopped, and check its digest."""
    part = _part(blobs, file)
    with part.open("ab", buffering=2**10) as out:  # less than a piece, which is written at once
        fcntl.flock(out, fcntl.LOCK_EX)  # excludes a process that fetches the same file
        if (blobs / file.digest).exists():
            return
        if out.tell() > file.size_bytes:
            out.truncate(0)
        advance(out.seek(0, os.SEEK_END))
        if out.tell() < file.size_bytes:
            _stream(url, out, advance)
        out.flush()
        if file.digest_of(part) != file.digest:
            out.truncate(0)
            raise ModelError(
                f"{file.name} from {url.partition('/resolve/')[0]} is broken: its checksum is not the hub's;"
                " pull the model again"
            )
        os.fsync(out.fileno())
        part.rename(blobs / file.digest)


def _stream(url: str, out: IO[bytes], advance: Callable[[int], None]) -> None:
    """Append a file's missing bytes. Fails after more than `_RETRIES` attempts in a row without new data."""
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but not in its __all__
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    failed = 0
    while True:
        begun = out.seek(0, os.SEEK_END)
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        headers |= {"Range": f"bytes={begun}-"} if begun else {}
        wait_s = HF_HUB_DOWNLOAD_TIMEOUT
        try:
            with http_stream_backoff(
                "GET", url, headers=headers, timeout=wait_s, retry_on_exceptions=()
            ) as response:
                hf_raise_for_status(response)
                if begun and response.status_code != _PARTIAL:
                    out.truncate(0)
                    advance(-begun)
                for piece in response.iter_bytes():
                    advance(out.write(piece))
        except Exception as error:
            failed = 0 if out.tell() > begun else failed + 1
            if failed > _RETRIES or not _is_of_the_connection(error):
                raise
            time.sleep(failed)
        else:
            return


def _is_of_the_connection(error: Exception) -> bool:
    """Return whether an error is from httpx, whose errors share no base class but `Exception`."""
    return type(error).__module__.partition(".")[0].startswith("httpx")


def _part(blobs: Path, file: _File) -> Path:
    return blobs / (file.digest + _PART)
