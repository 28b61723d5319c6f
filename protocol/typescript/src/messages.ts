// The messages of the protocol, written by `python -m turnkeep_client.typescript`: change the messages there.
// A field of a result that is left out has its default.

/**
 * Add exactly one of `messages`, `text`, `tokens` to the session and prefill it at once.
 *
 * `tools` and `chat_template_kwargs` become those of the session, as with a generate.
 */
export interface Append {
  type: "append";
  messages?: readonly Message[] | null;
  /** raw text, tokenised without the chat template */
  text?: string | null;
  tokens?: readonly number[] | null;
  /** whether to parse special tokens that are spelled out; by default in text, and not in messages */
  special_tokens?: boolean | null;
  /** variables for the chat template, such as enable_thinking */
  chat_template_kwargs?: Record<string, unknown> | null;
  /** seconds after the log stored the request */
  deadline_s?: number | null;
  /** among waiting requests, higher first */
  priority?: number;
  tools?: readonly Tool[] | null;
  /** 1 to 64 of the characters A-Z a-z 0-9 _ -, the first one a letter or a digit */
  id: string;
  /** tokens from the session's start */
  expect_position?: number | null;
}

/**
 * Answer to `append`; `tokens = cached_tokens + prefilled_tokens`: all session tokens but the last.
 *
 * The following generate runs the last token, whose logits give the answer's first token. After an empty
 * append the counts are zero. `kv_live_bytes` is the size of the KV that the next token sees; under `paged` it
 * includes the sketches (2-bit copies of the keys) of all tokens. `rewritten_from` is set if the chat template
 * changed earlier text, or the model's tokenizer differs from the previous model's: the tokens from that
 * position on were replaced and prefilled again. `warnings` are as in a `Generated`.
 */
export interface Appended {
  type: "appended";
  tokens: number;
  cached_tokens: number;
  prefilled_tokens: number;
  kv_live_bytes: number;
  seconds: number;
  warnings?: readonly string[];
  id: string;
  seq: number;
  position: number;
  repeat_of?: number | null;
  cache?: SessionCache | null;
  visible_from?: number | null;
  change?: Change | null;
  model?: Model | null;
  previous_model?: Model | null;
  rewritten_from?: number | null;
  asked?: Asked;
}

/**
 * The request that a result answers, and the time at which the log stored the request.
 *
 * Each result has this in its field `asked`, which `decode_asked` reads. So the results of a session, in their
 * order, say all that happened in it.
 *
 * `request` is the request as it was sent, and `headers` are its headers whose names begin with `Turnkeep-`.
 * If these are too long, they are left out: `link` names the last of the messages of the log that together
 * have the complete `Asked`. An invalid request is a string here: its first 1,024 bytes, as UTF-8.
 */
export interface Asked {
  stored: string;
  request?: unknown;
  link?: string;
  headers?: Record<string, string>;
}

/**
 * Which tokens keep their KV. A missing `policy` is the worker's default.
 *
 * `full` keeps all tokens. `sink_window` keeps the first `sink` tokens (4 by default) and the last `window`
 * (1024); a token sees only these, the session may continue without end, and its KV has a fixed size. `paged`
 * keeps all tokens on SSD and `resident` of them (4096) on the device: the first and the last ones, the spans
 * `pin` (start, end), and the chunks that matter most to the current turn. An answer sees the tokens on the
 * device; a prompt sees all tokens, read from SSD. With `snapshots` `none`, the session's KV is never written
 * to disk; `paged` cannot have it.
 */
export interface CachePolicy {
  policy?: "full" | "paged" | "sink_window" | null;
  sink?: number | null;
  window?: number | null;
  resident?: number | null;
  pin?: readonly (readonly [number, number])[] | null;
  snapshots?: "none" | null;
}

/** A part of the tool call number `index`, from 0: `id` and `name` once, then text of its arguments. */
export interface CallPart {
  index: number;
  id?: string | null;
  name?: string | null;
  arguments?: string;
}

/** One tool call of an answer, in OpenAI's shape. */
export interface Called {
  id: string;
  function: CalledFunction;
  type?: string;
}

/** The function of a tool call; `arguments` is JSON as text. */
export interface CalledFunction {
  name: string;
  arguments: string;
}

/** Stop a waiting or running request of the session (on `ctl`). Answered once its result is in the log. */
export interface CancelRequest {
  type: "cancel";
  /** 1 to 64 of the characters A-Z a-z 0-9 _ -, the first one a letter or a digit */
  id: string;
}

/** Answer to `cancel`: `was` is the state of the request when it was cancelled. */
export interface Cancelled {
  type: "cancelled";
  id: string;
  /** later versions have other values too */
  was: "waiting" | "running" | (string & {});
}

