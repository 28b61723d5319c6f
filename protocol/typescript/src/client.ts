/** A connection of one tenant, and how it is made from the address of a server. */

import type { NatsConnection, WsConnectionOptions } from "@nats-io/nats-core";

import { expect, ResultFeeds } from "./calls.js";
import { FullServerError, InvalidMessageError, NoServerError, NotPermittedError } from "./errors.js";
import { decode, encode } from "./json.js";
import { byName, isEnough, isInTurn, listed } from "./listing.js";
import type { Listed } from "./listing.js";
import { FIELDS } from "./messages.js";
import type { ControlReply, EmbedRequest, RerankRequest } from "./messages.js";
import { checked, checkKind, CLIENT_OPTIONS, CONNECT_OPTIONS, EMBED_OPTIONS, RERANK_OPTIONS } from "./options.js";
import { Session } from "./session.js";
import { isWaiting } from "./sessionLog.js";
import { checkId, DEFAULT_TENANT, Subjects } from "./subjects.js";
import { has, messageOf, Wire } from "./wire.js";
import type { Stored } from "./wire.js";

export interface ClientOptions {
  /** The tenant that owns the sessions; `default` if it is left out. */
  tenant?: string;
  /** What the subjects begin with; `turnkeep` if it is left out. */
  prefix?: string;
  /** How long `info`, `cancel` and `count` wait for the worker; 5000. */
  controlTimeoutMs?: number;
}

/** A text, or token ids. */
export type Input = string | readonly number[];

/** The vectors of some inputs, how many tokens each input has, and the model. */
export interface Embeddings {
  vectors: Float32Array[];
  tokens: number[];
  model: string;
}

/** How well each document answers a query, from 0 to 1, how many tokens were run for each, and the model. */
export interface Ranking {
  scores: number[];
  tokens: number[];
  model: string;
}

/** Options of the client, and those of `connect` of NATS: credentials, TLS, `wsFactory` and more. */
export interface ConnectOptions extends ClientOptions, WsConnectionOptions {}

/** A connection of one tenant. Create it with `connect`, or from a connection of your own. */
export class Client implements AsyncDisposable {
  readonly tenant: string;
  readonly connection: NatsConnection;
  readonly #feeds: ResultFeeds;
  readonly #controlTimeoutMs: number;

  /** `connection` should reconnect without limit (`maxReconnectAttempts: -1`), so that waiting calls continue. */
  constructor(connection: NatsConnection, options: ClientOptions = {}) {
    checked("the options of Client", options, CLIENT_OPTIONS);
    this.tenant = checkId("tenant", options.tenant ?? DEFAULT_TENANT);
    this.connection = connection;
    this.#feeds = new ResultFeeds(new Wire(connection, new Subjects(options.prefix)));
    this.#controlTimeoutMs = options.controlTimeoutMs ?? 5000;
  }

