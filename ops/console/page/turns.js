/* Turns of a conversation as elements. */

import { clock, count, made, seconds } from "./dom.js";
import { address } from "./sessions.js";

const WHO = { user: "You", assistant: "Model", system: "System", tool: "Result of a tool", text: "Text", tokens: "Tokens" };

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const folded = (title, text, kind) => made("details", { class: kind }, made("summary", {}, title), made("pre", {}, text));

export function said(one) {
  const isLong = one.role === "tool";
  return made("div", { class: `said ${one.role}` }, made("span", { class: "who" }, WHO[one.role] ?? one.role),
    one.reasoning && folded("Reasoning", one.reasoning, "reasoning"),
    one.text && (isLong ? folded("Content", one.text, "content") : made("div", { class: "text" }, one.text)),
    ...(one.calls ?? []).map(([name, given]) => folded(`Calls ${name}`, pretty(given), "call")));
}

function bar(found, prefilled) {
  const part = made("i"), whole = made("span", { class: "bar", "aria-hidden": "true" }, part);
  part.style.inlineSize = `${100 * found / Math.max(1, found + prefilled)}%`;
  return whole;
}

function cost(spent) {
  const figures = [["found", count(spent.found)], ["prefilled", count(spent.prefilled)],
    spent.generated !== undefined && ["generated", count(spent.generated)],
    spent.first_token_s !== undefined && ["first token", seconds(spent.first_token_s)],
    spent.tokens_per_s && ["tokens/s", count(spent.tokens_per_s)],
    spent.generated === undefined && ["in all", seconds(spent.total_s)]];
  return made("span", { class: "cost" }, bar(spent.found, spent.prefilled),
    ...figures.filter(Boolean).map(([name, value]) => made("span", {}, made("b", {}, value), ` ${name}`)));
}

/* `fork`, if it is given, is called with the position at which a turn has ended. */
export function element(turn, fork) {
  const canFork = fork && turn.state === "done" && turn.position && turn.kind !== "close";
  const stored = new Date(turn.stored);
  return made("li", { class: `turn ${turn.state}`, "data-seq": turn.seq },
    ...(turn.said ?? []).map(said),
    turn.state === "failed" && made("p", { class: "note bad" }, turn.note),
    made("div", { class: "meta" }, turn.spent && cost(turn.spent), turn.state === "done" && turn.note,
      turn.parent && made("a", { href: address(turn.parent) }, turn.parent),
      made("time", { datetime: turn.stored, title: stored.toLocaleString() }, clock(stored)),
      canFork && made("button", { class: "link", click: () => fork(turn.position), title: `Fork at position ${turn.position}` }, "Fork here")));
}

/* An answer that is on its way: `begin`, `add` and `quiet` are its events. */
export function growing(turn, cancel) {
  const text = made("div", { class: "text" }), thought = made("pre"), calls = made("div"), told = made("span", { class: "faint" }, "waiting for the worker");
  const reasoning = made("details", { class: "reasoning", open: true, hidden: true }, made("summary", {}, "Reasoning"), thought);
  const answer = made("div", { class: "said assistant growing", "aria-busy": "true" }, made("span", { class: "who" }, WHO.assistant),
    reasoning, text, calls);
  const box = made("li", { class: "turn waiting", "data-seq": turn.seq }, ...(turn.said ?? []).map(said), answer,
    made("div", { class: "meta" }, made("span", { class: "dots", "aria-hidden": "true" }), told,
      cancel && made("button", { class: "link", click: cancel }, "Stop")));
  return {
    box,
    begin() {
      for (const one of [text, thought, calls]) one.replaceChildren();
      reasoning.hidden = true;
    },
    add(chunk) {
      told.textContent = "";
      thought.append(chunk.reasoning);
      reasoning.hidden = !thought.textContent;
      text.append(chunk.text);
      for (const part of chunk.calls) {
        while (calls.children.length <= part.index) calls.append(folded("Calls ", "", "call"));
        const [name, given] = calls.children[part.index].children;
        name.append(part.name ?? "");
        given.append(part.arguments ?? "");
      }
    },
    quiet(seconds_) {
      told.textContent = `no token for ${seconds_} s: the answer continues when a worker is back`;
    },
  };
}
