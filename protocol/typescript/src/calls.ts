/**
 * Publishes a request and waits for its result: by subscription, and from the log where that may have missed it.
 *
 * Nothing runs in the background: whoever waits does the work, so an abandoned call leaves nothing behind.
 */

import { delay } from "@nats-io/nats-core";

import { ClientClosedError, InvalidMessageError, RequestFailedError, ResultRemovedError } from "./errors.js";
import { withDigests } from "./images.js";
import { decode, encode } from "./json.js";
import type { ControlReply, Request, Result } from "./messages.js";
import type { SessionKey } from "./subjects.js";
import { Bell } from "./waiting.js";
import type { Wire } from "./wire.js";

/** After so long without an event, a waiting call reads the log; doubles up to the second value. */
const FIRST_POLL_MS = 2000;
export const LAST_POLL_MS = 30_000;
/** Between two questions whether a request was removed from the log. */
const DOUBT_MS = 1000;
/** No replica of the log lags for so long. */
const MOST_LAG_MS = 30_000;
/** How long to wait for a worker that stores and answers a close, which another may do after a crash. */
const ASK_MS = 120_000;

/** Options of a single call. */
export interface CallOptions {
  /** Ends the wait, with the signal's reason. The request stays in the log and will be answered. */
  signal?: AbortSignal;
  /** Headers of the request's NATS message; a `traceparent` adds the worker's spans to the caller's trace. */
  headers?: Readonly<Record<string, string>>;
}

/** One session's results, by subscription and from the log, shared by all calls that wait for them. */
class ResultFeed {
  users = 0;
  publishing = 0;
  readonly waiting = new Map<number, Set<Call>>();
  /** Results that came before the acknowledgement of their request, by the request's sequence. */
  readonly early = new Map<number, Result>();
  readonly stop: () => void;
  readonly #wire: Wire;
  readonly #key: SessionKey;
  readonly #denied = new Set<Call>(); // calls whose requests the log said it no longer has
  #reading = Promise.resolve();
  #next: Promise<void> | undefined;

  constructor(wire: Wire, key: SessionKey) {
    this.#wire = wire;
    this.#key = key;
    this.stop = wire.listen(wire.subjects.of(key, "out"), (body) => this.#arrived(body));
  }

  /** Search the log for the results of all waiting calls. Those who ask during a reading share the next one. */
  readLog(): Promise<void> {
    this.#next ??= this.#reading.then(() => {
      this.#next = undefined;
      this.#reading = this.#read();
      return this.#reading;
    });
    return this.#next;
  }

  /**
   * Whether a call's request was removed from the log without a result. Called after the log was read.
   *
   * Asks the server twice: under load, a server once said that it lacked a request that it had.
   */
  async isRemoved(call: Call, seq: number): Promise<boolean> {
    if (!this.#denied.has(call)) return false;
    await delay(DOUBT_MS);
    if ((await this.#lost([call])).length === 0) {
      this.#denied.delete(call);
      return false;
    }
    // Answered requests leave the queue too, and it may have been answered since the log was read.
    const { subjects } = this.#wire;
    try {
      const results = await this.#wire.readAll(subjects.logStream, subjects.of(this.#key, "out"), seq + 1);
      for (const { body } of results) this.#arrived(body);
    } catch {
      return false;
    }
    return call.result === undefined;
  }

  #arrived(body: Uint8Array): void {
    const result = decode<Result>(body);
    const seq = result?.seq;
    if (result === undefined || typeof seq !== "number") return;
    for (const call of this.waiting.get(seq) ?? []) call.resolve(result);
    if (this.publishing > 0) this.early.set(seq, result);
  }

  async #read(): Promise<void> {
    if (this.waiting.size === 0) return;
    const { subjects } = this.#wire;
    const first = Math.min(...this.waiting.keys());
    for (const { body } of await this.#wire.read(subjects.logStream, subjects.of(this.#key, "out"), first + 1)) {
      this.#arrived(body);
    }
    const calls = [...this.waiting.values()].flatMap((some) => [...some]);
    for (const call of await this.#lost(calls.filter(({ result }) => result === undefined))) this.#denied.add(call);
  }

  /** Return the calls whose requests the log lacks, of those given; none if the log cannot be read. */
  async #lost(calls: readonly Call[]): Promise<Call[]> {
    const { subjects } = this.#wire;
    const seqs = calls.map(({ seq }) => seq ?? 0);
    if (seqs.length === 0) return [];
    try {
      const end = Math.max(...seqs) + 1;
      const queue = await this.#wire.readAll(subjects.logStream, subjects.of(this.#key, "in"), Math.min(...seqs), end);
      const found = new Map(queue.map(({ seq, body }) => [seq, decode<Request>(body)]));
      const newest = await this.#wire.newest();
      return calls.filter((call) => {
        const seq = call.seq ?? 0;
        // A server that has lost a request may have another one at its sequence.
        if (found.has(seq)) return !call.isNamed(found.get(seq));
        // A replica that lags has neither this request nor a later message.
        return newest > seq || Date.now() - call.begun > MOST_LAG_MS;
      });
    } catch {
      return [];
    }
  }
}

