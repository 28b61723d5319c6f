/* A menu of actions: a button that opens a list, in which each action says what it does. */

import { made } from "./dom.js";

/* Entries are [label, what it means, a function or an address, kind]. It closes by Escape, a choice, and a click or focus elsewhere. */
export function menu(entries) {
  const entry = ([label, means, does, kind]) => {
    const inner = [made("span", {}, label), means && made("span", { class: "faint small" }, means)];
    return typeof does === "string" ? made("a", { href: does, download: true, class: kind }, ...inner)
      : made("button", { type: "button", class: kind, click: does }, ...inner);
  };
  const list = made("div", { click: () => { box.open = false; } }, ...entries.filter(Boolean).map(entry));
  const summary = made("summary", { class: "button", "aria-label": "Actions" }, "⋯");
  const box = made("details", { class: "menu", keydown: (event) => {
    if (event.key !== "Escape" || !box.open) return;
    event.stopPropagation();  // else it stops the answer, too
    box.open = false;
    summary.focus();
  }, focusout: (event) => { if (event.relatedTarget && !box.contains(event.relatedTarget)) box.open = false; } }, summary, list);
  return box;
}
addEventListener("click", (event) => {
  for (const one of document.querySelectorAll(".menu[open]")) if (!one.contains(event.target)) one.open = false;
});
