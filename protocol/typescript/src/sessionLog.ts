/**
 * A session's log: its requests, each with its result, in the order of the results.
 *
 * The only module that knows how the log stores both; the same as `session_log.py`.
 */

import { decode } from "./json.js";
import type { Asked, Request, Result } from "./messages.js";
import type { SessionKey } from "./subjects.js";
import type { Wire } from "./wire.js";

/** Header of a result that a worker made: digest of the session's tokens after it. */
const HISTORY_HEADER = "Turnkeep-History";
/** Header of the first request of a session that was imported. */
const BEGAN_HEADER = "Turnkeep-Began";

/** A request and its first result, with their sequences in the log. */
export interface Exchange {
  readonly request: Request;
  readonly result: Result;
  readonly asked: number;
  readonly answered: number;
  /** Digest of the session's tokens after the result; undefined if the request changed nothing. */
  readonly digest: string | undefined;
}

export interface SessionLog {
  readonly exchanges: readonly Exchange[];
  /** Whether the session was imported from another log. */
  readonly isCopy: boolean;
}

/** A result as the log has it. */
type Answered = Result & { asked?: Asked };

/** Read a session's log before the sequence `end`. */
export async function readLog(wire: Wire, key: SessionKey, end = Infinity): Promise<SessionLog> {
  const { subjects } = wire;
  const read = (kind: "in" | "out") => wire.readAll(subjects.logStream, subjects.of(key, kind), 1, end);
  const queue = await read("in"); // first: a request that leaves the queue meanwhile has a result
  const results = await read("out");
  const requests = new Map(queue.map(({ seq, body }) => [seq, decode<Request>(body)]));
  let isCopy = queue.some(({ headers }) => headers.has(BEGAN_HEADER));
  let begin = 0; // what is still there from before a close that forgets is being removed
  const found = new Map<number, Exchange>();
  for (const { seq: answered, body, headers } of results) {
    const result = decode<Answered>(body);
    const asked = await askedIn(wire, key, result);
    const request = (asked?.request as Request | undefined) ?? requests.get(result?.seq ?? 0);
    isCopy ||= BEGAN_HEADER in (asked?.headers ?? {});
    if (result?.type === "closed" && result.forgotten != null) begin = Math.max(begin, result.seq ?? 0);
    if (result?.seq == null || request === undefined || found.has(result.seq)) continue;
    const digest = isChange(result) && headers.has(HISTORY_HEADER) ? headers.get(HISTORY_HEADER) : undefined;
    found.set(result.seq, { request, result, asked: result.seq, answered, digest });
  }
  return {
    exchanges: [...found.values()].filter(({ asked }) => asked >= begin),
    isCopy,
  };
}

/** Say whether a request of a session has no result. */
export async function isWaiting(wire: Wire, key: SessionKey): Promise<boolean> {
  const { subjects } = wire;
  const queue = await wire.readAll(subjects.logStream, subjects.of(key, "in")); // first, as in `readLog`
  const results = await wire.readAll(subjects.logStream, subjects.of(key, "out"), queue[0]?.seq);
  const answered = new Set(results.map(({ body }) => decode<Result>(body)?.seq));
  return queue.some(({ seq }) => !answered.has(seq));
}

/** Read the request that was stored at `seq`, also one that is only in its result; undefined if it is gone. */
export async function findRequest(wire: Wire, key: SessionKey, seq: number): Promise<Request | undefined> {
  const { subjects } = wire;
  const [queued] = await wire.readAll(subjects.logStream, subjects.of(key, "in"), seq, seq + 1);
  if (queued !== undefined) return decode<Request>(queued.body);
  for (const { body } of await wire.readAll(subjects.logStream, subjects.of(key, "out"), seq + 1)) {
    const result = decode<Answered>(body);
    if (result?.seq === seq) return (await askedIn(wire, key, result))?.request as Request | undefined;
  }
  return undefined;
}

/** Return the request of a result, which is stored beside it if it is long. */
async function askedIn(wire: Wire, key: SessionKey, result: Answered | undefined): Promise<Asked | undefined> {
  return result?.asked?.link ? await linked(wire, key, result.asked.link) : result?.asked;
}

/** Read a long request from the messages of the log that a link leads to; undefined if they are gone. */
async function linked(wire: Wire, key: SessionKey, last: string): Promise<Asked | undefined> {
  const parts: Uint8Array[] = [];
  for (let link = last; link !== ""; ) {
    const { subjects } = wire;
    const seq = parseInt(link);
    const [found] = await wire.readAll(subjects.logStream, subjects.of(key, "checkpoint"), seq, seq + 1);
    const message = found && decode<{ part: string; before?: string }>(found.body);
    if (!message) return undefined;
    parts.unshift(Uint8Array.from(atob(message.part), (char) => char.charCodeAt(0)));
    link = message.before ?? "";
  }
  return decode<Asked>(new Uint8Array(await new Blob(parts as BlobPart[]).arrayBuffer()));
}

/** Whether a request with this result changed the session; no answer that was cancelled at once did. */
export function isChange(result: Result): boolean {
  if (result.type === "generated" && result.tokens.length === 0 && result.finish_reason === "cancelled") return false;
  return result.type !== "failed" && result.repeat_of == null;
}
