"""Metrics that workers and gateways publish. Import them from `messages`.

The fields of a worker's metrics are also its figures for Prometheus: `_counter`, `_gauge`, `_histogram` and
`_duration` (a histogram of seconds) give a field its help text, and `ops.exposition` exports it.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final, Literal, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

Kind = Literal["counter", "gauge", "histogram"]


class Figure(NamedTuple):
    """How a field is exported to Prometheus."""

    kind: Kind
    #: The help text.
    text: str
    #: A label for each level of a field that is a mapping.
    labels: tuple[str, ...]
    #: The name after `turnkeep_`; if empty, the field's own name with the unit.
    name: str
    unit: str


def _figure(kind: Kind, text: str, *labels: str, name: str = "", unit: str = "") -> Meta:
    return Meta(description=text, extra={"figure": Figure(kind, text, labels, name, unit)})


_counter: Final = partial(_figure, "counter")
_gauge: Final = partial(_figure, "gauge")
_histogram: Final = partial(_figure, "histogram")
_duration: Final = partial(_figure, "histogram", unit="seconds")


class Histogram(Struct, frozen=True):
    """Counts of values by upper bound, not cumulative, with the values' `sum` and `count`.

    `counts` has one more entry than `bounds`, for values above the last bound.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    count: int


class SnapshotCounters(Struct, frozen=True, kw_only=True):
    """Counters of the snapshots; two equations hold at all times.

    `accepted = durable + sum(dropped) + failed + cancelled + in_flight` counts snapshots. `free + held +
    evictable = capacity` counts bytes. `held` bytes must not be evicted now: turns use these blocks, or they
    are being written or loaded.
    """

    accepted: Annotated[int, _counter("Snapshots given to the writer.")] = 0
    durable: Annotated[int, _counter("Snapshots that were written and synced.")] = 0
    dropped: Annotated[dict[str, int], _counter("Snapshots dropped before they were written.", "reason")] = {}
    failed: Annotated[int, _counter("Snapshots that could not be written.")] = 0
    cancelled: Annotated[int, _counter("Snapshots of forgotten sessions.")] = 0
    in_flight: Annotated[int, _gauge("Snapshots queued for the disk.")] = 0
    in_flight_bytes: Annotated[int, _gauge("Size of the snapshots queued for the disk.")] = 0
    written_bytes: Annotated[int, _counter("Bytes written to the disk.")] = 0
    restored_bytes: Annotated[int, _counter("Bytes read from the disk.")] = 0
    stored: Annotated[int, _gauge("Snapshots on the disk.")] = 0
    stored_bytes: Annotated[int, _gauge("Size of the snapshots on the disk.")] = 0
    evicted: Annotated[int, _counter("Snapshots evicted to make room.")] = 0
    rejected: Annotated[int, _counter("Snapshot files that failed a check.")] = 0
    timed_out: Annotated[int, _counter("Restores that the disk did not answer in time.")] = 0
    capacity_bytes: Annotated[int, _gauge("Disk space for snapshots.")] = 0
    free_bytes: Annotated[int, _gauge("Free disk space for snapshots; negative above a limit.")] = 0
    held_bytes: Annotated[int, _gauge("Disk space that must not be evicted now.")] = 0
    evictable_bytes: Annotated[int, _gauge("Disk space that eviction can free.")] = 0
    remote_put_bytes: Annotated[int, _counter("Bytes put in the remote tier.", name="remote_put_bytes")] = 0
    remote_fetched_bytes: Annotated[
        int, _counter("Bytes fetched from the remote tier.", name="remote_fetched_bytes")
    ] = 0
    remote_dropped: Annotated[
        int, _counter("Snapshots that were not put in the remote tier.", name="remote_dropped")
    ] = 0
    remote_failed: Annotated[int, _counter("Calls of the remote tier that failed.", name="remote_failed")] = 0


#: The common name of tenants without counts of their own; no tenant can have it.
OTHER_TENANTS: Final = "_other"
TokenKind = Literal["prefilled", "cached", "restored", "generated"]
_ByTenant = dict[str, int]


