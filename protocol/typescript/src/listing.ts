/** A tenant's sessions, from the last request and the last result of each. Pure. */

import { decode } from "./calls.js";
import type { Result } from "./messages.js";
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

/** List the sessions found in these requests and results, the most recently used first. */
export function listed(requests: readonly Stored[], results: readonly Stored[]): Listed[] {
  const asked = byName(requests);
  const answered = byName(results);
  const found = [...new Set([...asked.keys(), ...answered.keys()])].map((name) =>
    one(name, asked.get(name), answered.get(name)),
  );
  return found.sort((a, b) => b.last.getTime() - a.last.getTime());
}

function byName(stored: readonly Stored[]): Map<string, Stored> {
  return new Map(stored.map((message) => [message.subject.split(".").at(-2) ?? "", message]));
}

function one(name: string, asked: Stored | undefined, answered: Stored | undefined): Listed {
  const result = answered && decode<Result>(answered.body);
  return {
    name,
    position: result?.position ?? undefined,
    last: new Date(Math.max(asked?.time.getTime() ?? 0, answered?.time.getTime() ?? 0)),
    isWaiting: asked !== undefined && (result?.seq ?? 0) < asked.seq,
    isClosed: result?.type === "closed",
  };
}
