/** The client's side of one generate: chunks while the answer runs, then the recorded result. */

import { Call, decode, expect, LAST_POLL_MS } from "./calls.js";
import { Assembly } from "./chunks.js";
import type { Piece } from "./chunks.js";
import type { Cancelled, Chunk, Generated } from "./messages.js";
import type { Bell } from "./waiting.js";
import type { Wire } from "./wire.js";

/** Pause between two reads for chunks that are known to be missing; doubles up to the second value. */
const FIRST_CHUNK_POLL_MS = 50;
const LAST_CHUNK_POLL_MS = 2000;
/** Chunks kept for a slow caller. If there are more, all are read back from the token stream. */
const MAX_WAITING_CHUNKS = 65_536;

/**
 * One generate request. Iterate over it for its pieces, await its `result`, or do both.
 *
 * The first iteration, or the first look at `result`, publishes the request. Leaving the iteration early does
 * not stop the answer; `cancel` does. The joined texts and tokens of all pieces are exactly those of the result.
 */
export class Generation implements AsyncIterable<Piece> {
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

  async *[Symbol.asyncIterator](): AsyncGenerator<Piece, void, undefined> {
    const call = this.#call;
    const assembly = new Assembly();
    if (call.result === undefined) {
      const chunks = new Chunks(this.#wire, this.#wire.subjects.tokens(call.key, this.id), call.bell);
      try {
        await call.enter();
        while (call.result === undefined || chunks.isWaiting) {
          for (const body of await chunks.next(assembly.hasGap)) {
            const chunk = decode<Chunk>(body);
            const piece = chunk && assembly.add(chunk);
            if (piece !== undefined) yield piece;
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

/** The chunk bodies of one generate: as they arrive, and from the token stream if some were missed. */
class Chunks {
  readonly stop: () => void;
  readonly #wire: Wire;
  readonly #subject: string;
  #waiting: Uint8Array[] = [];
  #epoch: number;
  #nextSeq = 1;
  #pauseMs = FIRST_CHUNK_POLL_MS;
  #pollAt = 0;

  constructor(wire: Wire, subject: string, bell: Bell) {
    this.#wire = wire;
    this.#subject = subject;
    this.#epoch = wire.epoch;
    this.stop = wire.listen(subject, (body) => {
      if (this.#waiting.length === MAX_WAITING_CHUNKS) this.#waiting = [];
      this.#waiting.push(body);
      bell.ring();
    });
  }

  get isWaiting(): boolean {
    return this.#waiting.length > 0;
  }

  /** Milliseconds until the token stream may be read again. */
  get patienceMs(): number {
    return Math.max(0, this.#pollAt - Date.now());
  }

  /** Return the bodies since the last call. Those read back from the token stream come first. */
  async next(hasGap: boolean): Promise<Uint8Array[]> {
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
    return found.filter((body) => body.length > 0); // an empty body ends the stream; the result says why
  }
}
