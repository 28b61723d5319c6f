"""Metrics that workers and gateways publish. Import them from `messages`."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType


class Histogram(Struct, frozen=True):
    """Counts by upper bound; `counts` has one more entry than `bounds`, for values above the last."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    count: int


class SnapshotCounters(Struct, frozen=True, kw_only=True):
    """Counters of the snapshots; two equations hold at all times.

    `accepted = durable + sum(dropped) + failed + cancelled + in_flight` counts snapshots. `free + held +
    evictable = capacity` counts bytes. `held` bytes must not be evicted now: turns use these blocks, or they
    are being written or loaded. `rejected` counts files that failed a check, `timed_out` loads that the disk
    did not answer in time. The counters of the remote tier (`remote_`): bytes uploaded, bytes downloaded,
    snapshots not uploaded, and calls that failed.
    """

    accepted: int = 0
    durable: int = 0
    dropped: dict[str, int] = {}
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    in_flight_bytes: int = 0
    written_bytes: int = 0
    restored_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    evicted: int = 0
    rejected: int = 0
    timed_out: int = 0
    capacity_bytes: int = 0
    free_bytes: int = 0
    held_bytes: int = 0
    evictable_bytes: int = 0
    remote_put_bytes: int = 0
    remote_fetched_bytes: int = 0
    remote_dropped: int = 0
    remote_failed: int = 0


#: The common name of tenants without counts of their own; no tenant can have it.
OTHER_TENANTS: Final = "_other"
TokenKind = Literal["prefilled", "cached", "restored", "generated"]


class TenantFigures(Struct, frozen=True, kw_only=True):
    """A worker's counts by tenant, empty unless its setting `tenants` enables them.

    The first tenants that a worker serves have their own counts; all others share the name `_other`.
    `requests` counts results by outcome, which is `ok` or an error's code; `sessions` counts sessions with
    waiting or running requests. `cached_tokens` counts tokens whose KV was reused, `restored_tokens` the
    cached tokens whose KV was read from disk.
    """

    requests: dict[str, dict[str, int]] = {}
    sessions: dict[str, int] = {}
    prefilled_tokens: dict[str, int] = {}
    cached_tokens: dict[str, int] = {}
    restored_tokens: dict[str, int] = {}
    generated_tokens: dict[str, int] = {}


#: What a model makes of texts: answers, embeddings, and scores of how well a document answers a question.
Made = Literal["answers", "embeddings", "scores"]
#: The device of a model that is not loaded now: its first request loads it.
UNLOADED: Final = "unloaded"


class Metrics(Struct, frozen=True, kw_only=True, tag_field="type", tag="metrics"):
    """A worker's state, published every few seconds. Times are in seconds, sizes in bytes.

    `waiting` counts the sessions that wait in the worker; `waiting_for_memory` of them wait only for device
    memory. `returned` counts requests handed back to the log's consumer because their tenant has its maximum
    of sessions at work. `ignored` counts, by kind, entries and chunks that no worker can have published.
    `sampling` has the options of a generate that the model's
    authors recommend; the worker applies none by itself. `reasoning` says that the model marks reasoning in
    its answers. A model is asked only for what it `makes`; `weight_bytes` is its size in memory, and
    `model_changed_s` says when its folder's config.json was written, in seconds since 1970. `others` names
    the prefix's other running workers; a worker that `drains` hands its sessions to them. `context_tokens` is
    the most that a session with all of its KV may hold. A `device` of `unloaded` says that the first request
    loads the model.

    `interval_s` is the time until the next message; `max_message_bytes` is the size of the largest request
    that the log takes. `queue_time` and `request_duration` count the appends and generates from the moment
    when the log stored them, by the server's clock: `queue_time` until they began to run, `request_duration`
    until the results of successful ones were stored.
    `decoding_s` is the total time of decoding steps, for tokens per second without idle time; without drafts
    these steps would have taken `draft_saved_s` longer (shorter if negative).
    `by_tenant` is sent only on the metrics subject, never in an answer to a control request.
    """

    worker: str
    version: str
    model: str
    device: str
    others: tuple[str, ...] = ()
    drains: bool = False
    uptime_s: float
    requests: dict[str, dict[str, int]]
    waiting: int
    waiting_for_memory: int
    returned: int = 0
    log_bytes: int = 0
    log_max_bytes: int = 0
    max_message_bytes: int = 0
    ignored: dict[str, int] = {}
    running: int
    sessions: int
    sessions_by_policy: dict[str, int] = {}
    resident_sessions: int
    prefilled_tokens: int
    cached_tokens: int
    generated_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    draft_saved_s: float = 0.0
    recalled_tokens: int = 0
    decoding_s: float = 0.0
    time_to_first_token: Histogram
    time_per_output_token: Histogram
    batch_size: Histogram
    event_loop_lag: Histogram
    interval_s: float = 5.0
    queue_time: Histogram | UnsetType = UNSET
    request_duration: Histogram | UnsetType = UNSET
    resident_kv_bytes: int
    context_tokens: int = 0
    sampling: dict[str, int | float] = {}
    reasoning: bool = False
    makes: tuple[Made, ...] = ("answers",)
    weight_bytes: int = 0
    model_changed_s: float = 0.0
    kv_limit_bytes: int
    device_memory_bytes: int = 0
    mlx_active_bytes: int
    mlx_peak_bytes: int
    estimated_scratch_bytes: int = 0
    measured_scratch_bytes: int = 0
    process_bytes: int
    snapshots: SnapshotCounters
    by_tenant: TenantFigures = TenantFigures()


class GatewayMetrics(Struct, frozen=True, kw_only=True, tag_field="type", tag="gateway"):
    """An HTTP gateway's counts since its start, published every `interval_s` seconds.

    `requests` counts HTTP requests by status, `answers` by how their conversation was found (`begun`,
    `continued`, `forked`, `repeated`), `tokens` by kind (`reused`, `prefilled`, `generated`). `resumed`
    counts answers that another worker continued. `running` and `conversations` are current numbers: requests
    being answered, and conversations known.
    """

    gateway: str
    version: str
    uptime_s: float
    interval_s: float = 5.0
    running: int
    conversations: int
    requests: dict[str, int]
    answers: dict[str, int]
    tokens: dict[str, int]
    resumed: int
