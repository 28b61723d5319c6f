/** The client's side of one generate: chunks while the answer runs, then the recorded result. */

import { delay } from "@nats-io/nats-core";

import { Call, expect, LAST_POLL_MS } from "./calls.js";
import { Assembly } from "./chunks.js";
import type { Piece } from "./chunks.js";
import { RequestFailedError } from "./errors.js";
import { decode, isSame } from "./json.js";
import type { Cancelled, Chunk, Generated } from "./messages.js";
import { findRequest } from "./sessionLog.js";
import type { Wire } from "./wire.js";

/** Pause between two reads for chunks that are known to be missing; doubles up to the second value. */
const FIRST_CHUNK_POLL_MS = 50;
const LAST_CHUNK_POLL_MS = 2000;
/** Chunks kept for a slow caller. If there are more, all are read back from the token stream. */
const MAX_WAITING_CHUNKS = 65_536;
/** The longest time for which a block that was left tries to cancel its answer. */
const STOP_MS = 1000;

/**
 * One generate request. Iterate over it for its pieces, await its `result`, or do both.
 *
 * The first iteration, or the first look at `result`, publishes the request. Leaving the iteration early does
 * not stop the answer; `cancel` does, or to leave the block of an `await using` before the answer is complete. The
 * joined texts and tokens of all pieces are exactly those of the result.
 */
export class Generation implements AsyncIterable<Piece>, AsyncDisposable {
  readonly #call: Call;
  readonly #wire: Wire;
  readonly #cancel: (id: string) => Promise<Cancelled>;

  constructor(call: Call, wire: Wire, cancel: (id: string) => Promise<Cancelled>) {
    this.#call = call;
    this.#wire = wire;
    this.#cancel = cancel;
  }

  /** The request's id. */
  get id(): string {
    return this.#call.request.id;
  }

  /** Sequence of the request in the log, once the log has acknowledged it. */
  get seq(): number | undefined {
    return this.#call.seq;
  }

  /** The recorded answer. */
  get result(): Promise<Generated> {
    const result = this.#call.wait().then((answer) => expect("generated", answer));
    result.catch(() => {}); // an iteration that fails first must not leave an unhandled rejection
    return result;
  }

  /** Ask the worker to stop the answer, which then ends with the finish_reason `cancelled`. */
  cancel(): Promise<Cancelled> {
    return this.#cancel(this.id);
  }

  /** Cancel the answer if it is not complete. Takes about a second at most, and throws nothing. */
  async [Symbol.asyncDispose](): Promise<void> {
    await Promise.race([this.#stop().catch(() => {}), delay(STOP_MS)]);
  }

  async #stop(): Promise<void> {
    const call = this.#call;
    const isFollowed = call.seq !== undefined; // else its result would not be recognised
    const until = Date.now() + STOP_MS;
    if (!call.isPublished || call.result !== undefined) return;
    try {
      if (isFollowed) await call.enter();
      while (call.result === undefined && Date.now() < until) {
        try {
          await this.cancel();
          return;
        } catch (error) {
          if (!(error instanceof RequestFailedError)) throw error;
        }
        await call.bell.wait(FIRST_CHUNK_POLL_MS); // the worker has not read the request, or has answered it
      }
    } finally {
      if (isFollowed) call.leave();
    }
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Piece, void, undefined> {
    const call = this.#call;
    const assembly = new Assembly();
    if (call.result === undefined) {
      const chunks = new Chunks(this.#wire, call);
      try {
        await call.enter();
        while (call.result === undefined || chunks.isWaiting) {
          for (const chunk of await chunks.next(assembly.hasGap)) {
            const piece = assembly.add(chunk);
            if (piece === undefined) continue;
            yield piece;
            call.throwIfAborted(); // a slow reader always finds more chunks, and perhaps the result
          }
          if (call.result === undefined && !chunks.isWaiting) {
            await call.change(assembly.hasGap ? chunks.patienceMs : LAST_POLL_MS);
          }
        }
      } finally {
        call.leave();
        chunks.stop();
      }
    }
    const rest = assembly.finish(expect("generated", call.result));
    if (rest !== undefined) yield rest;
  }
}

/**
 * The chunks of one generate: as they arrive, and from the token stream if some were missed.
 *
 * The subject may also have chunks of other requests under the same id, from before or after this one.
 */
class Chunks {
  readonly stop: () => void;
  readonly #wire: Wire;
  readonly #call: Call;
  readonly #subject: string;
  readonly #repeated = new Map<number, boolean>(); // by the sequence of an earlier request
  #waiting: Uint8Array[] = [];
  #epoch: number;
  #nextSeq = 1;
  #pauseMs = FIRST_CHUNK_POLL_MS;
  #pollAt = 0;

  constructor(wire: Wire, call: Call) {
    this.#wire = wire;
    this.#call = call;
    this.#subject = wire.subjects.tokens(call.key, call.request.id);
    this.#epoch = wire.epoch;
    this.stop = wire.listen(this.#subject, (body) => {
      if (this.#waiting.length === MAX_WAITING_CHUNKS) this.#waiting = [];
      this.#waiting.push(body);
      call.bell.ring();
    });
  }

  get isWaiting(): boolean {
    return this.#waiting.length > 0;
  }

  /** Milliseconds until the token stream may be read again. */
  get patienceMs(): number {
    return Math.max(0, this.#pollAt - Date.now());
  }

  /** Return the chunks since the last call. Those read back from the token stream come first. */
  async next(hasGap: boolean): Promise<Chunk[]> {
    const found: Uint8Array[] = [];
    const wire = this.#wire;
    if (this.#epoch !== wire.epoch || (hasGap && this.patienceMs === 0)) {
      // The stream may store a chunk a little later than subscribers get it, or may have lost it: read again,
      // at growing intervals.
      this.#epoch = wire.epoch;
      this.#pollAt = Date.now() + this.#pauseMs;
      this.#pauseMs = Math.min(2 * this.#pauseMs, LAST_CHUNK_POLL_MS);
      for (const stored of await wire.read(wire.subjects.tokenStream, this.#subject, this.#nextSeq)) {
        this.#nextSeq = stored.seq + 1;
        found.push(stored.body);
      }
    }
    found.push(...this.#waiting);
    this.#waiting = [];
    const chunks: Chunk[] = [];
    for (const body of found) {
      const chunk = decode<Chunk>(body); // none of an empty body, which ends the stream; the result says why
      if (chunk !== undefined && (await this.#isOfAnswer(chunk.seq))) chunks.push(chunk);
    }
    return chunks;
  }

  /** Say whether chunks of the request at `seq` are those of this answer. */
  async #isOfAnswer(seq: number | null | undefined): Promise<boolean> {
    const own = this.#call.seq;
    if (seq == null || own === undefined || seq >= own) return seq === own;
    const known = this.#repeated.get(seq) ?? (await this.#repeats(seq));
    this.#repeated.set(seq, known);
    return known;
  }

  /**
   * Say whether the request repeats an earlier one, which is in the log then: else the id was free.
   *
   * False if the log cannot be read; the answer comes with the result.
   */
  async #repeats(seq: number): Promise<boolean> {
    const { key, logged } = this.#call;
    return isSame(await findRequest(this.#wire, key, seq).catch(() => undefined), logged);
  }
}
