// An agent with one tool, which can be killed anywhere and started again: steps that were answered keep their answers.
// docs/typescript.md says how to install turnkeep-client. With Node 23.6, Deno or Bun leave `npx tsx` out, or replace it.
//   NATS_URL=$(turnkeep info --url) npx tsx agent.mts trip-1 "What is the weather in Rome?"

import process from "node:process";

import { connect, runTools } from "turnkeep-client";

const [name = "trip-1", question = "What is the weather in Rome?"] = process.argv.slice(2);

const tools = [
  {
    type: "function" as const,
    function: {
      name: "weather",
      description: "The weather in a city",
      parameters: {
        type: "object",
        properties: { city: { type: "string", maxLength: 20 } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
];

async function weather({ city }: { city: string }) {
  console.log(`looking up ${JSON.stringify(city)}`);
  return { city, sky: "sunny", degrees: 24 };
}

const client = await connect({ servers: process.env["NATS_URL"] });
const session = client.session(name);

// The id names the work: after a crash the same program gets the recorded answers of all steps that were done.
const answer = await runTools(session, { weather }, {
  id: "weather",
  messages: [{ role: "user", content: question }],
  tools,
  tool_choice: "required",
  parallel_tool_calls: false,
  max_tokens: 200,
});
console.log(answer.text);

// Say the last words as they come: the id makes this part of the same work.
const summary = session.generate({
  id: "summary",
  messages: [{ role: "user", content: "Say it in one sentence." }],
  max_tokens: 60,
});
for await (const piece of summary) process.stdout.write(piece.text);
console.log(`\n${(await summary.result).finish_reason}`);
await client.close();