/**
 * How a request changed the session's tokens, so that workers can read a log without a model.
 *
 * The first `kept` tokens stay; after them come those of the `input`, then the answer's. `input` is base64 of
 * the token ids as LEB128 numbers; if that is long, it is stored in other messages of the log, which the
 * result's header `Turnkeep-Parts` names. If the session was tokenised again for another tokenizer, the first
 * `raw` tokens are raw content. With `holds_answer`, the input ends with the answer, since the result's
 * `tokens` are ids of another tokenizer. `images` are the images among the input's tokens.
 */
export interface Change {
  kept: number;
  input?: string;
  raw?: number;
  holds_answer?: boolean;
  images?: readonly PlacedImage[];
}

/** The answer is one of the texts in `choices`. */
export interface ChoiceFormat {
  type: "choice";
  choices: readonly string[];
}

/**
 * A part of an answer: some of its tokens, and their text; `i` is the index of the first token.
 *
 * `text` has only whole characters. `logprobs` has an item for each token, if the request asks for them.
 * `reasoning` and `tool_calls` are not in the text; a call is sent when it is complete. The first chunk has
 * the `warnings` of the result.
 *
 * `seq` is the generate's stream sequence, or that of the one it repeats: ignore chunks with another `seq`.
 */
export interface Chunk {
  i: number;
  tokens: readonly number[];
  text: string;
  seq?: number | null;
  logprobs?: readonly TokenLogprob[];
  reasoning?: string;
  tool_calls?: readonly CallPart[];
  warnings?: readonly string[];
}

/**
 * End the session. Only an `open` can use its name again; after some days it is removed from the log.
 *
 * `forget` removes the session's content, even if it is closed already: at once from the worker's disk, except
 * prefixes that other sessions share, and soon from the log, except the close and its result. Snapshots of
 * tokens that the session had before go too: those that a rewind or the chat template removed, those of a
 * cancelled request, and those of closed sessions of this name that are still in the log.
 *
 * `cancel` also cancels the session's earlier appends and generates without a result; if no worker runs, the
 * next worker cancels them before it continues one. With `cancel` or `forget`, even a session of which no
 * request has run can be closed.
 */
export interface Close {
  type: "close";
  forget?: boolean;
  cancel?: boolean;
  /** 1 to 64 of the characters A-Z a-z 0-9 _ -, the first one a letter or a digit */
  id: string;
  /** tokens from the session's start */
  expect_position?: number | null;
}

/**
 * Answer to `close`; `position` is the session's last one.
 *
 * After `forget`, `forgotten` counts the removed snapshots and `removed_entries` the entries removed from the
 * log. `settled` is false if some of the session's own tokens may be left on the disk: the disk did not answer
 * in time, a file could not be removed, another session's turn uses a snapshot, there are snapshots that a
 * worker cannot read, or another worker did not answer. `settled` says nothing about workers that are not
 * running. Tokens shared with another open session are not the session's own.
 */
export interface Closed {
  type: "closed";
  forgotten?: number | null;
  removed_entries?: number | null;
  settled?: boolean;
  id: string;
  seq: number;
  position: number;
  repeat_of?: number | null;
  asked?: Asked;
}

/**
 * Count the tokens that a generate with this input would add; nothing runs (on `ctl`).
 *
 * For a session that does not exist or is closed, count the tokens that a new one would begin with. `tools`
 * that differ from the session's are counted as a generate would add them.
 */
export interface CountRequest {
  type: "count";
  messages?: readonly Message[] | null;
  /** raw text, tokenised without the chat template */
  text?: string | null;
  tokens?: readonly number[] | null;
  /** whether to parse special tokens that are spelled out; by default in text, and not in messages */
  special_tokens?: boolean | null;
  raw?: boolean;
  tools?: readonly Tool[] | null;
  /** variables for the chat template, such as enable_thinking */
  chat_template_kwargs?: Record<string, unknown> | null;
}

/**
 * Answer to `count`: with the input the session would have `position` tokens, the last `tokens` new.
 *
 * `rewritten_from` is set if the chat template would change earlier text: then `tokens` counts all tokens from
 * that position on.
 */
export interface Counted {
  type: "counted";
  tokens: number;
  position: number;
  rewritten_from?: number | null;
}

/** Why workers gave up the request at sequence `seq`. Stored on the session's subject `dead`. */
export interface DeadLetter {
  type: "dead";
  seq: number;
  id: string | null;
  /** the request's type */
  request: string;
  position: number;
  attempts: number;
  reason: string;
  worker: string;
  model: string;
}

/**
 * Embed each of the `inputs`, texts or lists of token ids (on the `ctl` of any session).
 *
 * Vectors are truncated to `dimensions` numbers. `input_tokens` cuts each input to at most so many tokens, and
 * to those that fit the model; without it, an input that does not fit is refused. The log stores neither the
 * request nor the answer.
 */
export interface EmbedRequest {
  type: "embed";
  inputs: readonly (string | readonly number[])[];
  dimensions?: number | null;
  input_tokens?: number | null;
}

