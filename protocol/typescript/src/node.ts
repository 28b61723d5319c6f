/** The entry of Node, Deno and Bun: TCP, or WebSocket for addresses that begin with `ws:` or `wss:`. */

import { hasWsProtocol, wsconnect } from "@nats-io/nats-core";
import { connect as tcpConnect } from "@nats-io/transport-node";

import { type Client, connectBy, type ConnectOptions } from "./client.js";
import { InvalidMessageError } from "./errors.js";

export * from "./index.js";

/** Connect to NATS and return a client. While one client is open, do not connect another by the other transport. */
export function connect(options: ConnectOptions = {}): Promise<Client> {
  return connectBy(async (found) => {
    if (!hasWsProtocol(found)) return tcpConnect(found);
    if (!("WebSocket" in globalThis) && found.wsFactory === undefined) {
      throw new InvalidMessageError("this runtime has no WebSocket: give a wsFactory, or use Node 22 or newer");
    }
    return wsconnect(found);
  }, options);
}