  /** Return a session by name; sends nothing. */
  session(name: string): Session {
    const key = { tenant: this.tenant, session: checkId("session", name) };
    return new Session(this.#feeds, key, this.#controlTimeoutMs);
  }

  /**
   * List the tenant's sessions in the log, the most recently used first. Needs no worker.
   *
   * Of more than 1,024 sessions it needs the right on `$JS.API.STREAM.INFO` of the log.
   */
  async sessions(): Promise<Listed[]> {
    const { wire } = this.#feeds;
    const every = { tenant: this.tenant, session: "*" };
    const last = (kind: "in" | "out") => wire.last(wire.subjects.logStream, wire.subjects.of(every, kind));
    const requests = byName(await last("in")); // before the results: so none of them lacks its request
    const results = byName(await last("out"));
    const names = [...new Set([...requests.keys(), ...results.keys()])];
    const found: Listed[] = [];
    for (let start = 0; start < names.length; start += SESSIONS_AT_ONCE) {
      const some = names.slice(start, start + SESSIONS_AT_ONCE).map(async (name) => {
        const asked = requests.get(name), last = results.get(name);
        const waits = asked !== undefined && !isInTurn(asked, last) && (await isWaiting(wire, { ...every, session: name }));
        return listed(name, asked, await this.#results(name, last), waits);
      });
      found.push(...(await Promise.all(some)));
    }
    return found.sort((a, b) => b.last.getTime() - a.last.getTime());
  }

  /** Return the last results of a session, given the last one: as many as show its state. */
  async #results(session: string, last: Stored | undefined): Promise<Stored[]> {
    if (last === undefined) return [];
    const { wire } = this.#feeds;
    const subject = wire.subjects.of({ tenant: this.tenant, session }, "out");
    let found = [last];
    for (let end = last.seq, entries = FIRST_ENTRIES; end > 1 && !isEnough(found); entries *= 4) {
      const start = Math.max(1, end - entries);
      found = [...(await wire.readAll(wire.subjects.logStream, subject, start, end)), ...found];
      end = start;
    }
    return found;
  }

  /**
   * Return a vector of length 1 for each text or list of token ids, cut to `dimensions` numbers, by an embedding model.
   *
   * With `input_tokens` only so many of an input's first tokens are read, or those that fit the model.
   * A long list takes several requests, each of which may take `timeoutMs` (60000).
   */
  async embed(
    inputs: readonly Input[],
    options: Pick<EmbedRequest, "dimensions" | "input_tokens"> & { timeoutMs?: number } = {},
  ): Promise<Embeddings> {
    const { timeoutMs = 60_000, ...more } = checked("the options of embed", options, EMBED_OPTIONS);
    checkKind("inputs", inputs, FIELDS.embed.inputs);
    const found: Embeddings = { vectors: [], tokens: [], model: "" };
    for (const [start, part] of divided(inputs)) {
      const asked = { type: "embed", inputs: part, ...more } as const;
      const embedded = expect("embedded", counted(await this.#ask(asked, timeoutMs), start));
      found.vectors.push(...embedded.vectors.map(numbers));
      found.tokens.push(...embedded.tokens);
      found.model = embedded.model;
    }
    return found;
  }

  /**
   * Return how well each document answers a query, by a model that was trained for that.
   *
   * `instruction` says what is searched for; of each document the first `document_tokens` count. Long lists take
   * several requests, each of which may take `timeoutMs` (60000).
   */
  async rerank(
    query: string,
    documents: readonly string[],
    options: Pick<RerankRequest, "instruction" | "document_tokens"> & { timeoutMs?: number } = {},
  ): Promise<Ranking> {
    const { timeoutMs = 60_000, ...more } = checked("the options of rerank", options, RERANK_OPTIONS);
    checkKind("query", query, FIELDS.rerank.query);
    checkKind("documents", documents, FIELDS.rerank.documents);
    const found: Ranking = { scores: [], tokens: [], model: "" };
    for (const [start, part] of divided(documents)) {
      const asked = { type: "rerank", query, documents: part, ...more } as const;
      const reranked = expect("reranked", counted(await this.#ask(asked, timeoutMs), start));
      found.scores.push(...reranked.scores);
      found.tokens.push(...reranked.tokens);
      found.model = reranked.model;
    }
    return found;
  }

  async #ask(asked: EmbedRequest | RerankRequest, timeoutMs: number): Promise<ControlReply | undefined> {
    const { wire } = this.#feeds;
    const subject = wire.subjects.of({ tenant: this.tenant, session: "any" }, "ctl");
    return decode<ControlReply>(await wire.ask(subject, encode(asked), timeoutMs));
  }

  /** Close the connection; calls that still wait throw `ClientClosedError`, but their requests continue. */
  close(): Promise<void> {
    return this.connection.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/** Connect by one of NATS's functions for it, without limit to reconnections. */
export async function connectBy(
  open: (options: ConnectOptions) => Promise<NatsConnection>,
  given: ConnectOptions,
): Promise<Client> {
  const { tenant, prefix, controlTimeoutMs, servers, ...options } =
    checked("the options of connect", given, CONNECT_OPTIONS);
  checkId("tenant", tenant ?? DEFAULT_TENANT); // before there is a connection that would have to be closed
  new Subjects(prefix);
  const named = [servers ?? "127.0.0.1:4222"].flat();
  named.forEach((server, number) => checkKind(`servers[${number}]`, server, "string"));
  const addresses = named.flatMap((server) => server.split(",")).filter((server) => server.trim());
  if (addresses.length === 0) throw new InvalidMessageError("servers names none; leave it out for 127.0.0.1:4222");
  const bare = addresses.map(withoutCredentials);
  const shown = addresses.map((server) => server.replace(/^(\w+:\/\/)?.*@/, "$1")); // hides also what is no valid address
  // NATS's client takes the scheme for no demand: it would send the credentials to a server without TLS.
  const encrypted = bare.some((server) => /^tls:/i.test(server)) ? { tls: options.tls ?? {} } : {};
  try {
    const connection = await openPromptly(open, bare, {
      name: "turnkeep-client",
      maxReconnectAttempts: -1,
      reconnectTimeWait: 250,
      pingInterval: 5000, // a server that is gone without a word is left after three
      timeout: 5000, // for one attempt; after it a full server is left for the next one, when it reconnects
      ...credentials(addresses),
      ...options,
      ...encrypted,
    });
    return new Client(connection, { tenant, prefix, controlTimeoutMs });
  } catch (error) {
    if (has(error, "AuthorizationError")) {
      throw new NotPermittedError(`the NATS server at ${shown} refuses the credentials`, { cause: error });
    }
    if (isHangUp(error)) throw new FullServerError(`no NATS server at ${shown}: ${FULL}`, { cause: error });
    const isOfSystem = error instanceof Error && "code" in error; // such as ENOTFOUND, and faults of TLS
    if (isOfSystem || has(error, "ConnectionError") || has(error, "TimeoutError")) {
      throw new NoServerError(`no NATS server at ${shown}: ${messageOf(error)}`, { cause: error });
    }
    if (has(error, "InvalidArgumentError")) {
      throw new InvalidMessageError(`the options of connect do not agree: ${messageOf(error)}`, { cause: error });
    }
    throw error;
  }
}

/**
 * Open a connection that reconnects, but until it is open tell at once of a server that closes it.
 *
 * Else NATS's package waits 20 s for the reply of a server that has hung up, since it means to reconnect. Without
 * reconnections it leaves the other servers too: each of them must be the first one once.
 */
async function openPromptly(
  open: (options: ConnectOptions) => Promise<NatsConnection>,
  servers: string[],
  given: ConnectOptions,
): Promise<NatsConnection> {
  if (given.reconnect === false || given.waitOnFirstConnect) return open({ ...given, servers });
  const order = given.noRandomize ? servers : servers.sort(() => Math.random() - 0.5);
  for (let number = 1; ; number += 1) {
    try {
      const connection = await open({ ...given, servers: order, noRandomize: true, reconnect: false });
      const { options } = connection as unknown as { options: ConnectOptions }; // where the package looks each time
      Object.assign(options, { reconnect: true, noRandomize: given.noRandomize ?? false });
      return connection;
    } catch (error) {
      if (!isHangUp(error) || number === order.length) throw error;
      order.push(...order.splice(0, 1));
    }
  }
}

const FULL = "the server closed the connection at once, as one does that has none left (max_connections)";

/** Whether a server has closed the connection that it has just accepted: so it ends a read, or a write. */
function isHangUp(error: unknown): boolean {
  const code = error instanceof Error && "code" in error ? error.code : undefined;
  return code === "EPIPE" || code === "ECONNRESET" || messageOf(error) === "connection disconnected";
}

/** How many sessions are read back at a time, and how many of the log's entries first; then always four times as many. */
const SESSIONS_AT_ONCE = 32;
const FIRST_ENTRIES = 256;

const MOST_INPUTS = 16;
const MOST_LENGTH = 2 ** 17;

/** Divide inputs, so that neither a request nor its reply is too large; yield each part and the number of its first input. */
function* divided<T extends Input>(inputs: readonly T[]): Generator<[number, T[]]> {
  let start = 0;
  let length = 0;
  for (const [number, input] of inputs.entries()) {
    const size = input?.length ?? 1; // the worker refuses what has none
    if (number > start && (length + size > MOST_LENGTH || number - start === MOST_INPUTS)) {
      yield [start, inputs.slice(start, number)];
      [start, length] = [number, 0];
    }
    length += size;
  }
  if (start < inputs.length) yield [start, inputs.slice(start)];
}

/** Return a reply about a part of a list, which begins at `start`; an error has the number in the whole list. */
function counted(reply: ControlReply | undefined, start: number): ControlReply | undefined {
  if (reply?.type !== "failed") return reply;
  const whole = (text: string) => text.replace(/(?<=\w\[)\d+(?=\])/, (number) => String(start + Number(number)));
  return { ...reply, message: whole(reply.message), field: reply.field && whole(reply.field) };
}

/** Read base64 of 32-bit floats, little-endian. */
function numbers(vector: string): Float32Array {
  const bytes = Uint8Array.from(atob(vector), (char) => char.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

const USER_INFO = /^(\w+:\/\/)?([^/]*)@/;

/** NATS's JavaScript client takes no credentials in a URL. */
function withoutCredentials(server: string): string {
  return server.trim().replace(USER_INFO, "$1");
}

function credentials(servers: string[]): Pick<WsConnectionOptions, "token" | "user" | "pass"> {
  for (const server of servers) {
    const [user, ...pass] = (USER_INFO.exec(server.trim())?.[2] ?? "").split(":").map(unquoted);
    if (user) return pass.length > 0 ? { user, pass: pass.join(":") } : { token: user };
  }
  return {};
}

/** Decode what is percent-encoded; a text that is not stays as it is. */
function unquoted(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