/** Subscriptions to sessions' results: one for each session that some caller waits for. */
export class ResultFeeds {
  readonly #feeds = new Map<string, ResultFeed>();

  constructor(readonly wire: Wire) {}

  /** Return the session's feed. Each `acquire` needs a `release`. */
  acquire(key: SessionKey): ResultFeed {
    let feed = this.#feeds.get(key.session);
    if (feed === undefined) {
      feed = new ResultFeed(this.wire, key);
      this.#feeds.set(key.session, feed);
    }
    feed.users += 1;
    return feed;
  }

  release(key: SessionKey, feed: ResultFeed): void {
    feed.users -= 1;
    if (feed.users > 0) return;
    this.#feeds.delete(key.session);
    feed.stop();
  }
}

/** One request and its result. */
export class Call {
  /** Sequence of the request in the log, once the log has acknowledged it. */
  seq: number | undefined;
  /** The request as the log has it: with digests in place of its images. */
  logged: Request;
  /** Whether the log may have the request. */
  isPublished = false;
  /** The time at which the log had the request, in ms. */
  begun = Infinity;
  result: Result | undefined;
  readonly bell = new Bell();
  readonly #feeds: ResultFeeds;
  readonly #options: CallOptions;
  #users = 0;
  #started: Promise<void> | undefined;
  #feed: ResultFeed | undefined;
  #epoch: number;
  #pollMs = FIRST_POLL_MS;

  constructor(
    feeds: ResultFeeds,
    readonly key: SessionKey,
    readonly request: Request,
    options: CallOptions,
  ) {
    this.#feeds = feeds;
    this.#options = options;
    this.logged = request;
    this.#epoch = feeds.wire.epoch;
  }

  /** Return the request's result, which may be a `failed`. */
  async wait(): Promise<Result> {
    if (this.result === undefined) {
      try {
        await this.enter();
        while (this.result === undefined) await this.change();
      } finally {
        this.leave();
      }
    }
    return this.result;
  }

  /** Begin to wait for the result. The first time also publishes the request. Each `enter` needs a `leave`. */
  async enter(): Promise<void> {
    if (this.#users++ === 0) {
      this.#feeds.wire.watchers.add(this.bell);
      this.#options.signal?.addEventListener("abort", this.bell.ring);
    }
    this.#started ??= this.#start();
    await this.#started;
  }