/**
 * Answer to `embed`: a vector for each input, normalised to Euclidean norm 1, and each input's tokens.
 *
 * A vector is base64 of 32-bit floats, little-endian. `tokens` has the number of tokens of each input. `model`
 * is the name of the worker's model.
 */
export interface Embedded {
  type: "embedded";
  vectors: readonly string[];
  tokens: readonly number[];
  model: string;
}

/**
 * Answer to a request that failed and changed nothing. `id` is null if the body has no valid id.
 *
 * `field` is the path of the field that is wrong, if it is one, such as `messages[0].role`. `limit` is there
 * if the context is exceeded.
 */
export interface Failed {
  type: "failed";
  id: string | null;
  /** later versions have other values too */
  code: "invalid_request" | "id_conflict" | "position_conflict" | "unknown_session" | "context_exceeded" | "memory_exceeded" | "overloaded" | "expired" | "history_diverged" | "internal" | (string & {});
  message: string;
  retryable: boolean;
  field?: string | null;
  limit?: TokenLimit | null;
  seq?: number | null;
  position?: number | null;
  repeat_of?: number | null;
  asked?: Asked;
}

/**
 * Where a fork begins: with the first `position` tokens of another session of the tenant.
 *
 * Without `position`: with all tokens that the session has after its last result. With `expect_position`, the
 * fork is refused unless the session then has that many tokens.
 */
export interface ForkPoint {
  /** 1 to 64 of the characters A-Z a-z 0-9 _ -, the first one a letter or a digit */
  session: string;
  /** tokens from the session's start */
  position?: number | null;
  /** tokens from the session's start */
  expect_position?: number | null;
}

/** The function that a tool call names, in OpenAI's shape. */
export interface Function {
  name: string;
  arguments: string;
}

/** An HTTP gateway's counts since its start, published every `interval_s` seconds. */
export interface GatewayMetrics {
  type: "gateway";
  gateway: string;
  version: string;
  uptime_s: number;
  interval_s?: number;
  /** HTTP requests that are being answered now */
  running: number;
  /** conversations that the gateway knows now */
  conversations: number;
  /** HTTP requests by status */
  requests: Record<string, number>;
  /** by how their conversation was found: begun, continued, forked, repeated */
  answers: Record<string, number>;
  /** by kind: reused, prefilled, generated */
  tokens: Record<string, number>;
  /** answers that another worker continued */
  resumed: number;
}

/**
 * Sample tokens, after appending at most one of `messages`, `text`, `tokens`.
 *
 * `logit_bias` (added to the logits of token ids), penalties, temperature, `top_k`, `top_p` and `min_p` apply
 * in this order. A temperature or `top_p` of 0 takes the most likely token; `top_k` 0 and `top_p` 1 are off.
 * The `repetition_penalty` is for the answer's tokens and the session's tokens; under `sink_window` only for
 * the session's tokens that the model sees when the answer begins. `presence_penalty` and `frequency_penalty`
 * are for the answer's tokens, as in OpenAI's API. A missing seed is derived from the request, so an
 * interrupted answer continues with the same tokens.
 *
 * The model's end tokens are not drawn before the answer has `min_tokens` tokens; with `ignore_eos` they do
 * not end it. With `logprobs`, each token of the answer has the logarithm of its probability by the model
 * itself, before everything above, and the `top_logprobs` likeliest tokens. With `max_tokens` 0 the request is
 * only prefilled, and the answer is empty. `raw` leaves out the assistant header that the chat template would
 * add after messages. The answer, from its first token or the end of its reasoning on, follows the
 * `response_format`; then it ends, even before `min_tokens`.
 *
 * `prefix` is the beginning of the answer, given by the client: it belongs to the prompt, and to the answer in
 * later turns. With `own_sampling`, options that the request leaves out take the values that the model's
 * authors recommend (`generation_config.json`).
 *
 * `tools` stay those of the session until a request gives others, or none (`[]`). `tool_choice` says whether
 * the answer may call them (`auto`), must not (`none`), must (`required`), or must call the one that it names.
 * Without `parallel_tool_calls` the answer ends with its first call. `chat_template_kwargs` stay those of the
 * session in the same way (`{}`: none).
 */
