/* Turns of a conversation as elements. */

import { clock, copied, count, made, seconds, tree } from "./dom.js";
import { address } from "./sessions.js";

const WHO = { user: "You", assistant: "Model", system: "System", tool: "Result of a tool", text: "Text", tokens: "Tokens" };

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const folded = (title, text, kind) => made("details", { class: kind }, made("summary", {}, title), made("pre", { tabindex: 0 }, text));

export function said(one) {
  const text = one.blocks ? made("div", { class: "text rich" }, ...one.blocks.map(tree)) : made("div", { class: "text" }, one.text);
  const element = made("div", { class: `said ${one.role}` }, made("span", { class: "who" }, WHO[one.role] ?? one.role),
    one.reasoning && folded("Reasoning", one.reasoning, "reasoning"),
    one.text && (one.role === "tool" ? folded("Content", one.text, "content") : text),
    ...(one.calls ?? []).map(([name, given]) => folded(`Calls ${name}`, pretty(given), "call")));
  element.source = one.text ?? "";
  return element;
}

function bar(found, prefilled) {
  const part = made("i"), whole = made("span", { class: "bar", "aria-hidden": "true" }, part);
  part.style.inlineSize = `${100 * found / Math.max(1, found + prefilled)}%`;
  return whole;
}

const MEANS = { found: "tokens of the prompt whose KV was there already", prefilled: "tokens of the prompt that the model had to read",
  generated: "tokens of the answer" };

function cost(spent) {
  const figures = [["found", count(spent.found)], ["prefilled", count(spent.prefilled)],
    spent.generated !== undefined && ["generated", count(spent.generated)],
    spent.first_token_s !== undefined && ["first token", seconds(spent.first_token_s)],
    spent.tokens_per_s && ["tokens/s", count(spent.tokens_per_s)],
    spent.generated === undefined && ["in all", seconds(spent.total_s)]];
  return made("span", { class: "cost" }, bar(spent.found, spent.prefilled),
    ...figures.filter(Boolean).map(([name, value]) => made("span", { title: MEANS[name] }, made("b", {}, value), ` ${name}`)));
}

/* What a turn can be asked for: its answer to copy, another answer, another question, a fork. `acts` is null if nothing may be done. */
function deeds(turn, acts) {
  const answer = turn.said?.findLast((one) => one.role === "assistant")?.text, isOver = turn.state !== "waiting";
  const isQuestion = turn.kind === "generate" && turn.said?.filter((one) => one.role === "user").length === 1
    && turn.said.every((one) => ["system", "user", "assistant"].includes(one.role));
  const link = (label, click, title) => made("button", { class: "link", click, title }, label);
  return [answer && link("Copy", () => copied(answer), "Copy the answer as Markdown"),
    acts && isOver && isQuestion && link("Regenerate", () => acts.again(turn), "Another answer, in a fork of this conversation"),
    acts && isOver && isQuestion && link("Edit", () => acts.edit(turn), "Another question here, in a fork of this conversation"),
    acts && turn.state === "done" && turn.position > 0 && turn.kind !== "close"
      && link("Fork here", () => acts.fork(turn.position, turn.seq), `Fork at position ${turn.position}`)];
}

export function element(turn, acts) {
  const stored = new Date(turn.stored);
  return made("li", { class: `turn ${turn.state}`, "data-seq": turn.seq },
    ...(turn.said ?? []).map(said),
    turn.state === "failed" && made("p", { class: "note bad" }, turn.note),
    made("div", { class: "meta" }, turn.spent && cost(turn.spent), turn.state === "done" && turn.note,
      turn.parent && made("a", { href: address(turn.parent) }, turn.parent),
      made("time", { datetime: turn.stored, title: stored.toLocaleString() }, clock(stored)), ...deeds(turn, acts)));
}

/* An answer that is on its way: `begin`, `add`, `draw` and `quiet` are its events. */
export function growing(turn, cancel) {
  const text = made("div", { class: "text rich" }), thought = made("pre"), calls = made("div"), told = made("span", { class: "faint" }, "waiting for the worker");
  const reasoning = made("details", { class: "reasoning", open: true, hidden: true }, made("summary", {}, "Reasoning"), thought);
  const answer = made("div", { class: "said assistant growing", "aria-busy": "true" }, made("span", { class: "who" }, WHO.assistant),
    reasoning, text, calls);
  const box = made("li", { class: "turn waiting", "data-seq": turn.seq }, ...(turn.said ?? []).map(said), answer,
    made("div", { class: "meta" }, made("span", { class: "dots", "aria-hidden": "true" }), told,
      cancel && made("button", { class: "link", click: cancel }, "Stop")));
  answer.source = "";
  return {
    box,
    begin() {
      answer.source = "";
      for (const one of [text, thought, calls]) one.replaceChildren();
      reasoning.hidden = true;
    },
    add(chunk) {
      told.textContent = "";
      answer.source += chunk.text;
      thought.append(chunk.reasoning);
      reasoning.hidden = !thought.textContent;
      if (chunk.text) reasoning.open = false;
      for (const part of chunk.calls) {
        while (calls.children.length <= part.index) calls.append(folded("Calls ", "", "call"));
        const [name, given] = calls.children[part.index].children;
        name.append(part.name ?? "");
        given.append(part.arguments ?? "");
      }
    },
    draw({ first, blocks }) {
      while (text.children.length > first) text.lastElementChild.remove();
      text.append(...blocks.map(tree));
    },
    quiet(seconds_) {
      told.textContent = `no token for ${seconds_} s: the answer continues when a worker is back`;
    },
  };
}
