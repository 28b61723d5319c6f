// Follow one answer over whatever is killed meanwhile; print a line for each piece, and in the end the result.
//   follow URL SESSION ID MAX_TOKENS

import { createRequire } from "node:module";
import process from "node:process";

import { connect } from "turnkeep-client";

const [servers, name = "", id, max_tokens] = process.argv.slice(2);
globalThis.WebSocket ??= createRequire(import.meta.url)("ws").WebSocket; // what browsers, Deno and Bun have

const client = await connect({ servers });
const answer = client.session(name).generate({ id, text: "Begin: ", max_tokens: Number(max_tokens) });
for await (const { i, tokens, text } of answer) console.log(JSON.stringify({ i, tokens, text }));
const { text, tokens } = await answer.result;
console.log(JSON.stringify({ result: { text, tokens } }));
await client.close();
