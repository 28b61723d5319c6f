/** Bodies of messages: JSON in UTF-8. */

import { InvalidMessageError } from "./errors.js";

/** Half of a surrogate pair, as `JSON.stringify` writes it. */
const HALF_PAIR = /(?<!\\)(?:\\\\)*\\ud[89a-f]/;

/** Encode a body; throw `InvalidMessageError` for text that workers cannot read, since their answer would have no id. */
export function encode(body: unknown): Uint8Array {
  const text = JSON.stringify(body);
  if (HALF_PAIR.test(text)) throw new InvalidMessageError("text must be whole Unicode characters, not half a surrogate pair");
  return new TextEncoder().encode(text);
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
