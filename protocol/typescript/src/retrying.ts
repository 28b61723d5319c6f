/** Sends a request again that has failed for a reason that may pass. */

import { delay } from "@nats-io/nats-core";

import { RequestFailedError } from "./errors.js";
import { checked, checkKind, RETRY_OPTIONS } from "./options.js";

const FIRST_PAUSE_MS = 500;
const LAST_PAUSE_MS = 8000;

/**
 * Await `send()` until it does not fail with a `retryable` error, `attempts` times at most; 3 if it is left out.
 *
 * Each call of `send` must make a request of its own, so without an `id`: under a known id the worker answers with
 * the recorded failure. Between two attempts it pauses, each time for twice as long.
 */
export async function retry<T>(send: () => PromiseLike<T>, options: { attempts?: number } = {}): Promise<T> {
  checkKind("send", send, "function");
  const { attempts = 3 } = checked("the options of retry", options, RETRY_OPTIONS);
  for (let number = 1, pause = FIRST_PAUSE_MS; number < attempts; number += 1) {
    try {
      return await send();
    } catch (error) {
      if (!(error instanceof RequestFailedError && error.retryable)) throw error;
    }
    await delay((pause * (1 + Math.random())) / 2); // so that callers do not return at once
    pause = Math.min(2 * pause, LAST_PAUSE_MS);
  }
  return send();
}
