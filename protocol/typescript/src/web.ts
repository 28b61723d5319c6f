/** The entry of browsers: WebSocket alone. */

import { wsconnect } from "@nats-io/nats-core";

import { type Client, connectBy, type ConnectOptions } from "./client.js";

export * from "./index.js";

/** Connect to a NATS server's WebSocket address and return a client. */
export function connect(options: ConnectOptions = {}): Promise<Client> {
  return connectBy(wsconnect, options);
}
