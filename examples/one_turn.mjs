// One turn in plain nats.js: a question, its answer token by token, and the result. The JavaScript client takes no token
// in a URL, so the token is an option.
//
// npm install @nats-io/transport-node @nats-io/jetstream
// NATS_URL=$(turnkeep info --url) node one_turn.mjs

import { connect } from "@nats-io/transport-node";
import { jetstream } from "@nats-io/jetstream";

const url = new URL(process.env.NATS_URL); // nats://TOKEN@127.0.0.1:4222
const nc = await connect({ servers: url.host, token: url.username });
const session = "turnkeep.default.demo";
const everything = nc.subscribe(`${session}.>`);
await nc.flush(); // the server has the subscription before the request
const request = { type: "generate", id: "turn-1", max_tokens: 32,
                  messages: [{ role: "user", content: "Name three primes." }] };
const ack = await jetstream(nc).publish(`${session}.in`, JSON.stringify(request));
for await (const message of everything) {
  if (message.subject === `${session}.tok.turn-1` && message.data.length > 0) {
    const { seq, text } = message.json();
    if (seq === ack.seq) process.stdout.write(text);
  } else if (message.subject === `${session}.out` && message.json().seq === ack.seq) {
    const result = message.json();
    console.log("\n", result.type, result.usage ?? result.message);
    break;
  }
}
await nc.close();