class TenantFigures(Struct, frozen=True, kw_only=True):
    """A worker's counts by tenant, empty unless its setting `tenants` enables them.

    The first tenants that a worker serves have their own counts; all others share the name `_other`.
    `requests` counts results by outcome, which is `ok` or an error's code. `cached_tokens` counts tokens
    whose KV was reused, `restored_tokens` the cached tokens whose KV was read from disk.
    """

    requests: Annotated[
        dict[str, dict[str, int]], _counter("Requests with a result, by tenant.", "outcome")
    ] = {}
    sessions: Annotated[_ByTenant, _gauge("Sessions with requests that wait or run.")] = {}
    prefilled_tokens: Annotated[_ByTenant, _counter("Prompt tokens that were run, by tenant.")] = {}
    cached_tokens: Annotated[_ByTenant, _counter("Prompt tokens whose KV was reused, by tenant.")] = {}
    restored_tokens: Annotated[_ByTenant, _counter("Tokens read from disk, by tenant.")] = {}
    generated_tokens: Annotated[_ByTenant, _counter("Tokens of answers, by tenant.")] = {}


#: What a model makes of texts: answers, embeddings, and scores of how well a document answers a question.
Made = Literal["answers", "embeddings", "scores"]
#: The device of a model that is not loaded now: its first request loads it.
UNLOADED: Final = "unloaded"


class Totals(Struct, kw_only=True):
    """The part of a worker's metrics that the worker counts directly in an object of this class."""

    prefilled_tokens: Annotated[int, _counter("Prompt tokens that were run.")]
    cached_tokens: Annotated[int, _counter("Prompt tokens whose KV was reused.")]
    generated_tokens: Annotated[int, _counter("Tokens of answers.")]
    draft_tokens: Annotated[int, _counter("Tokens that were speculated.")] = 0
    accepted_draft_tokens: Annotated[int, _counter("Speculated tokens that were right.")] = 0
    draft_saved_s: Annotated[float, _gauge("Time that speculation has saved.")] = 0.0
    recalled_tokens: Annotated[int, _counter("Tokens whose KV an answer has recalled from SSD.")] = 0
    decoding_s: Annotated[float, _counter("Total time of decoding steps.")] = 0.0
    audited_blocks: Annotated[int, _counter("Restored blocks whose KV was computed again.")] = 0
    wrong_blocks: Annotated[int, _counter("Restored blocks whose KV was wrong.")] = 0


