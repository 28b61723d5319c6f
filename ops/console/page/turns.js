/* Turns of a conversation as elements. */

import { clock, copied, count, exact, made, seconds, tree } from "./dom.js";
import { thumbnails } from "./images.js";
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
const link = (label, click, title) => made("button", { class: "link", type: "button", click, title }, label);
const who = (role, model) => made("span", { class: "who" }, (role === "assistant" && model) || (WHO[role] ?? role));

function said(one, model, session) {
  const text = one.blocks ? made("div", { class: "text rich" }, ...one.blocks.map(tree)) : made("div", { class: "text" }, one.text);
  const element = made("div", { class: `said ${one.role}` }, who(one.role, model),
    one.reasoning && folded("Reasoning", one.reasoning, "reasoning"),
    one.images && thumbnails(session, one.images),
    one.text && (one.role === "tool" ? folded("Content", one.text, "content") : text),
    ...(one.calls ?? []).map(([name, given]) => folded(`Calls ${name}`, pretty(given), "call")));
  element.source = one.text ?? "";
  return element;
}

const MEANS = { found: "tokens of the prompt whose KV was there already", prefilled: "tokens of the prompt that the model had to read",
  "of images": "tokens of the images that came with this turn",
  generated: "tokens of the answer" };

/* What a turn has cost: one figure, behind which are the others. */
function cost(spent) {
  const figures = [["found", count(spent.found)], ["prefilled", count(spent.prefilled)],
    spent.images && ["of images", count(spent.images)],
    spent.generated !== undefined && ["generated", count(spent.generated)],
    spent.first_token_s !== undefined && ["first token", seconds(spent.first_token_s)], ["in all", seconds(spent.total_s)]];
  return made("details", { class: "cost" }, made("summary", { title: "What it has cost" },
    spent.tokens_per_s ? `${count(spent.tokens_per_s)} tokens/s` : seconds(spent.total_s)),
  ...figures.filter(Boolean).map(([name, value]) => made("span", { title: MEANS[name] }, made("b", {}, value), ` ${name}`)));
}

/* A switch between the variants of a message: `choice` has their sessions, and which one is shown. */
function switching({ sessions, shown }, go) {
  const step = (label, to, text) => link(text, () => go(sessions[to]), label);
  const back = step("The variant before", shown - 1, "‹"), on = step("The next variant", shown + 1, "›");
  [back.disabled, on.disabled] = [shown === 0, shown === sessions.length - 1];
  for (const one of [back, on]) one.setAttribute("aria-label", one.title);
  return made("span", { class: "switch", role: "group", "aria-label": "Variants" }, back, `${shown + 1}/${sessions.length}`, on);
}

/* The field that takes the place of a question while it is changed. */
function editing(bubble, text, ask) {
  const field = made("textarea", { "aria-label": "The question, changed" });
  const close = () => { form.replaceWith(bubble); bubble.querySelector(".link")?.focus(); };
  const form = made("form", { class: "edit", submit: (event) => { event.preventDefault(); if (field.value.trim()) ask(field.value); },
    keydown: (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    } }, field, made("div", { class: "row end" }, made("button", { type: "button", click: close }, "Cancel"), made("button", { class: "main" }, "Send")));
  bubble.replaceWith(form);
  field.value = text;
  field.focus();
  field.setSelectionRange(text.length, text.length);
}

/* Whether a turn is one question and its answer, so that it can be asked again. */
const isQuestion = (turn) => turn.kind === "generate" && turn.said?.filter((one) => one.role === "user").length === 1
  && turn.said.every((one) => ["system", "user", "assistant"].includes(one.role));

/* `acts` is null if nothing may be done; `choice` is null if the message has no variants, `go` shows one of them. */
export function element(session, turn, acts, choice, go) {
  const answer = turn.said?.findLast((one) => one.role === "assistant")?.text, stored = turn.stored && new Date(turn.stored);
  const again = acts && turn.state !== "waiting" && isQuestion(turn);
  const parts = (turn.said ?? []).map((one) => {
    const part = said(one, turn.model, session);
    if (again && one.role === "user") part.append(link("Edit", () => editing(part, one.text, (text) => acts.again(turn, text)), "Ask another question here"));
    return part;
  });
  return made("li", { class: `turn ${turn.state}`, "data-seq": turn.seq }, ...parts,
    turn.state === "failed" && made("p", { class: "note bad" }, turn.note),
    made("div", { class: "meta" }, choice && switching(choice, go),
      answer && link("Copy", () => copied(answer), "Copy the answer as Markdown"),
      again && link("Regenerate", () => acts.again(turn), "Another answer; this one stays"),
      acts && turn.state === "done" && turn.position > 0 && turn.kind !== "close"
        && link("Fork", () => acts.fork(turn.position, turn.seq), `A conversation of its own, which begins with all up to here (${exact(turn.position)} tokens)`),
      turn.state === "done" && turn.note, turn.parent && made("a", { href: address(turn.parent) }, turn.parent),
      turn.spent && cost(turn.spent),
      stored && made("time", { datetime: turn.stored, title: stored.toLocaleString() }, clock(stored))));
}

/* What an answer without a new token waits for, in words. */
function waiting({ is_heard, others, read, of, written }, hasText) {
  if (!is_heard) return "no worker answers: the answer continues when a worker is back";
  if (others) return `waiting for ${others} other${others > 1 ? "s" : ""}`;
  if (others === 0) return "waiting for the worker";
  if (read < of && !written) return `reading the prompt: ${exact(read)} of ${exact(of)} tokens`;
  return hasText || !written ? "" : `${exact(written)} tokens written`;
}

/* An answer that is on its way: `begin`, `add`, `draw` and `waits` are its events. */
export function growing(session, turn, model) {
  const text = made("div", { class: "text rich" }), thought = made("pre"), calls = made("div"), told = made("span", { class: "faint" }, "waiting for the worker");
  const reasoning = made("details", { class: "reasoning", open: true, hidden: true }, made("summary", {}, "Reasoning"), thought);
  const answer = made("div", { class: "said assistant growing", "aria-busy": "true" }, who("assistant", model), reasoning, text, calls);
  const box = made("li", { class: "turn waiting", "data-seq": turn.seq }, ...(turn.said ?? []).map((one) => said(one, model, session)), answer,
    made("div", { class: "meta" }, made("span", { class: "dots", "aria-hidden": "true" }), told));
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
    waits(what) {
      told.textContent = waiting(what, Boolean(answer.source));
    },
  };
}
