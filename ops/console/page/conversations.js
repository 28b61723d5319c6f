/* The list of conversations beside a chat, with titles and a search over what was said. */

import { age, folding, get, made, tell } from "./dom.js";
import { address } from "./sessions.js";

/* What the names of a conversation's variants have in common. */
export const stem = (name) => name.replace(/--v\d+$/, "").slice(0, 56);
/* Names a conversation in what this browser keeps: the consoles of several models have one origin. */
export const place = (name) => `${location.pathname}${stem(name)}`;
/* Titles that the user has given; this browser keeps them, the log has none. */
const key = (name) => `title:${place(name)}`;
export const titled = (name) => localStorage.getItem(key(name));
export function entitle(name, title) {
  if (title) localStorage.setItem(key(name), title); else localStorage.removeItem(key(name));
}
export const newName = () => `chat-${new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-")}`;
export const title = (row) => titled(row.session) ?? row.begins ?? row.session;

const list = made("ol"), note = made("p", { class: "faint small", role: "status" });
let typing, turn = 0, current = null;
const search = made("input", { type: "search", placeholder: "Search all messages", title: "Ctrl K", "aria-label": "Search all messages", autocomplete: "off", input: () => {
  clearTimeout(typing);
  typing = setTimeout(refresh, 300);
}, keydown: (event) => { if (event.key === "Escape") event.stopPropagation(); } });  // it clears the field, and stops no answer
export function seek() {
  const side = search.closest("details");
  if (side) side.open = true;
  search.focus();
  search.select();
}

const isCurrent = (name) => current !== null && stem(name) === stem(current);
function line(row, found) {
  const words = found ?? (row.parent ? `fork of ${titled(row.parent.session) ?? row.parent.session}` : "");
  const facts = row.state === "idle" ? age(row.last) : row.state;
  return made("li", {}, made("a", { href: address(row.session), "aria-current": isCurrent(row.session) && "page", title: row.session },
    made("span", { class: "name" }, title(row)), made("span", { class: "faint" }, words ? `${facts} · ${words}` : facts)));
}

async function refresh() {
  const mine = ++turn;
  const found = await get(`api/sessions?${new URLSearchParams({ brief: 1, whole: 1, words: search.value })}`).catch((error) => tell(note, error.message));
  if (mine !== turn || !found) return;
  const focused = list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  list.replaceChildren(...found.rows.map((row) => line(row, found.found[row.session])));
  if (focused) list.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  tell(note, !found.is_whole ? "The log is long: only its older part was searched."
    : found.total > found.rows.length ? `${found.rows.length} of ${found.total}; all are under Sessions`
    : found.total ? "" : search.value ? "Nothing was said like this." : "Conversations appear here.");
}

/* The list for a page that shows a session (null: none yet). */
export function conversations(session, isReadOnly) {
  current = session;
  for (const link of list.querySelectorAll("a")) {
    if (isCurrent(link.title)) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  return { refresh, element: folding("side", "Conversations", made("nav", { "aria-label": "Conversations" },
    !isReadOnly && made("a", { class: "button", href: "#/", title: "Ctrl Shift O", "aria-current": !session && "page" }, "New chat"), search, list, note)) };
}
