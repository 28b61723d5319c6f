/** The subjects of the protocol, and the rule for names. */

import { InvalidMessageError } from "./errors.js";

export const DEFAULT_TENANT = "default";

const ID = /^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$/;
const PREFIX = /^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$/;

export function isId(value: unknown): boolean {
  return typeof value === "string" && ID.test(value); // `test` would take undefined for a name
}

/** Return a name if it is valid; `what` it names is for the error. */
export function checkId(what: string, value: string): string {
  if (!isId(value)) {
    const rule = "1 to 64 of the characters A-Z a-z 0-9 _ -, the first one a letter or a digit";
    throw new InvalidMessageError(`${what} ${JSON.stringify(value)} is not valid: it must be ${rule}`);
  }
  return value;
}

/** A session's full name. */
export interface SessionKey {
  readonly tenant: string;
  readonly session: string;
}

/** All subjects under one prefix. */
export class Subjects {
  /** The JetStream stream that holds every session's `in` and `out`. */
  readonly logStream: string;
  /** The JetStream stream that keeps token chunks for some minutes. */
  readonly tokenStream: string;

  constructor(readonly prefix = "turnkeep") {
    if (typeof prefix !== "string" || !PREFIX.test(prefix)) {
      throw new InvalidMessageError(
        `prefix ${JSON.stringify(prefix)} is not valid: it must be words of A-Z a-z 0-9 _ - with dots between them`,
      );
    }
    const name = prefix.replaceAll(".", "_");
    this.logStream = `${name}_log`;
    this.tokenStream = `${name}_tok`;
  }

  of(key: SessionKey, kind: "in" | "out" | "checkpoint" | "closed" | "ctl" | "ask"): string {
    return `${this.prefix}.${key.tenant}.${key.session}.${kind}`;
  }

  /** The subject of an image of a session, or of a piece of one, by its SHA-256 as hex. */
  image(key: SessionKey, digest: string): string {
    return `${this.prefix}.${key.tenant}.${key.session}.image.${digest}`;
  }

  /** The subject of one generate's token chunks. */
  tokens(key: SessionKey, id: string): string {
    return `${this.prefix}.${key.tenant}.${key.session}.tok.${id}`;
  }
}