export interface Generate {
  type: "generate";
  messages?: readonly Message[] | null;
  /** raw text, tokenised without the chat template */
  text?: string | null;
  tokens?: readonly number[] | null;
  /** whether to parse special tokens that are spelled out; by default in text, and not in messages */
  special_tokens?: boolean | null;
  /** variables for the chat template, such as enable_thinking */
  chat_template_kwargs?: Record<string, unknown> | null;
  /** seconds after the log stored the request */
  deadline_s?: number | null;
  /** among waiting requests, higher first */
  priority?: number;
  /** Maximum tokens of one answer. */
  max_tokens?: number;
  /** the answer's first text, given */
  prefix?: string;
  own_sampling?: boolean;
  tools?: readonly Tool[] | null;
  tool_choice?: "auto" | "none" | "required" | NamedTool;
  parallel_tool_calls?: boolean;
  reasoning?: Reasoning;
  /** 0 always takes the most likely token. */
  temperature?: number;
  /** Only the likeliest tokens with this total probability. */
  top_p?: number;
  /** Only the N most likely tokens; 0 is all. */
  top_k?: number;
  /** Only tokens at least X times as likely as the likeliest. */
  min_p?: number;
  /** Above 1: repeat fewer tokens. */
  repetition_penalty?: number;
  /** Above 0: repeat fewer of the answer's tokens. */
  presence_penalty?: number;
  /** The same, times how often a token occurs. */
  frequency_penalty?: number;
  /** Add a number from -100 to 100 to the logit of a token id. */
  logit_bias?: Record<string, number>;
  /** No end of the answer before N tokens. */
  min_tokens?: number;
  /** Go on behind the model's end of the answer. */
  ignore_eos?: boolean;
  logprobs?: boolean;
  top_logprobs?: number;
  /** Seed of the sampling. */
  seed?: number | null;
  /** End before one of these texts. */
  stop?: readonly string[] | string;
  raw?: boolean;
  response_format?: JsonSchemaFormat | JsonObjectFormat | RegexFormat | LarkFormat | ChoiceFormat | TextFormat | null;
  /** 1 to 64 of the characters A-Z a-z 0-9 _ -, the first one a letter or a digit */
  id: string;
  /** tokens from the session's start */
  expect_position?: number | null;
}

/**
 * Answer to `generate`. `tokens` are all ids that were added. `text` leaves out the stop string (`stop`).
 *
 * With `logprobs`, the field of that name has an item for each token. `reasoning` and `tool_calls` are not in
 * the text. A call stays in the text if its tool was not offered, it does not fit the tool's schema, or it
 * cannot be parsed; an answer with no other call then has the `finish_reason` `tool_calls_malformed`.
 * `warnings` name parts of the request that had no effect, or that the model got in another form:
 * placeholders, and messages that the chat template changed. `prefix_tokens` counts the last tokens of the
 * prompt that are the request's `prefix`; `resumed_tokens` counts the answer's tokens that an earlier worker
 * had published. An answer that another model had begun ends as it was streamed, with the `finish_reason`
 * `model_changed`; one that the worker failed to complete, with `given_up`, and then `warnings` say why.
 */
export interface Generated {
  type: "generated";
  text: string;
  tokens: readonly number[];
  /** later versions have other values too */
  finish_reason: "stop" | "length" | "cancelled" | "expired" | "tool_calls" | "tool_calls_malformed" | "model_changed" | "given_up" | (string & {});
  usage: Usage;
  seconds: Seconds;
  kv_live_bytes: number;
  stop?: string | null;
  logprobs?: readonly TokenLogprob[];
  reasoning?: string;
  tool_calls?: readonly Called[];
  warnings?: readonly string[];
  prefix_tokens?: number;
  resumed_tokens?: number;
  id: string;
  seq: number;
  position: number;
  repeat_of?: number | null;
  cache?: SessionCache | null;
  visible_from?: number | null;
  change?: Change | null;
  model?: Model | null;
  previous_model?: Model | null;
  rewritten_from?: number | null;
  asked?: Asked;
}

/**
 * Counts of values by upper bound, not cumulative, with the values' `sum` and `count`.
 *
 * `counts` has one more entry than `bounds`, for values above the last bound.
 */
export interface Histogram {
  bounds: readonly number[];
  counts: readonly number[];
  sum: number;
  count: number;
}

/**
 * Ask for a session's state (on `ctl`). The answer names `limit` waiting requests after the first `skip`.
 *
 * With `snapshot` the answer also names the longest stored snapshot of the session's KV.
 */
export interface InfoRequest {
  type: "info";
  skip?: number;
  limit?: number;
  snapshot?: boolean;
}

/** The answer is a JSON object, on one line. */
export interface JsonObjectFormat {
  type: "json_object";
}

/**
 * A JSON schema, in OpenAI's shape. `name` and `description` have no effect.
 *
 * A keyword that cannot be enforced is refused; with `strict` false it is ignored.
 */
export interface JsonSchema {
  schema: Record<string, unknown>;
  name?: string | null;
  description?: string | null;
  strict?: boolean | null;
}

/** The answer is JSON that fits the schema, on one line. */
export interface JsonSchemaFormat {
  type: "json_schema";
  json_schema: JsonSchema;
}

/** The answer follows a grammar in llguidance's variant of Lark. */
export interface LarkFormat {
  type: "lark";
  grammar: string;
}

/**
 * A token and the logarithm of its probability.
 *
 * `token` is its text. `bytes` are its bytes if these are not whole characters.
 */
export interface LikelyToken {
  id: number;
  token: string;
  logprob: number;
  bytes?: readonly number[] | null;
}

/**
 * Load the prefix's model, or put `model`, another one of this machine, in its place (on `_serve`).
 *
 * Existing sessions continue with that model. The answer comes once the model was checked; then its worker
 * starts.
 */
