/** What methods take as options and as fields of requests: one notation for both, and one check. */

import type { CallOptions } from "./calls.js";
import type { ClientOptions, ConnectOptions } from "./client.js";
import { InvalidMessageError } from "./errors.js";
import { FIELDS } from "./messages.js";

/** The kinds of each name's value, with ` | ` between them: those of `KINDS`, or texts in quotes. */
export type Kinds<T> = Readonly<Record<keyof T, string>>;

const KINDS: Readonly<Record<string, (value: unknown) => boolean>> = {
  array: Array.isArray,
  boolean: (value) => typeof value === "boolean",
  function: (value) => typeof value === "function",
  integer: Number.isInteger,
  null: (value) => value === null,
  number: (value) => typeof value === "number" && !Number.isNaN(value),
  object: isRecord,
  string: (value) => typeof value === "string",
  AbortSignal: (value) => isRecord(value) && "aborted" in value && typeof value["addEventListener"] === "function",
};

export const CLIENT_OPTIONS: Kinds<ClientOptions> = { tenant: "string", prefix: "string", controlTimeoutMs: "number" };
export const CONNECT_OPTIONS: Kinds<ConnectOptions> = {
  ...CLIENT_OPTIONS, servers: "string | array",
  // NATS's own, which its packages take as they come
  name: "string", token: "string", user: "string", pass: "string", authenticator: "function | array",
  tls: "object | null", wsFactory: "function", port: "integer", timeout: "number", inboxPrefix: "string", noEcho: "boolean",
  noRandomize: "boolean", resolve: "boolean", ignoreClusterUpdates: "boolean", ignoreAuthErrorAbort: "boolean",
  reconnect: "boolean", waitOnFirstConnect: "boolean", maxReconnectAttempts: "number", reconnectTimeWait: "number",
  reconnectJitter: "number", reconnectJitterTLS: "number", reconnectDelayHandler: "function", reconnectToServer: "function",
  pingInterval: "number", maxPingOut: "number", debug: "boolean", verbose: "boolean", pedantic: "boolean",
  noAsyncTraces: "boolean",
};
export const CALL_OPTIONS: Kinds<CallOptions> = { signal: "AbortSignal", headers: "object" };
export const COUNT_OPTIONS = { signal: "AbortSignal", timeoutMs: "number" };
export const RETRY_OPTIONS = { attempts: "number" };
const { position, expect_position } = FIELDS.ForkPoint;
export const FORK_FIELDS = { position, expect_position, tags: FIELDS.open.tags, id: FIELDS.open.id };
const { messages, text, tokens, ...sampling } = FIELDS.generate;
export const TOOL_FIELDS = { ...sampling, messages, most: "number" };
const { inputs, ...embedding } = FIELDS.embed;
export const EMBED_OPTIONS = { ...embedding, timeoutMs: "number" };
const { query, documents, ...ranking } = FIELDS.rerank;
export const RERANK_OPTIONS = { ...ranking, timeoutMs: "number" };

/** Return options or fields; throw `InvalidMessageError` if one is wrong. `what` they are is for the error. */
export function checked<T>(what: string, given: T, kinds: Readonly<Record<string, string>>): T {
  checkKind(what, given, "object");
  for (const [name, value] of Object.entries(given as object)) {
    const kind = Object.hasOwn(kinds, name) ? kinds[name] : undefined;
    if (kind === undefined) {
      throw new InvalidMessageError(`${what} have no ${name}; they have ${Object.keys(kinds).join(", ")}`);
    }
    if (value !== undefined) checkKind(name, value, kind);
  }
  return given;
}

/** Throw `InvalidMessageError` if a value is of none of these kinds; `name` is for the error. */
export function checkKind(name: string, value: unknown, kind: string): void {
  const isKind = (one: string) => KINDS[one]?.(value) ?? one === JSON.stringify(value);
  if (!kind.split(" | ").some(isKind)) {
    throw new InvalidMessageError(`${name} must be \`${kind}\`, not \`${nameOf(value)}\``);
  }
}

/** Whether a value is an object with named values: no array, no `Map`, no `Headers`. */
function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !(Symbol.iterator in value);
}

/** Name the kind of a value, a text as it is. */
function nameOf(value: unknown): string {
  if (value === null || Number.isNaN(value)) return String(value);
  if (typeof value !== "object" || isRecord(value)) return typeof value;
  return Array.isArray(value) ? "array" : value.constructor.name;
}