class Metrics(Totals, frozen=True, kw_only=True, tag_field="type", tag="metrics"):  # type: ignore[misc]
    """A worker's state, published every few seconds. Times are in seconds, sizes in bytes.

    `queue_time` and `request_duration` count the appends and generates from the moment when the log stored
    them, by the server's clock: `queue_time` until they began to run, `request_duration` until the results of
    successful ones were stored. Without drafts, decoding would have taken `draft_saved_s` longer (shorter if
    negative) than `decoding_s`.
    """

    worker: str
    version: str
    model: str
    device: Annotated[str, Meta(description="unloaded if the first request loads the model")]
    others: Annotated[tuple[str, ...], Meta(description="the prefix's other running workers")] = ()
    drains: Annotated[bool, _gauge("1 while the worker gives its sessions to the others.")] = False
    recorded: Annotated[
        bool, _gauge("0 while JetStream stores nothing of the worker, as on a full disk.")
    ] = True
    refusal: Annotated[
        str, Meta(description="why JetStream stores nothing, or why an unloaded model cannot be loaded")
    ] = ""
    uptime_s: Annotated[float, _gauge("Time since the worker started.")]
    requests: Annotated[
        dict[str, dict[str, int]],
        _counter("Requests with a result, by type and outcome.", "type", "outcome"),
    ]
    waiting: Annotated[int, _gauge("Sessions that wait in the worker.", name="waiting_sessions")]
    waiting_for_memory: Annotated[
        int, _gauge("Waiting sessions that lack only device memory.", name="memory_waiting_sessions")
    ]
    returned: Annotated[
        int, _gauge("Requests that wait in the log for their tenant's share.", name="returned_requests")
    ] = 0
    log_bytes: Annotated[int, _gauge("Size of the log's stream.")] = 0
    log_max_bytes: Annotated[int, _gauge("Limit of the log, which refuses requests at 15/16.")] = 0
    max_message_bytes: Annotated[int, Meta(description="size of the largest request that the log takes")] = 0
    ignored: Annotated[
        dict[str, int],
        _counter("Entries and chunks that no worker can have published.", "kind", name="ignored_entries"),
    ] = {}
    running: Annotated[
        int, _gauge("Sessions whose prompt or answer runs on the device.", name="running_sessions")
    ]
    sessions: Annotated[int, _gauge("Sessions in memory.")]
    sessions_by_policy: Annotated[
        dict[str, int], _gauge("Sessions in memory, by cache policy.", "policy", name="policy_sessions")
    ] = {}
    resident_sessions: Annotated[int, _gauge("Sessions with KV on the device.")]
    time_to_first_token: Annotated[
        Histogram,
        _duration("From a generate's arrival to its first token."),
    ]
    time_per_output_token: Annotated[Histogram, _duration("Time between two tokens of an answer.")]
    batch_size: Annotated[Histogram, _histogram("Answers that a step decodes.")]
    event_loop_lag: Annotated[
        Histogram,
        _duration("How late the event loop runs a task that is due."),
    ]
    interval_s: Annotated[
        float, _gauge("Time between two metrics messages.", name="metrics_interval_seconds")
    ] = 5.0
    queue_time: (
        Annotated[
            Histogram,
            _duration("From the log's time of a request until it runs."),
        ]
        | UnsetType
    ) = UNSET
    request_duration: (
        Annotated[
            Histogram,
            _duration("From the log's time of a request to its result."),
        ]
        | UnsetType
    ) = UNSET
    resident_kv_bytes: Annotated[int, _gauge("KV on the device.")]
    context_tokens: Annotated[int, _gauge("Most tokens of a session with all of its KV.")] = 0
    sampling: Annotated[
        dict[str, int | float],
        Meta(
            description="options that the model's authors recommend; applied only if a request asks for them"
        ),
    ] = {}
    reasoning: Annotated[bool, Meta(description="whether the model marks reasoning in its answers")] = False
    vision: Annotated[bool, Meta(description="whether the model sees images")] = False
    makes: Annotated[tuple[Made, ...], Meta(description="what the model can be asked for")] = ("answers",)
    weight_bytes: Annotated[int, _gauge("Size of the model's weights in memory.")] = 0
    model_changed_s: Annotated[
        float, Meta(description="when the model's config.json was written, in seconds since 1970")
    ] = 0.0
    kv_limit_bytes: Annotated[int, _gauge("Limit of KV on the device.")]
    device_memory_bytes: Annotated[int, _gauge("Limit of all memory on the device.")] = 0
    mlx_active_bytes: Annotated[int, _gauge("Memory that MLX has in use.")]
    mlx_peak_bytes: Annotated[int, _gauge("Most memory that MLX had in use.")]
    estimated_scratch_bytes: Annotated[int, _gauge("Scratch memory of a step, as estimated.")] = 0
    measured_scratch_bytes: Annotated[int, _gauge("Scratch memory of a step, as measured.")] = 0
    process_bytes: Annotated[int, _gauge("Resident memory of the process.")]
    snapshots: SnapshotCounters
    by_tenant: Annotated[
        TenantFigures, Meta(description="empty in answers to control requests, which all tenants can read")
    ] = TenantFigures()


class GatewayMetrics(Struct, frozen=True, kw_only=True, tag_field="type", tag="gateway"):
    """An HTTP gateway's counts since its start, published every `interval_s` seconds."""

    gateway: str
    version: str
    uptime_s: float
    interval_s: float = 5.0
    running: Annotated[int, Meta(description="HTTP requests that are being answered now")]
    conversations: Annotated[int, Meta(description="conversations that the gateway knows now")]
    requests: Annotated[dict[str, int], Meta(description="HTTP requests by status")]
    answers: Annotated[
        dict[str, int],
        Meta(description="by how their conversation was found: begun, continued, forked, repeated"),
    ]
    tokens: Annotated[dict[str, int], Meta(description="by kind: reused, prefilled, generated")]
    resumed: Annotated[int, Meta(description="answers that another worker continued")]
