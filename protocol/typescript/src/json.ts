/** Bodies of messages: JSON in UTF-8. */

import { InvalidMessageError } from "./errors.js";

/** Half of a surrogate pair, as `JSON.stringify` writes it. */
const HALF_PAIR = /(?<!\\)(?:\\\\)*\\ud[89a-f]/;
/** Workers refuse bodies that are nested some 1000 deep. */
const MOST_DEPTH = 900;

/** Encode a body; throw `InvalidMessageError` for what no worker can read: its answer would not name the request. */
export function encode(body: unknown): Uint8Array {
  if (isDeeper(body, MOST_DEPTH)) throw new InvalidMessageError("the request is nested too deeply");
  let text: string;
  try {
    text = JSON.stringify(body);
  } catch (error) {
    throw new InvalidMessageError(`the request cannot be written as JSON: ${String(error)}`, { cause: error });
  }
  if (HALF_PAIR.test(text)) {
    throw new InvalidMessageError("text must be whole Unicode characters, not half a surrogate pair");
  }
  return new TextEncoder().encode(text);
}

function isDeeper(value: unknown, depth: number): boolean {
  if (typeof value !== "object" || value === null) return false;
  return depth === 0 || Object.values(value).some((one) => isDeeper(one, depth - 1));
}

/** Whether two values are the same JSON, in whatever order their fields are. */
export function isSame(one: unknown, other: unknown): boolean {
  return JSON.stringify(one, sorted) === JSON.stringify(other, sorted);
}

function sorted(_: string, value: unknown): unknown {
  const isObject = typeof value === "object" && value !== null && !Array.isArray(value);
  return isObject ? Object.fromEntries(Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1))) : value;
}

/** Parse a JSON object; undefined for anything else. */
export function decode<T extends object>(body: Uint8Array): T | undefined {
  try {
    const value: unknown = JSON.parse(new TextDecoder().decode(body));
    return typeof value === "object" && value !== null ? (value as T) : undefined;
  } catch {
    return undefined;
  }
}
