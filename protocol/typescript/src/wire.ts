/**
 * The NATS operations that calls need, over a connection of the official packages.
 *
 * NATS's errors are told by their names: the connection may be of another copy of these packages.
 */

import { jetstream, jetstreamManager } from "@nats-io/jetstream";
import type { JetStreamApiError, JetStreamClient } from "@nats-io/jetstream";
import { delay, headers as natsHeaders } from "@nats-io/nats-core";
import type { MsgHdrs, NatsConnection } from "@nats-io/nats-core";

import {
  ClientClosedError, InvalidMessageError, NoAnswerError, NoServerError, NotPermittedError, NoWorkerError,
  RequestFailedError,
} from "./errors.js";
import { assembled, entries } from "./images.js";
import { decode, isSame } from "./json.js";
import type { Asked, Request, Result } from "./messages.js";
import type { SessionKey, Subjects } from "./subjects.js";
import { Bell, timerMs, unlessAborted } from "./waiting.js";

/** Timeout for the log's acknowledgement before publishing again; doubles up to the second value. */
const FIRST_ACK_MS = 2000;
const LAST_ACK_MS = 30_000;
/**
 * Attempts before a missing log means that no worker has ever run; of several servers, which may have to elect a
 * leader first, for half a minute.
 */
const NUM_TRIES = 4;
const NUM_TRIES_OF_SEVERAL = 150;
const TRY_PAUSE_MS = 200;
/** Limits of one batch when reading a stream, and the timeout for its next message. */
const READ_BATCH = 256;
const READ_BATCH_BYTES = 4 * 2 ** 20;
const READ_MS = 2000;
/** Pauses before a replica that lags behind its leader is read again. */
const LAGS_MS = [10, 50, 100, 300, 500, 1000];
/** For so many subjects the server looks up the last message at a time. */
const SUBJECTS_AT_ONCE = 1024;
/** Statuses that end a batch: no more messages, none at all, and too many subjects. */
const END_OF_BATCH = 204;
const NOTHING = 404;
const TOO_MANY = 413;
/** How often a publish looks whether it is connected again, should it miss the event. */
const RECONNECT_MS = 5000;
/** JetStream's code: larger than the stream's max_msg_size. */
const MESSAGE_TOO_LARGE = 10054;
const STREAM_FULL = 10077;
/** JetStream's codes: the subject has another last message than expected; in a cluster, another one is being stored. */
const WRONG_LAST_SEQUENCE = 10071;
const IN_PROGRESS = 10164;
const EXPECT_HEADER = "Nats-Expected-Last-Subject-Sequence";

/** One message of a stream. */
export interface Stored {
  readonly subject: string;
  readonly seq: number;
  readonly body: Uint8Array;
  readonly time: Date;
  readonly headers: MsgHdrs;
}

/** The body of a direct get: the messages of a subject, or the last one of each subject, from `seq` on. */
type Wanted = { seq: number; batch?: number } & ({ next_by_subj: string } | { multi_last: string[] });

/** Messages of a direct get, and how many more match. */
type Batch = { found: Stored[]; numMore: number };

export class Wire {
  /** Number of reconnections. Subscriptions missed what was published while disconnected. */
  epoch = 0;
  closed = false;
  /** Rung on every reconnection and on close. */
  readonly watchers = new Set<Bell>();
  readonly #jetstream: JetStreamClient;
  #connected = true;
  readonly #changed = new Bell();
  #whyClosed = "the client is closed";

