/* The form of a chat: it asks a question, which the log keeps until a worker answers. */

import { made, path, post, toast } from "./dom.js";

export const isNearEnd = () => innerHeight + scrollY > document.documentElement.scrollHeight - 160;
export const toEnd = () => scrollTo(0, document.documentElement.scrollHeight);
const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (one) => one.toString(16).padStart(8, "0")).join("");

export function composer(name, refresh) {
  let id = newId();  // kept until the question has arrived, so that the same one is not asked twice
  const text = made("textarea", { id: "message", rows: 1, placeholder: "Message", required: true, input: () => { id = newId(); }, keydown: (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  } });
  const number = (attributes) => made("input", { type: "number", ...attributes });
  const most = number({ min: 1, max: 2 ** 31 - 1, placeholder: "what fits" });
  const temperature = number({ min: 0, max: 100, step: "any", placeholder: "the model's" });
  const rules = made("textarea", { rows: 1 }), system = made("label", { class: "grow" }, "System message", rules);
  const send = made("button", { class: "main" }, "Send");
  const form = made("form", { class: "composer", hidden: true, submit: ask },
    made("div", { class: "row" }, made("label", { class: "grow" }, made("span", { class: "hidden" }, "Message"), text), send),
    made("details", {}, made("summary", {}, "Options"), made("div", { class: "row" }, system,
      made("label", {}, "Tokens at most", most), made("label", {}, "Temperature", temperature))));
  const given = (field) => field.value ? field.valueAsNumber : null;

  async function ask(event) {
    event.preventDefault();
    if (!text.value.trim() || send.disabled) return;
    send.disabled = true;
    try {
      await post(path(name, "/ask"), { id, text: text.value, system: system.hidden ? "" : rules.value,
        max_tokens: given(most), temperature: given(temperature) });
      [text.value, rules.value] = ["", ""];
      await refresh();
      toEnd();
    } catch (error) {
      toast(error.message, true);
    } finally {
      send.disabled = false;
      text.focus();
    }
  }
  return { form, begins: (isNew) => { system.hidden = !isNew; } };
}
