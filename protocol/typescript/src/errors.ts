/** What the client throws. */

import type { Failed, TokenLimit } from "./messages.js";

export class TurnkeepError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** A name or a body breaks the protocol; the message says what was wrong and what would be right. */
export class InvalidMessageError extends TurnkeepError {}

/** The worker answered a request with `failed`. A newer worker may send codes that this client does not know. */
export class RequestFailedError extends TurnkeepError {
  readonly code: string;
  /** What the worker said. */
  readonly reason: string;
  /** Whether the unchanged request can succeed later under a new id. */
  readonly retryable: boolean;
  /** The path of the field that is wrong, if it is one, such as `messages[0].role`. */
  readonly field?: string;
  /** The tokens that the session would have and those that the context has, if the context is exceeded. */
  readonly limit?: TokenLimit;

  constructor(failed: Pick<Failed, "code" | "message" | "retryable" | "field" | "limit">, options?: ErrorOptions) {
    super(`${failed.code}: ${failed.message}`, options);
    this.code = failed.code;
    this.reason = failed.message;
    this.retryable = failed.retryable;
    if (failed.field) this.field = failed.field;
    if (failed.limit) this.limit = failed.limit;
  }
}

/** No worker could be reached; each of the three reasons is a class of its own. */
export class NoWorkerError extends TurnkeepError {}

/** The client was closed, by its program or by the NATS server. */
export class ClientClosedError extends NoWorkerError {}

/** There is no NATS server at the address, or the connection to it is lost at the moment. */
export class NoServerError extends NoWorkerError {}

/** The NATS server is there, but has no connection left (its `max_connections`). */
export class FullServerError extends NoServerError {}

/**
 * The NATS server is there, but no worker serves the subject or answered in time, or the prefix's log does not
 * exist or does not store the subject; the message says which.
 */
export class NoAnswerError extends NoWorkerError {}

/** The NATS server refuses this user, or does not allow it to publish or subscribe. */
export class NotPermittedError extends TurnkeepError {}

/** The request was removed from the log (by a close) before its result was received. */
export class ResultRemovedError extends TurnkeepError {}

/** Chunks of one answer contradict each other or the recorded result. */
export class StreamBrokenError extends TurnkeepError {}