  constructor(
    readonly connection: NatsConnection,
    readonly subjects: Subjects,
  ) {
    this.#jetstream = jetstream(connection);
    this.watchers.add(this.#changed);
    void this.#follow();
    void connection.closed().then((error) => {
      if (error) this.#whyClosed = `the connection to the NATS server has ended (${error.message})`;
      this.closed = true;
      this.#ring();
    });
  }

  get whyClosed(): string {
    return this.#whyClosed;
  }

  /** Store `body` in the log at least once, or not at all if `signal` is aborted before; return its stream sequence. */
  async publish(
    subject: string,
    body: Uint8Array,
    given: Readonly<Record<string, string>> = {},
    signal?: AbortSignal,
  ): Promise<number> {
    let timeout = FIRST_ACK_MS;
    let numRefusals = 0;
    let isDoubtful = false; // whether the log may have the request already
    const headers = headersOf(given);
    for (;;) {
      while (!this.#connected && !this.closed) await unlessAborted(this.#changed.wait(RECONNECT_MS), signal);
      this.#check(body);
      signal?.throwIfAborted();
      try {
        const sent = this.#jetstream.publish(subject, body, { timeout, headers });
        const ack = await unlessAborted(sent, signal);
        if (ack.stream === this.subjects.logStream) return ack.seq;
        throw new NoAnswerError(
          `${subject} is stored by the stream ${ack.stream}, which is not a worker's: it should be ${this.subjects.logStream}`,
        );
      } catch (error) {
        signal?.throwIfAborted();
        if (error instanceof NoWorkerError) throw error;
        if (hasCode(error, IN_PROGRESS)) {
          await delay(TRY_PAUSE_MS);
          continue;
        }
        if (isDoubtful && has(error, "JetStreamApiError")) {
          const seq = await this.#find(subject, body);
          if (seq) return seq;
        }
        throwIfRefused(error, subject, isDoubtful);
        isDoubtful ||= !has(error, "NoResponders");
        if (has(error, "TimeoutError")) {
          // The log may have stored the request. A second entry under the same id does no harm.
          timeout = Math.min(2 * timeout, LAST_ACK_MS);
          continue;
        }
        if (has(error, "NoResponders") && ++numRefusals >= this.#mostRefusals && !isDoubtful) {
          const why = this.#isClustered
            ? "too few servers of the NATS cluster run, or no worker was ever started there"
            : "no worker was ever started on this NATS server";
          throw new NoAnswerError(`no stream stores ${subject}: ${why} with the prefix ${this.subjects.prefix}`);
        }
        await delay(TRY_PAUSE_MS); // also between two connections
      }
    }
  }

  /**
   * Return the sequence of the last message of `subject` with this body; 0 if the log has none.
   *
   * A request that was answered may have left the log: then its result has it.
   */
  async #find(subject: string, body: Uint8Array): Promise<number> {
    const isBody = (other: Uint8Array) => other.length === body.length && other.every((byte, at) => byte === body[at]);
    const found = await this.read(this.subjects.logStream, subject, 1);
    const seq = found.findLast((one) => isBody(one.body))?.seq;
    if (seq !== undefined || !subject.endsWith(".in")) return seq ?? 0;
    const request = decode<Request>(body);
    const results = await this.read(this.subjects.logStream, subject.replace(/in$/, "out"), 1);
    const answers = results.map((one) => decode<Result & { asked?: Asked }>(one.body));
    return answers.findLast((answer) => isSame(answer?.asked?.request, request))?.seq ?? 0;
  }

  /**
   * Store the files of images, by digest, for a session, unless its log has them.
   *
   * What the log has from before the session was closed leaves it later, so it is stored once more. Waits for a
   * lost server like `publish`.
   */
  async storeImages(key: SessionKey, files: ReadonlyMap<string, Uint8Array>, signal?: AbortSignal): Promise<void> {
    if (files.size === 0) return;
    const { subjects } = this;
    const closed = await this.#lastSeq(subjects.of(key, "closed"), signal);
    for (const [digest, file] of files) {
      if ((await this.#lastSeq(subjects.image(key, digest), signal)) > closed) continue;
      for (const [name, body] of await entries(file, (this.connection.info?.max_payload ?? Infinity) / 2)) {
        const subject = subjects.image(key, name);
        const seq = await this.#lastSeq(subject, signal);
        if (seq > closed) continue;
        await this.publish(subject, body, { [EXPECT_HEADER]: `${seq}` }, signal).catch((error: unknown) => {
          if (!hasCode(error, WRONG_LAST_SEQUENCE)) throw error; // else it was stored meanwhile
        });
      }
    }
  }

  /** Return the sequence of the log's last message of `subject`, else 0; ask until the log answers, like `publish`. */
  async #lastSeq(subject: string, signal?: AbortSignal): Promise<number> {
    for (let numRefusals = 0; ; ) {
      while (!this.#connected && !this.closed) await unlessAborted(this.#changed.wait(RECONNECT_MS), signal);
      signal?.throwIfAborted();
      try {
        return (await this.last(this.subjects.logStream, subject)).at(-1)?.seq ?? 0;
      } catch (error) {
        if (this.closed || error instanceof NotPermittedError) throw error;
        if (has(error, "NoResponders") && ++numRefusals >= this.#mostRefusals) throw error;
        await delay(TRY_PAUSE_MS);
      }
    }
  }

  /** Return the file of an image of a session; undefined if the log lacks it. */
  image(key: SessionKey, digest: string): Promise<Uint8Array | undefined> {
    const { subjects } = this;
    return assembled(digest, async (name) => (await this.last(subjects.logStream, subjects.image(key, name))).at(-1)?.body);
  }

  /** Return the reply to one core NATS request. */
  async ask(subject: string, body: Uint8Array, timeoutMs: number): Promise<Uint8Array> {
    this.#check(body);
    try {
      return (await this.connection.request(subject, body, { timeout: timerMs(timeoutMs) })).data;
    } catch (error) {
      throwIfRefused(error, subject);
      if (has(error, "NoResponders")) throw new NoAnswerError(`no worker serves ${subject}`);
      if (this.#connected && has(error, "TimeoutError")) {
        throw new NoAnswerError(`no worker answered on ${subject} within ${timeoutMs / 1000} s`);
      }
      throw this.unreached(`${subject} could not be asked`, error);
    }
  }

  /** Return the messages of `subject` in `stream` from `seq` on, in order; what was read before a fault. */
  async read(stream: string, subject: string, seq: number): Promise<Stored[]> {
    const found: Stored[] = [];
    await this.#readOn(stream, { seq, next_by_subj: subject }, found).catch(() => {}); // the caller reads again later
    return found;
  }

  /**
   * Return all messages of `subject` in `stream` from the sequence `start` to before `end`, in order.
   *
   * A replica that lags behind its leader may lack the newest ones; who may use `$JS.API.STREAM.MSG.GET` waits until
   * it has all that were stored before the call.
   */
  async readAll(stream: string, subject: string, start = 1, end = Infinity): Promise<Stored[]> {
    const found: Stored[] = [];
    const batch = Math.min(READ_BATCH, end - start);
    this.#check();
    try {
      let until = await this.#leaderSeq(stream, subject);
      for (const pauseMs of [0, ...LAGS_MS]) {
        await delay(pauseMs);
        const last = found.at(-1)?.seq ?? start - 1;
        await this.#readOn(stream, { seq: last + 1, next_by_subj: subject, batch }, found, end);
        if ((found.at(-1)?.seq ?? start - 1) >= Math.min(until, end - 1)) return found.filter((one) => one.seq < end);
        until = Math.min(until, await this.#leaderSeq(stream, subject)); // it may have been removed
      }
      throw new Error("a replica lags behind its leader");
    } catch (error) {
      throwIfRefused(error, `$JS.API for ${stream}`);
      throw this.unreached(`${stream} could not be read`, error);
    }
  }

  /** Return the last message of each subject in `stream` that matches `pattern`. */
  async last(stream: string, pattern: string): Promise<Stored[]> {
    this.#check();
    try {
      return await this.#lastOf(stream, [pattern]).catch(async (error: unknown) => {
        if (!hasCode(error, TOO_MANY)) throw error;
        const manager = await jetstreamManager(this.connection, { checkAPI: false });
        const { state } = await manager.streams.info(stream, { subjects_filter: pattern });
        return this.#lastOf(stream, Object.keys(state.subjects ?? {}));
      });
    } catch (error) {
      throwIfRefused(error, `$JS.API for ${stream}`);
      throw this.unreached(`${stream} could not be read`, error);
    }
  }

  /** Return the sequence of the log's newest message, as the replica that answers knows it. */
  async newest(): Promise<number> {
    const body = JSON.stringify({ last_by_subj: `${this.subjects.prefix}.>` });
    const last = await this.connection.request(`$JS.API.DIRECT.GET.${this.subjects.logStream}`, body, { timeout: READ_MS });
    return Number(last.headers?.get("Nats-Sequence"));
  }

  /** Subscribe: call `onBody`, which must not throw, for every message. The returned function unsubscribes. */
  listen(subject: string, onBody: (body: Uint8Array) => void): () => void {
    this.#check();
    const subscription = this.connection.subscribe(subject, {
      callback: (error, message) => {
        if (error === null) onBody(message.data); // else it may not subscribe: calls read the log
      },
    });
    return () => subscription.unsubscribe();
  }

  /** Add to `found` what a direct get wants, batch by batch; stop at the sequence `end`. */
  async #readOn(stream: string, wanted: Wanted, found: Stored[], end = Infinity): Promise<void> {
    for (let { seq } = wanted, numMore = 1; numMore > 0 && seq < end; ) {
      const batch = await this.#batch(stream, { ...wanted, seq });
      for (const one of batch.found) found.push(one);
      seq = (batch.found.at(-1)?.seq ?? Infinity) + 1;
      numMore = batch.numMore;
    }
  }

  /** Ask a cluster's leader for the sequence of the last message of `subject`; 0 if there is none, or nobody may ask. */
  async #leaderSeq(stream: string, subject: string): Promise<number> {
    if (!this.#isClustered) return 0; // nothing lags behind
    const asked = JSON.stringify({ last_by_subj: subject });
    try {
      const reply = await this.connection.request(`$JS.API.STREAM.MSG.GET.${stream}`, asked, { timeout: READ_MS });
      return reply.json<{ message?: { seq: number } }>().message?.seq ?? 0;
    } catch (error) {
      if (has(error, "NoResponders") || has(error, "PermissionViolationError")) return 0;
      throw error;
    }
  }

  async #lastOf(stream: string, subjects: string[]): Promise<Stored[]> {
    const found: Stored[] = [];
    for (let start = 0; start < subjects.length; start += SUBJECTS_AT_ONCE) {
      const some = subjects.slice(start, start + SUBJECTS_AT_ONCE);
      await this.#readOn(stream, { multi_last: some, seq: 1, batch: SUBJECTS_AT_ONCE }, found);
    }
    return found;
  }

  /** Read one batch of a direct get; return it, and how many more messages match. */
  async #batch(stream: string, wanted: Wanted): Promise<Batch> {
    const found: Stored[] = [];
    const body = JSON.stringify({ batch: READ_BATCH, max_bytes: READ_BATCH_BYTES, ...wanted });
    const limits = { strategy: "stall", stall: READ_MS, maxWait: READ_MS } as const;
    for await (const reply of await this.connection.requestMany(`$JS.API.DIRECT.GET.${stream}`, body, limits)) {
      const headers = reply.headers ?? natsHeaders();
      // Each message names the one before it, and so does the end: a lost connection may have lost some.
      const before = found.at(-1)?.seq ?? 0;
      if (Number(headers.last("Nats-Last-Sequence") || before) !== before) {
        throw new Error("the connection was lost while the log was read");
      }
      // Not the status: a stored message keeps its publisher's.
      if (headers.has("Nats-Sequence")) {
        const time = new Date(headers.last("Nats-Time-Stamp"));
        const seq = Number(headers.last("Nats-Sequence"));
        found.push({ subject: headers.last("Nats-Subject"), seq, body: reply.data, time, headers });
      } else if (headers.code === END_OF_BATCH || headers.code === NOTHING) {
        return { found, numMore: Number(headers.last("Nats-Num-Pending") || 0) };
      } else {
        throw Object.assign(new Error(`${headers.code} ${headers.description}`), { code: headers.code });
      }
    }
    throw new Error(`no answer within ${READ_MS / 1000} s`);
  }

