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
  /** Whether a request has no result yet. */
  readonly isWaiting: boolean;
  readonly isClosed: boolean;
}

/** Return the messages by their sessions; some may have been stored under a name that no session can have. */
export function byName(stored: readonly Stored[]): Map<string, Stored> {
  const named = stored.map((message) => [message.subject.split(".").at(-2) ?? "", message] as const);
  return new Map(named.filter(([name]) => isId(name)));
}

/** Say whether a session's last results show its state; if not, earlier ones may: a refused request says nothing. */
export function isEnough(results: readonly Stored[]): boolean {
  return lastChange(decoded(results)) !== undefined;
}

/**
 * Say whether the last result is that of the last request, in its turn, so that no earlier request waits.
 *
 * A request that is cancelled while it waits has its result before those of the requests before it.
 */
export function isInTurn(asked: Stored, last: Stored | undefined): boolean {
  const result = last && decode<Result>(last.body);
  return result !== undefined && isChange(result) && result.seq === asked.seq;
}

/** Describe a session, given as many of its last results, oldest first, as `isEnough` wants. */
export function listed(name: string, asked: Stored | undefined, results: readonly Stored[], isWaiting: boolean): Listed {
  const found = decoded(results);
  const state = lastChange(found) ?? found.at(-1);
  return {
    name,
    position: state?.position ?? undefined,
    last: new Date(Math.max(asked?.time.getTime() ?? 0, results.at(-1)?.time.getTime() ?? 0)),
    isWaiting,
    isClosed: state?.type === "closed",
  };
}

function decoded(results: readonly Stored[]): Result[] {
  return results.map(({ body }) => decode<Result>(body)).filter((result) => result !== undefined);
}

function lastChange(results: readonly Result[]): Result | undefined {
  return results.findLast(isChange);
}
