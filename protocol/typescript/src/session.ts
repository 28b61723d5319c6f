/** One session of a client: each method is one request, or one control request to its worker. */

import { delay, nuid } from "@nats-io/nats-core";

import { Call, expect } from "./calls.js";
import type { CallOptions, ResultFeeds } from "./calls.js";
import { InvalidMessageError } from "./errors.js";
import { Generation } from "./generation.js";
import { readHistory } from "./history.js";
import type { History } from "./history.js";
import { withDigests } from "./images.js";
import { decode, encode } from "./json.js";
import type {
  Append, Appended, Cancelled, Close, Closed, ControlReply, ControlRequest, Counted, CountRequest,
  Generate, InfoRequest, Open, Opened, Request, Result, Rewind, Rewound, SessionInfo,
} from "./messages.js";
import { FIELDS } from "./messages.js";
import { CALL_OPTIONS, checked, checkKind, COUNT_OPTIONS, FORK_FIELDS } from "./options.js";
import { checkId } from "./subjects.js";
import type { SessionKey } from "./subjects.js";
import { timerMs, unlessAborted } from "./waiting.js";

/** After this time without a reply a control request is sent once more. */
const AGAIN_MS = 2000;

/** The fields of a request. An `id` that is left out is generated. */
export type Fields<R extends Request> = Omit<R, "type" | "id"> & { id?: string };

/**
 * A session by its name. Several objects may represent the same session.
 *
 * Repeating a request under its `id` is safe: the worker answers with the recorded result. Calls wait without
 * limit, across restarts of worker and server, or until `signal` aborts. They throw `RequestFailedError` (the
 * worker refused; its `code` says why), `InvalidMessageError`, `NoWorkerError` and `NotPermittedError`.
 */
export class Session {
  readonly #feeds: ResultFeeds;
  readonly #controlTimeoutMs: number;

  constructor(
    feeds: ResultFeeds,
    readonly key: SessionKey,
    controlTimeoutMs: number,
  ) {
    this.#feeds = feeds;
    this.#controlTimeoutMs = controlTimeoutMs;
  }

  get name(): string {
    return this.key.session;
  }

  /** Start the session explicitly. This must be its first request, or the first one after `close`. */
  open(fields: Fields<Open> = {}, options: CallOptions = {}): Promise<Opened> {
    return this.#send("opened", "open", fields, options);
  }

  /** Add exactly one of `messages`, `text`, `tokens` and wait until it is prefilled. */
  append(fields: Fields<Append> = {}, options: CallOptions = {}): Promise<Appended> {
    return this.#send("appended", "append", fields, options);
  }