  /** Say that something failed because of an error of NATS's packages. */
  unreached(what: string, error: unknown): NoWorkerError {
    // A close ends requests before the connection counts as closed.
    if (this.closed || messageOf(error) === "connection closed") return new ClientClosedError(this.whyClosed);
    const kind = this.#connected ? NoAnswerError : NoServerError;
    return new kind(`${what}: ${messageOf(error)}`, { cause: error });
  }

  get #isClustered(): boolean {
    return Boolean(this.connection.info?.cluster);
  }

  get #mostRefusals(): number {
    return this.#isClustered ? NUM_TRIES_OF_SEVERAL : NUM_TRIES;
  }

  #check(body?: Uint8Array): void {
    if (this.closed) throw new ClientClosedError(this.whyClosed);
    const limit = this.connection.info?.max_payload ?? Infinity;
    if (body !== undefined && body.length > limit) {
      throw new InvalidMessageError(
        `the request has ${body.length} bytes, the NATS server accepts ${limit} at most: send it as several appends`,
      );
    }
  }

  #ring(): void {
    for (const bell of this.watchers) bell.ring();
  }

  async #follow(): Promise<void> {
    for await (const status of this.connection.status()) {
      if (status.type === "disconnect") this.#connected = false;
      if (status.type === "reconnect") {
        this.epoch += 1;
        this.#connected = true;
        this.#ring();
      }
    }
  }
}