export interface LoadRequest {
  type: "load";
  /** raw text, tokenised without the chat template */
  model?: string | null;
}

/**
 * One chat message in OpenAI's shape; rendered by the model's chat template.
 *
 * A `content` of several parts is joined on construction, so it is then a string, or null if an assistant only
 * calls tools. Only with images it stays a list of parts, in which each image has its digest.
 */
export interface Message {
  role: "assistant" | "developer" | "system" | "tool" | "user";
  content?: string | readonly (Record<string, unknown>)[] | null;
  name?: string | null;
  tool_calls?: readonly ToolCall[] | null;
  tool_call_id?: string | null;
}

/**
 * A worker's state, published every few seconds. Times are in seconds, sizes in bytes.
 *
 * `queue_time` and `request_duration` count the appends and generates from the moment when the log stored
 * them, by the server's clock: `queue_time` until they began to run, `request_duration` until the results of
 * successful ones were stored. Without drafts, decoding would have taken `draft_saved_s` longer (shorter if
 * negative) than `decoding_s`.
 */
export interface Metrics {
  type: "metrics";
  /** Prompt tokens that were run. */
  prefilled_tokens: number;
  /** Prompt tokens whose KV was reused. */
  cached_tokens: number;
  /** Tokens of answers. */
  generated_tokens: number;
  /** Tokens that were speculated. */
  draft_tokens?: number;
  /** Speculated tokens that were right. */
  accepted_draft_tokens?: number;
  /** Time that speculation has saved. */
  draft_saved_s?: number;
  /** Tokens whose KV an answer has recalled from SSD. */
  recalled_tokens?: number;
  /** Total time of decoding steps. */
  decoding_s?: number;
  /** Restored blocks whose KV was computed again. */
  audited_blocks?: number;
  /** Restored blocks whose KV was wrong. */
  wrong_blocks?: number;
  worker: string;
  version: string;
  model: string;
  /** unloaded if the first request loads the model */
  device: string;
  /** the prefix's other running workers */
  others?: readonly string[];
  /** 1 while the worker gives its sessions to the others. */
  drains?: boolean;
  /** 0 while JetStream stores nothing of the worker, as on a full disk. */
  recorded?: boolean;
  /** why JetStream stores nothing, or why an unloaded model cannot be loaded */
  refusal?: string;
  /** Time since the worker started. */
  uptime_s: number;
  /** Requests with a result, by type and outcome. */
  requests: Record<string, Record<string, number>>;
  /** Sessions that wait in the worker. */
  waiting: number;
  /** Waiting sessions that lack only device memory. */
  waiting_for_memory: number;
  /** Requests that wait in the log for their tenant's share. */
  returned?: number;
  /** Size of the log's stream. */
  log_bytes?: number;
  /** Limit of the log, which refuses requests at 15/16. */
  log_max_bytes?: number;
  /** size of the largest request that the log takes */
  max_message_bytes?: number;
  /** Entries and chunks that no worker can have published. */
  ignored?: Record<string, number>;
  /** Sessions whose prompt or answer runs on the device. */
  running: number;
  /** Sessions in memory. */
  sessions: number;
  /** Sessions in memory, by cache policy. */
  sessions_by_policy?: Record<string, number>;
  /** Sessions with KV on the device. */
  resident_sessions: number;
  /** From a generate's arrival to its first token. */
  time_to_first_token: Histogram;
  /** Time between two tokens of an answer. */
  time_per_output_token: Histogram;
  /** Answers that a step decodes. */
  batch_size: Histogram;
  /** How late the event loop runs a task that is due. */
  event_loop_lag: Histogram;
  /** Time between two metrics messages. */
  interval_s?: number;
  /** From the log's time of a request until it runs. */
  queue_time?: Histogram;
  /** From the log's time of a request to its result. */
  request_duration?: Histogram;
  /** KV on the device. */
  resident_kv_bytes: number;
  /** Most tokens of a session with all of its KV. */
  context_tokens?: number;
  /** options that the model's authors recommend; applied only if a request asks for them */
  sampling?: Record<string, number>;
  /** whether the model marks reasoning in its answers */
  reasoning?: boolean;
  /** whether the model sees images */
  vision?: boolean;
  /** what the model can be asked for */
  makes?: readonly ("answers" | "embeddings" | "scores")[];
  /** Size of the model's weights in memory. */
  weight_bytes?: number;
  /** when the model's config.json was written, in seconds since 1970 */
  model_changed_s?: number;
  /** Limit of KV on the device. */
  kv_limit_bytes: number;
  /** Limit of all memory on the device. */
  device_memory_bytes?: number;
  /** Memory that MLX has in use. */
  mlx_active_bytes: number;
  /** Most memory that MLX had in use. */
  mlx_peak_bytes: number;
  /** Scratch memory of a step, as estimated. */
  estimated_scratch_bytes?: number;
  /** Scratch memory of a step, as measured. */
  measured_scratch_bytes?: number;
  /** Resident memory of the process. */
  process_bytes: number;
  snapshots: SnapshotCounters;
  /** empty in answers to control requests, which all tenants can read */
  by_tenant?: TenantFigures;
}