  /** Prepare a generate, which first appends at most one of `messages`, `text`, `tokens`. */
  generate(fields: Fields<Generate> = {}, options: CallOptions = {}): Generation {
    const call = this.#call("generate", fields, options);
    return new Generation(call, this.#feeds.wire, (id) => this.cancel(id));
  }

  /** Forget every token from `position` on. */
  async rewind(position: number, fields: Omit<Fields<Rewind>, "position"> = {}, options: CallOptions = {}): Promise<Rewound> {
    checkKind("position", position, FIELDS.rewind.position);
    return this.#send("rewound", "rewind", fields, options, { position });
  }

  /**
   * Open the session `name`, of the same tenant, with the first `position` tokens of this one; without
   * `position` with all tokens that this session has after its last result. Both may continue.
   */
  async fork(
    name: string,
    fields: { position?: number; expect_position?: number; tags?: Open["tags"]; id?: string } = {},
    options: CallOptions = {},
  ): Promise<Session> {
    const { tags, id, ...point } = checked("the fields of fork", fields, FORK_FIELDS);
    const key = { tenant: this.key.tenant, session: checkId("session", name) };
    const fork = new Session(this.#feeds, key, this.#controlTimeoutMs);
    await fork.open({ id, tags, from: { ...point, session: this.name } }, options);
    return fork;
  }

  /** End the session. Only `open` can use its name again. With `forget` its content is removed, even after a close. */
  async close(fields: Fields<Close> = {}, options: CallOptions = {}): Promise<Closed> {
    // No other default of a result is true, and a missing one would read as false.
    return { settled: true, ...(await this.#send("closed", "close", fields, options)) };
  }

  /** End the session, unless it is closed, and remove its content: from the worker's disk, and soon from the log. */
  forget(options: CallOptions = {}): Promise<Closed> {
    return this.close({ forget: true }, options);
  }

  /**
   * Read the conversation as it stands in the log: without what has failed or was rewound. Needs no worker. A
   * fork's begins with its parent's, as long as the parent is in the log.
   */
  history(): Promise<History> {
    return readHistory(this.#feeds.wire, this.key);
  }

  /** Return the file of an image that the conversation names by its digest, from the log. Needs no worker. */
  async image(digest: string): Promise<Uint8Array> {
    const file = await this.#feeds.wire.image(this.key, digest);
    if (file === undefined) throw new InvalidMessageError(`the log has no image ${digest} of the session ${this.name}`);
    return file;
  }

  /** Return the session's state, from the worker that holds it. */
  async info(fields: Omit<InfoRequest, "type"> = {}): Promise<SessionInfo> {
    return this.#control("session", { ...checked("the fields of info", fields, FIELDS.info), type: "info" });
  }

  /** Stop a waiting or running request of the session. */
  async cancel(id: string): Promise<Cancelled> {
    return this.#control("cancelled", { type: "cancel", id: checkId("request id", id) });
  }

  /**
   * Count the tokens that a generate with this input would add, without running it.
   *
   * The log stores its images, as of a generate, which may take `timeoutMs` (60000); `signal` ends the wait.
   */
  async count(
    fields: Omit<CountRequest, "type"> = {},
    options: { signal?: AbortSignal; timeoutMs?: number } = {},
  ): Promise<Counted> {
    const { signal, timeoutMs = 60_000 } = checked("the options of count", options, COUNT_OPTIONS);
    signal?.throwIfAborted();
    return unlessAborted(this.#count(checked("the fields of count", fields, FIELDS.count), timeoutMs), signal);
  }

  async #count(fields: Omit<CountRequest, "type">, timeoutMs: number): Promise<Counted> {
    const { wire } = this.#feeds;
    const [request, files] = await withDigests(fields);
    const limit = AbortSignal.timeout(timerMs(timeoutMs));
    try {
      await unlessAborted(wire.storeImages(this.key, files, limit), limit);
    } catch (error) {
      throw limit.aborted ? wire.unreached(`images were not stored within ${timeoutMs / 1000} s`, error) : error;
    }
    return this.#control("counted", { ...request, type: "count" });
  }

  /** Prepare a request of the type `kind`; `more` are the fields that are arguments of their own. */
  #call(kind: Request["type"], fields: { id?: string }, options: CallOptions, more: object = {}): Call {
    // A request that was read back has its type too.
    checked(`the fields of ${kind}`, fields, { ...FIELDS[kind], type: JSON.stringify(kind) });
    const id = checkId("request id", fields.id ?? nuid.next());
    const request = { ...fields, ...more, id, type: kind } as Request;
    return new Call(this.#feeds, this.key, request, checked(`the options of ${kind}`, options, CALL_OPTIONS));
  }

  async #send<T extends Result["type"]>(
    type: T, kind: Request["type"], fields: { id?: string }, options: CallOptions, more: object = {},
  ) {
    return expect(type, await this.#call(kind, fields, options, more).wait());
  }

  /**
   * Ask the worker; without a reply ask again after 2, 4, 8 ... s, and take the first reply.
   *
   * A worker that was killed keeps its connection until its memory is freed, and loses what it gets then.
   */
  async #control<T extends ControlReply["type"]>(type: T, request: ControlRequest) {
    const { wire } = this.#feeds;
    const asked: Promise<Uint8Array>[] = [];
    for (let patienceMs = AGAIN_MS; ; patienceMs *= 2) {
      const ask = wire.ask(wire.subjects.of(this.key, "ctl"), encode(request), this.#controlTimeoutMs);
      ask.catch(() => {}); // the first reply counts
      asked.push(ask);
      const pause = delay(timerMs(patienceMs));
      const reply = await Promise.race([...asked, pause]).finally(() => pause.cancel());
      if (reply !== undefined) return expect(type, decode<ControlReply>(reply));
    }
  }
}
