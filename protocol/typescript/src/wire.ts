/**
 * The NATS operations that calls need, over a connection of the official packages.
 *
 * NATS's errors are told by their names: the connection may be of another copy of these packages.
 */

import { jetstream, jetstreamManager } from "@nats-io/jetstream";
import type {
  CompletionResult, JetStreamApiError, JetStreamClient, JetStreamManager, StoredMsg,
} from "@nats-io/jetstream";
import { delay, headers as natsHeaders } from "@nats-io/nats-core";
import type { MsgHdrs, NatsConnection } from "@nats-io/nats-core";

import {
  ClientClosedError, InvalidMessageError, NoAnswerError, NoServerError, NotPermittedError, NoWorkerError,
  RequestFailedError,
} from "./errors.js";
import type { Subjects } from "./subjects.js";
import { Bell, unlessAborted } from "./waiting.js";

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
/** For so many subjects the server looks up the last message at a time; and its status for more. */
const SUBJECTS_AT_ONCE = 1024;
const TOO_MANY = 413;
/** How often a publish looks whether it is connected again, should it miss the event. */
const RECONNECT_MS = 5000;
/** JetStream's code: larger than the stream's max_msg_size. */
const MESSAGE_TOO_LARGE = 10054;

/** One message of a stream. */
export interface Stored {
  readonly subject: string;
  readonly seq: number;
  readonly body: Uint8Array;
  readonly time: Date;
  readonly headers: MsgHdrs;
}

type Wanted = { seq: number; next_by_subj: string } | { multi_last: string[] };

export class Wire {
  /** Number of reconnections. Subscriptions missed what was published while disconnected. */
  epoch = 0;
  closed = false;
  /** Rung on every reconnection and on close. */
  readonly watchers = new Set<Bell>();
  readonly #jetstream: JetStreamClient;
  #manager: Promise<JetStreamManager> | undefined;
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

  /** Store `body` in the log at least once; return its stream sequence. */
  async publish(
    subject: string,
    body: Uint8Array,
    given: Readonly<Record<string, string>> = {},
    signal?: AbortSignal,
  ): Promise<number> {
    const headers = natsHeaders();
    for (const [name, value] of Object.entries(given)) headers.set(name, value);
    let timeout = FIRST_ACK_MS;
    let numRefusals = 0;
    let isDoubtful = false; // whether the log may have the request already
    for (;;) {
      while (!this.#connected && !this.closed) await unlessAborted(this.#changed.wait(RECONNECT_MS), signal);
      this.#check(body);
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
        if (isDoubtful && has(error, "JetStreamApiError")) {
          const seq = await this.#find(subject, body);
          if (seq) return seq;
        }
        throwIfRefused(error, subject);
        isDoubtful ||= !has(error, "NoResponders");
        if (has(error, "TimeoutError")) {
          // The log may have stored the request. A second entry under the same id does no harm.
          timeout = Math.min(2 * timeout, LAST_ACK_MS);
          continue;
        }
        const mostRefusals = this.connection.info?.cluster ? NUM_TRIES_OF_SEVERAL : NUM_TRIES;
        if (has(error, "NoResponders") && ++numRefusals >= mostRefusals) {
          throw new NoAnswerError(
            `no stream stores ${subject}: no worker was ever started on this NATS server with the prefix ${this.subjects.prefix}`,
          );
        }
        await delay(TRY_PAUSE_MS); // also between two connections
      }
    }
  }