/** Ask for the worker's metrics (on the `ctl` of any session, which need not exist). */
export interface MetricsRequest {
  type: "metrics";
}

/**
 * A model by its name, and by digests of its weights and of its tokenizer, as hex.
 *
 * `vision` is a digest of how the worker processes images for it; empty if the model does not see them.
 */
export interface Model {
  name: string;
  weights?: string;
  tokenizer?: string;
  vision?: string;
}

/** The tool that an answer must call, in OpenAI's shape. */
export interface NamedTool {
  function: ChosenFunction;
  type?: "function";
}

/**
 * Start a session explicitly. Optional: the first append or generate starts it too.
 *
 * With `from` it is a fork: it begins with tokens of another session and keeps that session's cache policy.
 * `tags` are names under which operators find it.
 */
export interface Open {
  type: "open";
  cache?: CachePolicy;
  from?: ForkPoint | null;
  tags?: readonly string[];
  /** 1 to 64 of the characters A-Z a-z 0-9 _ -, the first one a letter or a digit */
  id: string;
  /** tokens from the session's start */
  expect_position?: number | null;
}

/**
 * Answer to `open`. `cache` is the session's policy; it is left out if the policy is `full`.
 *
 * A fork has a `parent`; `position` is then the number of tokens that the fork took from the parent, and
 * `model` the parent's model.
 */
export interface Opened {
  type: "opened";
  model?: Model | null;
  parent?: Parent | null;
  tags?: readonly string[];
  id: string;
  seq: number;
  position: number;
  repeat_of?: number | null;
  cache?: SessionCache | null;
  visible_from?: number | null;
  asked?: Asked;
}

/** The session that a fork was made from, and the number of tokens that the fork took from it. */
export interface Parent {
  session: string;
  position: number;
}

/** An image among a session's tokens: the model gets rows computed from it in place of `[start, end)`. */
export interface PlacedImage {
  /** the SHA-256 of the image's file */
  digest: string;
  start: number;
  end: number;
  /** names the pixels and settings that give the rows */
  fingerprint: string;
  /** the image's size for the model, from which its tokens follow */
  grid: readonly number[];
  /** tokens in a line, if positions are in a plane; else 0 */
  columns?: number;
}

/**
 * Progress of the running request: `cached_tokens` of its `context_tokens` have KV by now.
 *
 * `generated_tokens` counts the tokens of its answer until now.
 */
export interface Progress {
  cached_tokens: number;
  context_tokens: number;
  generated_tokens: number;
}

/**
 * How an answer's reasoning is limited and kept. After `budget` tokens the worker ends the reasoning.
 *
 * Without `keep` the next user message drops the reasoning from the session, and the answer's text is
 * prefilled again. Some chat templates drop reasoning by themselves.
 */
export interface Reasoning {
  keep?: boolean;
  budget?: number | null;
}

/** The whole answer matches a regular expression, in the syntax of Rust's regex crate. */
export interface RegexFormat {
  type: "regex";
  regex: string;
}

/**
 * Score how well each of the `documents` answers the `query` (on the `ctl` of any session).
 *
 * The `instruction` describes the task; by default, to find passages that answer a web search.
 * `document_tokens` cuts each document to at most so many tokens, and to those that fit the model; without it,
 * a document that does not fit is refused. The log stores neither the request nor the answer.
 */
export interface RerankRequest {
  type: "rerank";
  /** raw text, tokenised without the chat template */
  query: string;
  documents: readonly string[];
  /** raw text, tokenised without the chat template */
  instruction?: string | null;
  document_tokens?: number | null;
}

/**
 * Answer to `rerank`: for each document its score, from 0 to 1, and how many tokens were run for it.
 *
 * `model` is the name of the worker's model.
 */
export interface Reranked {
  type: "reranked";
  scores: readonly number[];
  tokens: readonly number[];
  model: string;
}

/** Drop all tokens of the session from `position` on. */
export interface Rewind {
  type: "rewind";
  /** tokens from the session's start */
  position: number;
  /** 1 to 64 of the characters A-Z a-z 0-9 _ -, the first one a letter or a digit */
  id: string;
  /** tokens from the session's start */
  expect_position?: number | null;
}

/** Answer to `rewind`; `position` is the number of tokens that are left. */
export interface Rewound {
  type: "rewound";
  id: string;
  seq: number;
  position: number;
  repeat_of?: number | null;
  cache?: SessionCache | null;
  visible_from?: number | null;
  asked?: Asked;
}

/** Times of one generate since the worker got it: in the queue, in prefill, to the first token, total. */
export interface Seconds {
  queued: number;
  prefill: number;
  first_token: number;
  total: number;
}

