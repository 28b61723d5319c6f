/** The conversation of a session, read from its log: what is left of it after rewinds, forks and failures. */

import type { Append, Appended, Generate, Generated, Message, Opened, Result, Rewound } from "./messages.js";
import { readLog } from "./sessionLog.js";
import type { Exchange, SessionLog } from "./sessionLog.js";
import type { SessionKey } from "./subjects.js";
import type { Wire } from "./wire.js";

/**
 * An append, or a generate with its answer.
 *
 * Positions are those at the time of the result: a chat template may have changed earlier text since
 * (`rewritten_from`).
 */
export interface Turn {
  readonly request: Append | Generate;
  /** Undefined for an append, and if a rewind has left no token of it. */
  readonly answer: Generated | undefined;
  /** The session's number of tokens before the turn, before its answer, and after it. */
  readonly start: number;
  readonly answerStart: number;
  readonly position: number;
  /** Whether a rewind has removed a part; `request` and `answer` are then as they were. */
  readonly isCut: boolean;
}

export interface History {
  /** Oldest first. */
  readonly turns: readonly Turn[];
  /** False if the session's beginning is no longer in the log. */
  readonly isWhole: boolean;
  /** The conversation in OpenAI's shape. Raw text counts as a user's; of raw tokens there is no message. */
  readonly messages: readonly Message[];
  /** The number of the session's tokens. */
  readonly position: number;
}

type Changing = Opened | Appended | Generated | Rewound;
/**
 * A session's exchanges since its last open that changed it.
 *
 * In a log that was imported (`isCopy`), another session may have the name of a fork's parent.
 */
type Part = { exchanges: readonly (Exchange & { result: Changing; digest: string })[]; isCopy: boolean };

/**
 * A turn, and which of the session's present tokens it has: those of [start, end).
 *
 * After a later turn has replaced its tokens, they end somewhere behind `end`, where is unknown.
 */
type Placed = { turn: Turn; start: number; end: number };

export async function readHistory(wire: Wire, key: SessionKey): Promise<History> {
  let placed: Placed[] = [];
  let isWhole = true;
  let position = 0;
  const digests: [number, string][] = []; // of the tokens up to ascending positions
  const changes = (await parts(wire, key)).reverse().flatMap(({ exchanges, isCopy }) =>
    exchanges.map((one) => ({ ...one, isCopy })));
  for (const { request, result, digest, isCopy } of changes) {
    if (result.type === "rewound") {
      placed = until(placed, result.position);
    } else if (result.type === "opened") {
      const at = result.parent?.position ?? 0;
      if (result.parent != null && isCopy && new Map(digests).get(at) !== digest) placed = []; // of another session
      isWhole &&= (placed.at(-1)?.end ?? 0) >= at;
      placed = until(placed, at);
    } else if (request.type === "append" || request.type === "generate") {
      const from = result.rewritten_from ?? Infinity;
      placed = placed.map(({ turn, start, end }) => ({ turn, start: Math.min(start, from), end: Math.min(end, from + 1) }));
      const turn = turnOf(request, result, position);
      placed.push({ turn, start: Math.min(position, from), end: turn.position });
    }
    position = result.position;
    const kept = "rewritten_from" in result ? (result.rewritten_from ?? position) : position;
    while ((digests.at(-1)?.[0] ?? 0) > kept) digests.pop();
    digests.push([position, digest]);
  }
  const turns = placed.map(({ turn }) => turn);
  return { turns, isWhole, messages: turns.flatMap(messagesOf), position: turns.at(-1)?.position ?? 0 };
}

/** Return the session's part since its last open, then its parent's before that open, and so on. */
async function parts(wire: Wire, key: SessionKey): Promise<Part[]> {
  const found = new Map<string, SessionLog>();
  const all: Part[] = [];
  const opens = new Set<number>();
  let isCopy = false;
  for (let session: string | undefined = key.session, end = Infinity; session !== undefined; ) {
    // The end of a later read of the same session is an earlier one.
    const log: SessionLog = found.get(session) ?? (await readLog(wire, { ...key, session }, end));
    found.set(session, log);
    let part = sinceOpen(log, end);
    if (isCopy && part.exchanges.length === 0) { // the parent may have been imported after its fork
      found.clear();
      found.set(session, await readLog(wire, { ...key, session }));
      part = sinceOpen(found.get(session) ?? log, Infinity);
    }
    const [first] = part.exchanges;
    if (first !== undefined && opens.has(first.answered)) break; // copies may name each other as parents
    all.push(part);
    session = first?.result.type === "opened" ? first.result.parent?.session : undefined;
    end = first?.answered ?? end;
    isCopy = part.isCopy;
    opens.add(end);
  }
  return all;
}

function sinceOpen({ exchanges, isCopy }: SessionLog, end: number): Part {
  const changes = exchanges.filter((one): one is Part["exchanges"][number] =>
    one.answered < end && one.digest !== undefined && isChanging(one.result));
  return { exchanges: changes.slice(Math.max(0, changes.findLastIndex(({ result }) => result.type === "opened"))), isCopy };
}

function isChanging(result: Result): result is Changing {
  return ["opened", "appended", "generated", "rewound"].includes(result.type);
}

function turnOf(request: Append | Generate, result: Appended | Generated, start: number): Turn {
  const answer = result.type === "generated" ? result : undefined;
  const answerStart = result.position - (answer ? answer.tokens.length + (answer.prefix_tokens ?? 0) : 0);
  return { request, answer, start, answerStart, position: result.position, isCut: false };
}

/** Return what the first tokens of a session have of its turns. */
function until(turns: readonly Placed[], position: number): Placed[] {
  const left = turns.filter(({ start }) => start < position);
  return left.map((one) => (one.end <= position ? one : { ...one, turn: cut(one.turn, position), end: position }));
}

function cut(turn: Turn, position: number): Turn {
  const answerStart = Math.min(turn.answerStart, position);
  const answer = position > answerStart ? turn.answer : undefined;
  return { ...turn, answer, answerStart, position, isCut: position !== turn.answerStart };
}

function messagesOf({ request, answer }: Turn): Message[] {
  const said: Message[] = request.text ? [{ role: "user", content: request.text }] : [...(request.messages ?? [])];
  if (answer === undefined || answer.tokens.length === 0) return said;
  const prefix = request.type === "generate" ? (request.prefix ?? "") : "";
  const calls = (answer.tool_calls ?? []).map(({ id, function: called }) => ({ id, function: called }));
  const message: Message = { role: "assistant", content: prefix + answer.text };
  return [...said, calls.length > 0 ? { ...message, tool_calls: calls } : message];
}
