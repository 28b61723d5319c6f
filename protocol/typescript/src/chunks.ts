/**
 * Joins the token chunks of one answer, without gap or repeat, and checks them against the recorded result.
 *
 * Pure: chunks in, new text and tokens out. Knows nothing of NATS.
 */

import { StreamBrokenError } from "./errors.js";
import type { Called, CallPart, Chunk, Generated, TokenLogprob } from "./messages.js";

/** A part of an answer that continues the parts before it; `i` is the index of its first token. */
export interface Piece {
  readonly i: number;
  readonly tokens: readonly number[];
  readonly text: string;
  readonly reasoning: string;
  readonly tool_calls: readonly CallPart[];
  readonly logprobs: readonly TokenLogprob[];
  /** Those of the result, in the first piece. */
  readonly warnings: readonly string[];
}

type Sliceable<T> = { length: number; slice(start: number, end?: number): T };

/** One thing that chunks carry beside their tokens: text, reasoning, or parts of tool calls. */
class Strand<T extends Sliceable<T>> {
  readonly #what: string;
  #known: T;
  readonly #join: (before: T, after: T) => T;
  /** Token index at which some chunk began or ended -> length before it. */
  readonly #lengthAt = new Map([[0, 0]]);

  constructor(what: string, empty: T, join: (before: T, after: T) => T) {
    this.#what = what;
    this.#known = empty;
    this.#join = join;
  }

  get known(): T {
    return this.#known;
  }

  reaches(index: number): boolean {
    return this.#lengthAt.has(index);
  }

  /** Return what is new of a chunk's part. */
  fresh(i: number, numTokens: number, part: T): T {
    const start = this.#lengthAt.get(i) ?? 0;
    const overlap = part.slice(0, Math.max(0, this.#known.length - start));
    if (!same(overlap, this.#known.slice(start, start + overlap.length))) {
      throw new StreamBrokenError(`${this.#what} from token ${i} on was published twice and differs`);
    }
    const end = i + numTokens;
    if (!this.reaches(end)) this.#lengthAt.set(end, start + part.length);
    return part.slice(overlap.length);
  }

  /** Return what of a result's part is not known yet. */
  rest(whole: T, id: string): T {
    if (!same(whole.slice(0, this.#known.length), this.#known)) {
      throw new StreamBrokenError(`the recorded ${this.#what} of ${id} differs from that streamed`);
    }
    return whole.slice(this.#known.length);
  }

  add(part: T): void {
    this.#known = this.#join(this.#known, part);
  }
}

/**
 * The beginning of one answer, joined from the chunks received so far.
 *
 * After a crash the same tokens may come again in other chunks. A chunk's `i` is the position of its first
 * token; the position of its text is known only if another chunk began or ended at `i`. Otherwise the chunk is
 * ignored, and `hasGap` is true until a later chunk adds tokens.
 */
export class Assembly {
  hasGap = false;
  readonly #tokens: number[] = [];
  readonly #text = new Strand("text", "", (before, after) => before + after);
  readonly #reasoning = new Strand("reasoning", "", (before, after) => before + after);
  readonly #calls = new Strand<readonly CallPart[]>("tool calls", [], (before, after) => [...before, ...after]);

  /** Add a chunk; return the part of it that is new, if any. */
  add(chunk: Chunk): Piece | undefined {
    const { i, tokens } = chunk;
    if (!this.#text.reaches(i)) {
      this.hasGap = true;
      return undefined;
    }
    const numKnown = this.#tokens.length - i;
    if (!same(this.#tokens.slice(i, i + tokens.length), tokens.slice(0, numKnown))) {
      throw new StreamBrokenError(`tokens from ${i} on were published twice and differ`);
    }
    const piece = {
      i: this.#tokens.length,
      tokens: tokens.slice(numKnown),
      text: this.#text.fresh(i, tokens.length, chunk.text),
      reasoning: this.#reasoning.fresh(i, tokens.length, chunk.reasoning ?? ""),
      tool_calls: this.#calls.fresh(i, tokens.length, chunk.tool_calls ?? []),
      logprobs: (chunk.logprobs ?? []).slice(numKnown),
      warnings: this.#tokens.length > 0 ? [] : (chunk.warnings ?? []),
    };
    if (tokens.length > numKnown) this.hasGap = false;
    return this.#extend(piece);
  }

  /** Return the part of the result after all chunks, if any. */
  finish(result: Generated): Piece | undefined {
    const numKnown = this.#tokens.length;
    if (!same(result.tokens.slice(0, numKnown), this.#tokens)) {
      throw new StreamBrokenError(`the recorded tokens of ${result.id} differ from those streamed`);
    }
    return this.#extend({
      i: numKnown,
      tokens: result.tokens.slice(numKnown),
      text: this.#text.rest(result.text, result.id),
      reasoning: this.#reasoning.rest(result.reasoning ?? "", result.id),
      tool_calls: missing(this.#calls.known, result.tool_calls ?? []),
      logprobs: (result.logprobs ?? []).slice(numKnown),
      warnings: numKnown > 0 ? [] : (result.warnings ?? []),
    });
  }

  #extend(piece: Piece): Piece | undefined {
    const { tokens, text, reasoning, tool_calls } = piece;
    if (tokens.length + text.length + reasoning.length + tool_calls.length === 0) return undefined;
    for (const token of tokens) this.#tokens.push(token);
    this.#text.add(text);
    this.#reasoning.add(reasoning);
    this.#calls.add(tool_calls);
    return piece;
  }
}

/** Return what of the calls was not streamed in parts. */
function missing(parts: readonly CallPart[], calls: readonly Called[]): CallPart[] {
  return calls.flatMap((call, index): CallPart[] => {
    const own = parts.filter((part) => part.index === index);
    const rest = call.function.arguments.slice(own.map((part) => part.arguments ?? "").join("").length);
    if (own.length === 0) return [{ index, id: call.id, name: call.function.name, arguments: rest }];
    return rest === "" ? [] : [{ index, arguments: rest }];
  });
}

function same(one: unknown, other: unknown): boolean {
  return JSON.stringify(one) === JSON.stringify(other);
}