  leave(): void {
    if (--this.#users > 0) return;
    this.#feeds.wire.watchers.delete(this.bell);
    this.#options.signal?.removeEventListener("abort", this.bell.ring);
    const feed = this.#feed;
    this.#feed = this.#started = undefined;
    if (feed === undefined) return;
    const { seq } = this;
    if (seq !== undefined) {
      feed.waiting.get(seq)?.delete(this);
      if (feed.waiting.get(seq)?.size === 0) feed.waiting.delete(seq);
    }
    this.#feeds.release(this.key, feed);
  }

  /** Wait for the next event, such as the result; after a reconnect or a long wait, read the log. */
  async change(atMostMs = LAST_POLL_MS): Promise<void> {
    const { wire } = this.#feeds;
    this.throwIfAborted();
    if (this.#epoch === wire.epoch && !wire.closed) {
      const patience = Math.min(this.#pollMs, atMostMs);
      const rang = await this.bell.wait(patience);
      this.throwIfAborted();
      if (rang || patience < this.#pollMs) return;
      this.#pollMs = Math.min(2 * this.#pollMs, LAST_POLL_MS);
    }
    await this.#readLog();
  }

  /** Throw the reason of the caller's signal, if that has aborted. */
  throwIfAborted(): void {
    this.#options.signal?.throwIfAborted();
  }

  resolve(result: Result): void {
    // A server that has lost the request may have another one at its sequence.
    if (!this.isNamed(result)) return;
    this.result ??= result;
    this.bell.ring();
  }

  /** Whether a request or a result has the id of this call's request. */
  isNamed(message: { id?: unknown } | undefined): boolean {
    return message?.id === this.request.id;
  }

  async #start(): Promise<void> {
    this.#epoch = this.#feeds.wire.epoch;
    const feed = this.#feeds.acquire(this.key);
    this.#feed = feed;
    if (this.seq === undefined) {
      await this.#publish(feed);
    } else {
      this.#waitAt(this.seq, feed);
      await this.#readLog();
    }
  }

  async #publish(feed: ResultFeed): Promise<void> {
    const { wire } = this.#feeds;
    const { signal } = this.#options;
    const [logged, files] = await withDigests(this.request);
    this.logged = logged;
    const body = encode(logged);
    await wire.storeImages(this.key, files, signal);
    feed.publishing += 1;
    this.isPublished = true;
    try {
      const seq = await this.#store(body);
      if (seq === undefined) return;
      this.seq = seq;
      this.#waitAt(seq, feed);
      const early = feed.early.get(seq);
      if (early !== undefined) this.resolve(early);
    } finally {
      feed.publishing -= 1;
      if (feed.publishing === 0) feed.early.clear();
    }
  }

  /** Publish the request; return its sequence. If the log refuses a close, a worker stores and answers it. */
  async #store(body: Uint8Array): Promise<number | undefined> {
    const { wire } = this.#feeds;
    const { headers, signal } = this.#options;
    for (;;) {
      const begun = Date.now();
      try {
        return await wire.publish(wire.subjects.of(this.key, "in"), body, headers, signal);
      } catch (error) {
        if (!(error instanceof RequestFailedError) || this.request.type !== "close") throw error;
        const reply = await wire.ask(wire.subjects.of(this.key, "ask"), body, ASK_MS).catch((silence: unknown) => {
          if (Date.now() - begun < ASK_MS) throw silence;
          return undefined; // its worker may have crashed; a second entry does no harm
        });
        if (reply === undefined) continue;
        const result = decode<Result>(reply);
        if (typeof result?.seq !== "number") throw error; // the log did not take it from the worker either
        this.result = result;
        return undefined;
      }
    }
  }

  #waitAt(seq: number, feed: ResultFeed): void {
    this.begun = Math.min(this.begun, Date.now());
    const calls = feed.waiting.get(seq) ?? new Set();
    feed.waiting.set(seq, calls.add(this));
  }

  /** Search the log for the result, from the request on. */
  async #readLog(): Promise<void> {
    const { wire } = this.#feeds;
    const { seq } = this;
    const feed = this.#feed;
    if (feed === undefined || seq === undefined || wire.closed) {
      throw new ClientClosedError(`request ${this.request.id} is not answered yet: ${wire.whyClosed}`);
    }
    this.#epoch = wire.epoch;
    await feed.readLog();
    if (this.result === undefined && (await feed.isRemoved(this, seq)) && this.result === undefined) {
      throw new ResultRemovedError(
        `request ${this.request.id} was removed from the log before its result was received: its session was closed` +
          " with forget, or closed long ago, or its tenant's mirror of the log is full; whether the request was" +
          " answered is unknown",
      );
    }
  }
}

type Answer = Result | ControlReply;

/** Return `answer` if it has this type; throw `RequestFailedError` if it is a `failed`. */
export function expect<T extends Answer["type"]>(type: T, answer: Answer | undefined): Extract<Answer, { type: T }> {
  if (answer?.type === type) return answer as Extract<Answer, { type: T }>;
  if (answer?.type === "failed") throw new RequestFailedError(answer);
  throw new InvalidMessageError(`the answer is ${JSON.stringify(answer?.type)}, not ${type}: update the client`);
}
