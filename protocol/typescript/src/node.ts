/** The entry of Node, Deno and Bun: TCP, or WebSocket for addresses that begin with `ws:` or `wss:`. */

import { hasWsProtocol, wsconnect } from "@nats-io/nats-core";
import { connect as tcpConnect } from "@nats-io/transport-node";

import { type Client, connectBy, type ConnectOptions } from "./client.js";

export * from "./index.js";

/** Connect to NATS and return a client. While one client is open, do not connect another by the other transport. */
export function connect(options: ConnectOptions = {}): Promise<Client> {
  return connectBy((found) => (hasWsProtocol(found) ? wsconnect(found) : tcpConnect(found)), options);
}
