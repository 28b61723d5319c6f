// Follow one answer over whatever is killed meanwhile; report each piece, and in the end the result.
//   follow.js URL SESSION ID MAX_TOKENS, or in a page behind its `#`, with `|` between them

import { connect } from "turnkeep-client";

const inPage = "document" in globalThis;
const [servers = "", name = "", id, max_tokens] = inPage ? location.hash.slice(1).split("|") : process.argv.slice(2);

async function report(what: unknown): Promise<void> {
  const line = JSON.stringify(what);
  if (inPage) await fetch("/", { method: "POST", body: line });
  else console.log(line);
}

const client = await connect({ servers });
const answer = client.session(name).generate({ id, text: "Begin: ", max_tokens: Number(max_tokens) });
for await (const { i, tokens, text } of answer) await report({ i, tokens, text });
const { text, tokens } = await answer.result;
await report({ result: { text, tokens } });
await client.close();
