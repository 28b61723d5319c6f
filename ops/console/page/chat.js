/* The form of a chat: it asks a question, which the log keeps until a worker answers. */

import { place } from "./conversations.js";
import { exact, made, path, post, tell, toast } from "./dom.js";
import { attachments } from "./images.js";

export const isNearEnd = () => innerHeight + scrollY > document.documentElement.scrollHeight - 160;
export const toEnd = () => scrollTo(0, document.documentElement.scrollHeight);
export const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (one) => one.toString(16).padStart(8, "0")).join("");

/* What was chosen stays for the next conversation, until the page is loaded again. */
const chosen = {};
const number = (label, name, attributes) => {
  const field = made("input", { type: "number", step: "any", ...attributes, input: () => { chosen[name] = field.value; } });
  field.value = chosen[name] ?? "";
  return made("label", {}, label, field);
};
const area = (label, name, attributes) => {
  const field = made("textarea", { rows: 1, ...attributes, input: () => { chosen[name] = field.value; } });
  field.value = chosen[name] ?? "";
  return made("label", { class: "grow" }, label, field);
};

/* The options of a question. Raises an error if the schema is no JSON. */
export function options() {
  const given = {};
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) if (chosen[name]) given[name] = Number(chosen[name]);
  if (!chosen.schema?.trim()) return given;
  try {
    return { ...given, schema: JSON.parse(chosen.schema) };
  } catch (error) {
    throw new Error(`the JSON schema is no JSON: ${error.message}`);
  }
}

/* From this many characters on, the tokens of a message are counted before it is sent. */
const LONG = 4000;
/* Says how many tokens a long message has, and whether the model takes so many. */
function counter(name) {
  const note = made("span", { class: "faint small count", role: "status" });
  let soon, turn = 0;
  async function ask(text, mine) {
    const found = await post(path(name, "/count"), { text }).catch(() => null);
    if (mine !== turn) return;
    if (!found) return tell(note, "");  // else it would be of an earlier text
    const isTooLong = found.context > 0 && found.position >= found.context, all = `${exact(found.tokens)} tokens`;
    note.className = `${isTooLong ? "bad" : "faint"} small count`;
    tell(note, !isTooLong ? all : found.tokens === found.position ? `${all}: too long, the model takes ${exact(found.context)}`
      : `${all}, ${exact(found.position)} with the conversation: too long, the model takes ${exact(found.context)}`);
  }
  return { note, see(text) {
    clearTimeout(soon);
    const mine = ++turn;
    if (text.length < LONG) tell(note, ""); else soon = setTimeout(() => ask(text, mine), 500);
  } };
}

/* A draft of a conversation, whichever variant is shown, is kept by this browser until it is sent; `given` is null for a new chat. */
const draft = (given) => `draft:${given ? place(given) : ""}`;
export const dropDraft = (name) => localStorage.removeItem(draft(name));
function keepDraft(name, text) {
  try {
    localStorage.setItem(draft(name), text);
  } catch {  // the browser has no room for it
    dropDraft(name);
  }
}

/* `sent` is called when a question is in the log, `stop` to cancel what waits and runs. */
export function composer(name, given, sent, stop) {
  let id = newId();  // kept until the question has arrived, so that the same one is not asked twice
  const counted = counter(name);
  const text = made("textarea", { id: "message", rows: 1, placeholder: "Message", required: true, input: () => {
    id = newId();
    if (text.value) keepDraft(given, text.value); else dropDraft(given);
    counted.see(text.value);
  }, keydown: (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  } });
  text.value = localStorage.getItem(draft(given)) ?? "";
  counted.see(text.value);
  const images = attachments(text, () => {
    id = newId();
    text.required = !images.any();
  });
  const system = area("System message", "system", { placeholder: "for example: Answer in one sentence." });
  const send = made("button", { class: "main" }, "Send");
  const stopping = made("button", { type: "button", hidden: true, click: stop, title: "Esc" }, "Stop");
  const form = made("form", { class: "composer", hidden: true, submit: ask },
    made("div", { class: "row" }, made("label", { class: "grow" }, made("span", { class: "hidden" }, "Message"), text), stopping, ...images.parts, send), images.row, counted.note,
    made("details", {}, made("summary", {}, "Options"), made("div", { class: "row" }, system,
      number("Tokens at most", "max_tokens", { min: 1, max: 2 ** 31 - 1, step: 1, placeholder: "what fits" }),
      number("Temperature", "temperature", { min: 0, max: 100, placeholder: "the model's" }),
      number("Top p", "top_p", { min: 0.001, max: 1, placeholder: "the model's" }),
      number("Seed", "seed", { min: 0, max: 2 ** 53 - 1, step: 1, placeholder: "any" }),
      area("JSON schema of the answer", "schema", { placeholder: '{"type": "object", ...}', spellcheck: "false" }))));
  // A field in folded options has no place where the browser could say what is wrong with it.
  form.addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
  // It stays at the foot of the window: what gets the focus must not scroll behind it.
  new ResizeObserver(() => { document.documentElement.style.scrollPaddingBottom = `${form.offsetHeight + 32}px`; }).observe(form);

  async function ask(event) {
    event.preventDefault();
    if (!(text.value.trim() || images.any()) || send.disabled) return;
    send.disabled = true;
    try {
      await post(path(name, "/ask"), { id, text: text.value, images: await images.files(), system: system.hidden ? "" : chosen.system ?? "", ...options() });
      text.value = "";
      images.clear();
      dropDraft(given);
      counted.see("");
      await sent();
      if (form.isConnected) toEnd();
    } catch (error) {
      toast(error.message, true);
    } finally {
      send.disabled = false;
      text.focus();
    }
  }
  return { form, text, takes: images.takes, begins: (isNew) => { system.hidden = !isNew; }, busy: (isBusy) => { stopping.hidden = !isBusy; } };
}
