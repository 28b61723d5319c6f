/* How programs reach this worker: addresses, and the lines for agents and libraries, as text to copy. */

import { copied, get, made, tell } from "./dom.js";

const AGENTS = [["Claude Code", "claude"], ["Codex", "codex"], ["opencode", "opencode"], ["pi", "pi"], ["Continue", "cn"], ["aider", "aider"]];

const snippets = (url, model, tenant, place) => [
  ["curl", `curl ${url}/v1/chat/completions -H 'Content-Type: application/json' -d '{
  "model": "${model}", "stream": true,
  "messages": [{"role": "user", "content": "Hello"}]
}'`],
  ["OpenAI's library for Python", `from openai import OpenAI

client = OpenAI(base_url="${url}/v1", api_key="any")
answer = client.chat.completions.create(
    model="${model}", messages=[{"role": "user", "content": "Hello"}]
)
print(answer.choices[0].message.content)`],
  ["OpenAI's library for JavaScript", `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${url}/v1", apiKey: "any" });
const answer = await client.chat.completions.create({
  model: "${model}", messages: [{ role: "user", content: "Hello" }],
});
console.log(answer.choices[0].message.content);`],
  ["Anthropic's library for Python", `from anthropic import Anthropic

client = Anthropic(base_url="${url}", api_key="any")
answer = client.messages.create(
    model="${model}", max_tokens=1000, messages=[{"role": "user", "content": "Hello"}]
)
print(answer.content[0].text)`],
  [`Turnkeep's library for Python, over NATS; export NATS_URL=$(${place.url}) first`, `import asyncio, os
from turnkeep_client import connect

async def main():
    async with connect(os.environ["NATS_URL"]${tenant === "default" ? "" : `, tenant="${tenant}"`}) as client:
        async for chunk in client.session("garden").generate(messages=[{"role": "user", "content": "Hello"}]):
            print(chunk.text, end="", flush=True)

asyncio.run(main())`],
];

const shown = (title, text) => made("div", { class: "code" }, made("div", { class: "row" }, made("span", {}, title),
  made("button", { class: "link", type: "button", click: () => copied(text) }, "Copy")), made("pre", { tabindex: 0 }, text));

export function connect(main, about) {
  const facts = made("dl", { class: "facts" }), note = made("p", { role: "status" }), examples = made("div", { class: "examples" });
  let last = "";
  main.append(made("div", { class: "row head" }, made("h1", {}, "Connect")), note, facts, examples);

  async function refresh(found) {
    const place = await get("api/place").catch(() => null);
    const models = [...new Set(Object.values(found.workers).map((one) => one.model))], model = models[0] ?? "any";
    if (!place || last === JSON.stringify([place, models])) return;
    last = JSON.stringify([place, models]);
    const url = place.gateway;
    tell(note, place.has_gateway ? "Agents and libraries for OpenAI's and Anthropic's APIs talk to the gateway."
      : "No gateway is known to run here. Agents and libraries for OpenAI's and Anthropic's APIs need one: turnkeep gateway starts it beside a worker, turnkeep serve --gateway together with one. The lines below are for its usual port.");
    note.className = place.has_gateway ? "" : "bad";
    const rows = [["base URL, OpenAI", `${url}/v1`], ["base URL, Anthropic", url], ["key", "any text, unless the gateway was started with --keys"],
      ["model", models.join(", ") || "the worker's; any name will do"], ["NATS", `${place.nats}; ${place.url} prints it with its token`]];
    facts.replaceChildren(...rows.map(([name, value]) => made("div", {}, made("dt", {}, name), made("dd", {}, made("code", {}, value)))));
    examples.replaceChildren(made("h2", {}, "Agents"),
      shown("nothing that you have configured is changed", AGENTS.map(([name, word]) => `${place.launch} ${word.padEnd(9)} # ${name}`).join("\n")),
      made("h2", {}, "Libraries"), ...snippets(url, model, about.tenant, place).map(([title, text]) => shown(title, text)));
  }
  return { refresh };
}
