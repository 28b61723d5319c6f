/** Waiting for events, with a limit, and for promises until an `AbortSignal`. */

/**
 * Wakes all who wait. Whoever looks for something and finds nothing must wait at once, without an `await` in
 * between: then no wake is lost.
 */
export class Bell {
  readonly #waiting = new Set<() => void>();

  /** Wake all; those who begin to wait afterwards wait for the next ring. */
  readonly ring = (): void => {
    for (const resume of this.#waiting) resume();
  };

  /** Wait for the next ring, `ms` at most; tell whether it rang. */
  wait(ms: number): Promise<boolean> {
    return new Promise((resolve) => {
      const end = (rang: boolean) => {
        clearTimeout(timer);
        this.#waiting.delete(resume);
        resolve(rang);
      };
      const resume = () => end(true);
      const timer = setTimeout(() => end(false), ms);
      this.#waiting.add(resume);
    });
  }
}

/** Return the time nearest to `ms` that timers wait: they end at once after 2^31 ms, and NATS takes 0 for a second. */
export function timerMs(ms: number): number {
  return Math.min(Math.max(ms, 1), 2 ** 31 - 1);
}

/** Await `promise`, and throw the signal's reason if that aborts before. The promise itself goes on. */
export async function unlessAborted<T>(promise: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  if (signal === undefined) return promise;
  promise.catch(() => {}); // if it is not awaited any more
  signal.throwIfAborted();
  let abort = () => {};
  const aborted = new Promise<never>((_, reject) => {
    abort = () => reject(signal.reason);
  });
  signal.addEventListener("abort", abort);
  try {
    return await Promise.race([promise, aborted]);
  } finally {
    signal.removeEventListener("abort", abort);
  }
}
