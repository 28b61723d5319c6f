/** A tenant's sessions, from the last request and the last results of each. Pure. */

import { decode } from "./json.js";
import type { Result } from "./messages.js";
import { isChange } from "./sessionLog.js";
import { isId } from "./subjects.js";
import type { Stored } from "./wire.js";

/** A session in the log. */
export interface Listed {
  readonly name: string;
  /** The number of its tokens; undefined before the first result. */
  readonly position: number | undefined;
  /** The time of its last request or result. */
  readonly last: Date;
  /** Whether its last request has no result yet. */
  readonly isWaiting: boolean;
  readonly isClosed: boolean;
}

/** Return the messages by their sessions; some may have been stored under a name that no session can have. */
export function byName(stored: readonly Stored[]): Map<string, Stored> {
  const named = stored.map((message) => [message.subject.split(".").at(-2) ?? "", message] as const);
  return new Map(named.filter(([name]) => isId(name)));
}

/**
 * Say whether a session's last results, oldest first, show its state; if not, earlier ones may.
 *
 * A refused or repeated request says nothing of the session, and a request that was cancelled while it waited
 * has its result before the requests that came before it.
 */
export function isEnough(asked: Stored | undefined, results: readonly Stored[]): boolean {
  const found = decoded(results);
  const isAllSince = asked === undefined || (results[0]?.seq ?? 0) < asked.seq;
  return lastChange(found) !== undefined && (isAllSince || isAnswered(asked, found));
}

/** Describe a session, given as many of its last results as `isEnough` wants. */
export function listed(name: string, asked: Stored | undefined, results: readonly Stored[]): Listed {
  const found = decoded(results);
  const state = lastChange(found) ?? found.at(-1);
  return {
    name,
    position: state?.position ?? undefined,
    last: new Date(Math.max(asked?.time.getTime() ?? 0, results.at(-1)?.time.getTime() ?? 0)),
    isWaiting: asked !== undefined && !isAnswered(asked, found),
    isClosed: state?.type === "closed",
  };
}

function decoded(results: readonly Stored[]): Result[] {
  return results.map(({ body }) => decode<Result>(body)).filter((result) => result !== undefined);
}

function lastChange(results: readonly Result[]): Result | undefined {
  return results.findLast(isChange);
}

function isAnswered(asked: Stored, results: readonly Result[]): boolean {
  return results.some(({ seq }) => (seq ?? 0) >= asked.seq);
}