  /** Return the sequence of the last message of `subject` with this body; 0 if the log has none. */
  async #find(subject: string, body: Uint8Array): Promise<number> {
    const isSame = (other: Uint8Array) => other.length === body.length && other.every((byte, at) => byte === body[at]);
    const found = await this.read(this.subjects.logStream, subject, 1);
    return found.findLast((one) => isSame(one.body))?.seq ?? 0;
  }

  /** Return the reply to one core NATS request. */
  async ask(subject: string, body: Uint8Array, timeoutMs: number): Promise<Uint8Array> {
    this.#check(body);
    try {
      return (await this.connection.request(subject, body, { timeout: timeoutMs })).data;
    } catch (error) {
      throwIfRefused(error, subject);
      if (has(error, "NoResponders")) throw new NoAnswerError(`no worker serves ${subject}`);
      if (this.#connected && has(error, "TimeoutError")) {
        throw new NoAnswerError(`no worker answered on ${subject} within ${timeoutMs / 1000} s`);
      }
      throw this.#unreached(`${subject} could not be asked`, error);
    }
  }

  /** Return the messages of `subject` in `stream` from `seq` on, in order; what was read before a fault. */
  async read(stream: string, subject: string, seq: number): Promise<Stored[]> {
    const found: Stored[] = [];
    await this.#readOn(stream, subject, seq, found).catch(() => {}); // the caller reads again later
    return found;
  }

  /** Return all messages of `subject` in `stream` before the sequence `end`, in order. */
  async readAll(stream: string, subject: string, end = Infinity): Promise<Stored[]> {
    const found: Stored[] = [];
    this.#check();
    try {
      await this.#readOn(stream, subject, 1, found, end);
    } catch (error) {
      throw this.#unreached(`${stream} could not be read`, error);
    }
    return found.filter((one) => one.seq < end);
  }

  /** Return the last message of each subject in `stream` that matches `pattern`. */
  async last(stream: string, pattern: string): Promise<Stored[]> {
    this.#check();
    try {
      return await this.#lastOf(stream, [pattern]).catch(async (error: unknown) => {
        if (!hasCode(error, TOO_MANY)) throw error;
        const { state } = await (await this.#jsm()).streams.info(stream, { subjects_filter: pattern });
        return this.#lastOf(stream, Object.keys(state.subjects ?? {}));
      });
    } catch (error) {
      throwIfRefused(error, `$JS.API.STREAM.INFO.${stream}`);
      throw this.#unreached(`${stream} could not be read`, error);
    }
  }

  /** Return the body of the message of `subject` at `seq`; undefined if there is none, or after a fault. */
  async get(stream: string, subject: string, seq: number): Promise<Uint8Array | undefined> {
    const [found] = await this.#batch(stream, { seq, next_by_subj: subject }, 1).catch(() => []);
    return found?.seq === seq ? found.body : undefined;
  }

  /**
   * Say whether the message of `subject` at `seq` was removed from `stream`; false if unknown.
   *
   * `isOld` says that it was stored so long ago that no replica lags behind it.
   */
  async lacks(stream: string, subject: string, seq: number, isOld: boolean): Promise<boolean> {
    try {
      const batch = await this.#batch(stream, { seq, next_by_subj: subject }, 1);
      if (batch[0]?.seq === seq) return false;
      if (isOld) return true;
      // A replica that lags has neither this message nor a later one.
      const body = JSON.stringify({ last_by_subj: `${this.subjects.prefix}.>` });
      const last = await this.connection.request(`$JS.API.DIRECT.GET.${stream}`, body, { timeout: READ_MS });
      return Number(last.headers?.get("Nats-Sequence")) > seq;
    } catch {
      return false;
    }
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

  async #readOn(stream: string, subject: string, seq: number, found: Stored[], end = Infinity): Promise<void> {
    for (let next = seq; next < end; ) {
      const batch = await this.#batch(stream, { seq: next, next_by_subj: subject }, READ_BATCH);
      const last = batch.at(-1);
      if (last === undefined) return;
      for (const one of batch) found.push(one);
      next = last.seq + 1;
    }
  }

  async #lastOf(stream: string, subjects: string[]): Promise<Stored[]> {
    const found: Stored[] = [];
    for (let start = 0; start < subjects.length; start += SUBJECTS_AT_ONCE) {
      const some = subjects.slice(start, start + SUBJECTS_AT_ONCE);
      found.push(...(await this.#batch(stream, { multi_last: some }, SUBJECTS_AT_ONCE)));
    }
    return found;
  }

  #jsm(): Promise<JetStreamManager> {
    return (this.#manager ??= jetstreamManager(this.connection, { checkAPI: false }));
  }

  async #batch(stream: string, wanted: Wanted, batch: number): Promise<Stored[]> {
    const { direct } = await this.#jsm();
    const found: Stored[] = [];
    const progress = new Bell();
    let end: { error?: Error | undefined } | undefined;
    const limits = "multi_last" in wanted ? { batch } : { batch, max_bytes: READ_BATCH_BYTES };
    const options = {
      ...limits,
      callback: (done: CompletionResult | null, { subject, seq, data, time, header }: StoredMsg) => {
        if (done === null) found.push({ subject, seq, body: data, time, headers: header });
        else end = { error: done.err };
        progress.ring();
      },
    };
    const batches = await ("multi_last" in wanted
      ? direct.getLastMessagesFor(stream, { ...wanted, ...options })
      : direct.getBatch(stream, { ...wanted, ...options }));
    while (end === undefined) {
      if (!(await progress.wait(READ_MS))) batches.stop(new Error(`no answer within ${READ_MS / 1000} s`));
    }
    if (end.error && !hasCode(end.error, 404)) throw end.error;
    let before = 0; // each message of a batch names the one before it; a lost connection may have lost some
    for (const one of found) {
      if (Number(one.headers.get("Nats-Last-Sequence") || before) !== before) {
        throw new Error("the connection was lost while the log was read");
      }
      before = one.seq;
    }
    return found;
  }

  /** Say that something failed because of an error of NATS's packages. */
  #unreached(what: string, error: unknown): NoWorkerError {
    if (this.closed) return new ClientClosedError(this.whyClosed);
    const kind = this.#connected ? NoAnswerError : NoServerError;
    return new kind(`${what}: ${messageOf(error)}`, { cause: error });
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
  return error instanceof Error && "code" in error && error.code === code;
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

function throwIfRefused(error: unknown, subject: string): void {
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
    throw new RequestFailedError("overloaded", `the log refused the request: ${message}`, true);
  }
}