/** Answer to `load` and `unload`: `said` is a sentence that says what happens now. */
export interface Serving {
  type: "serving";
  said: string;
}

/**
 * The cache policy of a session.
 *
 * Under `sink_window` it keeps the first `sink` tokens and the last `window`. Under `paged`, `resident` tokens
 * are on the device, always including the spans `pin`. With `snapshots` `none`, its KV is never written to
 * disk.
 */
export interface SessionCache {
  policy: string;
  sink?: number | null;
  window?: number | null;
  resident?: number | null;
  pin?: readonly (readonly [number, number])[];
  snapshots?: string | null;
}

/**
 * Answer to `info`: the state of a session, and the metrics of its worker.
 *
 * Fields from `cache` to `answered_by` are left out if they do not apply.
 */
export interface SessionInfo {
  type: "session";
  tenant: string;
  session: string;
  /** the session's number of tokens */
  position: number;
  /** later versions have other values too */
  state: "idle" | "waiting" | "running" | (string & {});
  /** the id of the request that the worker carries out, perhaps once the device has room */
  active: string | null;
  /** the ids of the waiting requests that skip and limit select */
  waiting: readonly string[];
  /** how many requests wait behind the active one */
  num_waiting?: number;
  /** how many requests were answered, without repeats */
  requests: number;
  /** null unless a turn runs on the device */
  progress: Progress | null;
  /** whether KV of the session is on the device now */
  resident: boolean;
  /** the size of that KV in bytes */
  kv_live_bytes: number;
  /** the name of the session's cache policy */
  policy: string;
  /** the policy's numbers, unless it is full with snapshots */
  cache?: SessionCache;
  /** unless the policy is full: the most tokens that the model sees */
  capacity_tokens?: number;
  /** unless the policy is full: how many tokens the model sees now */
  visible_tokens?: number;
  /** unless the policy is full: the model sees all from this position on */
  visible_from?: number;
  /** if requested: the tokens' longest stored snapshot, as in turnkeep cache list */
  snapshot?: string;
  /** where a fork began */
  parent?: Parent;
  tags?: readonly string[];
  /** the model of the last turn */
  answered_by?: Model;
  /** the name of the worker's model */
  model: string;
  worker: Metrics;
}

/**
 * Counters of the snapshots; two equations hold at all times.
 *
 * `accepted = durable + sum(dropped) + failed + cancelled + in_flight` counts snapshots. `free + held +
 * evictable = capacity` counts bytes. `held` bytes must not be evicted now: turns use these blocks, or they
 * are being written or loaded.
 */
export interface SnapshotCounters {
  /** Snapshots given to the writer. */
  accepted?: number;
  /** Snapshots that were written and synced. */
  durable?: number;
  /** Snapshots dropped before they were written. */
  dropped?: Record<string, number>;
  /** Snapshots that could not be written. */
  failed?: number;
  /** Snapshots of forgotten sessions. */
  cancelled?: number;
  /** Snapshots queued for the disk. */
  in_flight?: number;
  /** Size of the snapshots queued for the disk. */
  in_flight_bytes?: number;
  /** Bytes written to the disk. */
  written_bytes?: number;
  /** Bytes read from the disk. */
  restored_bytes?: number;
  /** Snapshots on the disk. */
  stored?: number;
  /** Size of the snapshots on the disk. */
  stored_bytes?: number;
  /** Snapshots evicted to make room. */
  evicted?: number;
  /** Snapshot files that failed a check. */
  rejected?: number;
  /** Restores that the disk did not answer in time. */
  timed_out?: number;
  /** Disk space for snapshots. */
  capacity_bytes?: number;
  /** Free disk space for snapshots; negative above a limit. */
  free_bytes?: number;
  /** Disk space that must not be evicted now. */
  held_bytes?: number;
  /** Disk space that eviction can free. */
  evictable_bytes?: number;
  /** Bytes put in the remote tier. */
  remote_put_bytes?: number;
  /** Bytes fetched from the remote tier. */
  remote_fetched_bytes?: number;
  /** Snapshots that were not put in the remote tier. */
  remote_dropped?: number;
  /** Calls of the remote tier that failed. */
  remote_failed?: number;
}

/**
 * A worker's counts by tenant, empty unless its setting `tenants` enables them.
 *
 * The first tenants that a worker serves have their own counts; all others share the name `_other`. `requests`
 * counts results by outcome, which is `ok` or an error's code. `cached_tokens` counts tokens whose KV was
 * reused, `restored_tokens` the cached tokens whose KV was read from disk.
 */
export interface TenantFigures {
  /** Requests with a result, by tenant. */
  requests?: Record<string, Record<string, number>>;
  /** Sessions with requests that wait or run. */
  sessions?: Record<string, number>;
  /** Prompt tokens that were run, by tenant. */
  prefilled_tokens?: Record<string, number>;
  /** Prompt tokens whose KV was reused, by tenant. */
  cached_tokens?: Record<string, number>;
  /** Tokens read from disk, by tenant. */
  restored_tokens?: Record<string, number>;
  /** Tokens of answers, by tenant. */
  generated_tokens?: Record<string, number>;
}