/** Whether an error, or a cause of it, has this name. */
export function has(error: unknown, name: string): boolean {
  return error instanceof Error && (error.name === name || has(error.cause, name));
}

function hasCode(error: unknown, code: number): boolean {
  return error instanceof Error && (("code" in error && error.code === code) || hasCode(error.cause, code));
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

function headersOf(given: Readonly<Record<string, string>>): MsgHdrs {
  const headers = natsHeaders();
  try {
    for (const [name, value] of Object.entries(given)) headers.set(name, value);
  } catch (error) {
    throw new InvalidMessageError(`the request cannot be sent: ${messageOf(error)}`, { cause: error });
  }
  return headers;
}

/** Throw what an error means, if the server has refused; with `isDoubtful` an earlier attempt may have been stored. */
function throwIfRefused(error: unknown, subject: string, isDoubtful = false): void {
  if (has(error, "PermissionViolationError")) {
    throw new NotPermittedError(`this user may not use ${subject}: ${messageOf(error)}`, { cause: error });
  }
  if (has(error, "InvalidArgumentError")) {
    throw new InvalidMessageError(`the request cannot be sent: ${messageOf(error)}`, { cause: error });
  }
  if (has(error, "JetStreamApiError")) {
    const { code, message } = error as JetStreamApiError;
    if (code === MESSAGE_TOO_LARGE) {
      throw new InvalidMessageError("the request is larger than the log accepts: send it as several appends");
    }
    const doubt = isDoubtful ? "; an earlier attempt may have stored it: send it again under the same id" : "";
    const remedy =
      code === STREAM_FULL ? "; close sessions with forget, or restart the worker with a larger --log-max-bytes" : "";
    const refusal = `the log refused the request: ${message}${remedy}${doubt}`; // under another id it could be executed twice
    throw new RequestFailedError({ code: "overloaded", message: refusal, retryable: !isDoubtful }, { cause: error });
  }
}
