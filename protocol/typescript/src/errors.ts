/** What the client throws. */

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
  constructor(
    readonly code: string,
    /** What the worker said. */
    readonly reason: string,
    /** Whether the unchanged request can succeed later under a new id. */
    readonly retryable: boolean,
  ) {
    super(`${code}: ${reason}`);
  }
}

/** No answer: no worker is connected, or the connection to the NATS server is closed. */
export class NoWorkerError extends TurnkeepError {}

/** There is no NATS server at the address. */
export class NoServerError extends NoWorkerError {}

/** The NATS server refuses this user, or does not allow it to publish or subscribe. */
export class NotPermittedError extends TurnkeepError {}

/** The request was removed from the log (by a close) before its result was received. */
export class ResultRemovedError extends TurnkeepError {}

/** Chunks of one answer contradict each other or the recorded result. */
export class StreamBrokenError extends TurnkeepError {}