/** The answer is any text, as without a format. */
export interface TextFormat {
  type: "text";
}

/** The tokens that a session would have before the answer (`asked`), and those that fit (`allowed`). */
export interface TokenLimit {
  asked: number;
  allowed: number;
}

/** One token of an answer. `top` has the tokens that were likeliest in its place, the likeliest first. */
export interface TokenLogprob {
  id: number;
  token: string;
  logprob: number;
  bytes?: readonly number[] | null;
  top?: readonly LikelyToken[];
}

/** A tool, in OpenAI's shape. The chat template gets it exactly as sent, with its keys in that order. */
export interface Tool {
  type?: "function";
  function: ToolFunction;
}

/** One tool call of an assistant message, in OpenAI's shape. */
export interface ToolCall {
  id: string;
  type?: "function";
  function: Function;
}

/** A function that a model may call; `parameters` is a JSON schema of an object. */
export interface ToolFunction {
  /** 1 to 128 of the characters A-Z a-z 0-9 _ . - */
  name: string;
  description?: string | null;
  parameters?: Record<string, unknown> | null;
  strict?: boolean | null;
}

/** Unload the model of the prefix (on `_serve`). Its next request loads it again. */
export interface UnloadRequest {
  type: "unload";
}

/**
 * Tokens of one generate: `prompt_tokens = cached_tokens + prefilled_tokens`.
 *
 * `reasoning_tokens` of the `completion_tokens` are reasoning.
 */
export interface Usage {
  prompt_tokens: number;
  cached_tokens: number;
  prefilled_tokens: number;
  completion_tokens: number;
  reasoning_tokens?: number;
}

export interface ChosenFunction {
  name: string;
}

export type Request = Open | Append | Generate | Rewind | Close;

export type Result = Opened | Appended | Generated | Rewound | Closed | Failed;

export type ControlRequest = InfoRequest | MetricsRequest | CancelRequest | CountRequest | EmbedRequest | RerankRequest;

export type ControlReply = SessionInfo | Metrics | Cancelled | Counted | Embedded | Reranked | Failed;

/** The kinds of each field of a request, by the request's type. */
export const FIELDS = {
  open: {
    cache: 'object',
    from: 'object | null',
    tags: 'array',
    id: 'string',
    expect_position: 'integer | null',
  },
  append: {
    messages: 'array | null',
    text: 'string | null',
    tokens: 'array | null',
    special_tokens: 'boolean | null',
    chat_template_kwargs: 'object | null',
    deadline_s: 'number | null',
    priority: 'integer',
    tools: 'array | null',
    id: 'string',
    expect_position: 'integer | null',
  },
  generate: {
    messages: 'array | null',
    text: 'string | null',
    tokens: 'array | null',
    special_tokens: 'boolean | null',
    chat_template_kwargs: 'object | null',
    deadline_s: 'number | null',
    priority: 'integer',
    max_tokens: 'integer',
    prefix: 'string',
    own_sampling: 'boolean',
    tools: 'array | null',
    tool_choice: '"auto" | "none" | "required" | object',
    parallel_tool_calls: 'boolean',
    reasoning: 'object',
    temperature: 'number',
    top_p: 'number',
    top_k: 'integer',
    min_p: 'number',
    repetition_penalty: 'number',
    presence_penalty: 'number',
    frequency_penalty: 'number',
    logit_bias: 'object',
    min_tokens: 'integer',
    ignore_eos: 'boolean',
    logprobs: 'boolean',
    top_logprobs: 'integer',
    seed: 'integer | null',
    stop: 'array | string',
    raw: 'boolean',
    response_format: 'object | null',
    id: 'string',
    expect_position: 'integer | null',
  },
  rewind: {
    position: 'integer',
    id: 'string',
    expect_position: 'integer | null',
  },
  close: {
    forget: 'boolean',
    cancel: 'boolean',
    id: 'string',
    expect_position: 'integer | null',
  },
  info: {
    skip: 'integer',
    limit: 'integer',
    snapshot: 'boolean',
  },
  metrics: {
  },
  cancel: {
    id: 'string',
  },
  count: {
    messages: 'array | null',
    text: 'string | null',
    tokens: 'array | null',
    special_tokens: 'boolean | null',
    raw: 'boolean',
    tools: 'array | null',
    chat_template_kwargs: 'object | null',
  },
  embed: {
    inputs: 'array',
    dimensions: 'integer | null',
    input_tokens: 'integer | null',
  },
  rerank: {
    query: 'string',
    documents: 'array',
    instruction: 'string | null',
    document_tokens: 'integer | null',
  },
  ForkPoint: {
    session: 'string',
    position: 'integer | null',
    expect_position: 'integer | null',
  },
} as const;
