/* The list of sessions: search, state, order, pages. */

import { age, asked, count, exact, get, made, seconds, shown, tell, GONE } from "./dom.js";

const STATES = ["idle", "running", "waiting", "failed", "closed", "forgotten"];
const HEADS = ["session", "state", "tokens", "found", "prefilled", "generated", "time", "last"];

export const state = (row) => made("span", { class: `badge ${row.state}` },
  row.state === "waiting" ? `waiting ${row.waiting}` : row.state, row.dead ? ` · ${row.dead} dead` : "");
export const address = (name) => `#/session/${encodeURIComponent(name)}`;

function line(row, cost) {
  const words = [row.begins && row.session, row.parent && `${row.tags.includes("variant") ? "variant" : "fork"} of ${row.parent.session} at ${row.parent.position}`];
  const cells = [state(row), shown(row.position, exact), count(cost.found), count(cost.prefilled), count(cost.generated),
    cost.seconds ? seconds(cost.seconds) : GONE, made("time", { datetime: row.last, title: new Date(row.last).toLocaleString() }, age(row.last))];
  return made("tr", {},
    made("th", { scope: "row" }, made("a", { href: address(row.session) }, row.begins ?? row.session), made("span", { class: "words" }, words.filter(Boolean).join(" · "))),
    ...cells.map((cell, i) => made("td", { "data-head": HEADS[i + 1] }, cell)));
}

export function sessions(main, about) {
  let skip = 0, turn = 0, typing;
  const search = made("input", { type: "search", id: "search", placeholder: "name or first words", autocomplete: "off", input: () => {
    clearTimeout(typing);
    typing = setTimeout(anew, 250);
  } });
  const states = made("select", { change: anew }, made("option", { value: "" }, "all but forgotten"),
    ...STATES.map((one) => made("option", {}, one)));
  const by = made("select", { change: anew }, made("option", { value: "last" }, "last active"), made("option", { value: "name" }, "name"));
  const rows = made("tbody"), note = made("p", { class: "faint", role: "status" });
  const table = made("table", { class: "sessions", hidden: true },
    made("caption", { class: "hidden" }, "Sessions, with what they have cost in tokens and time"),
    made("thead", {}, made("tr", {}, ...HEADS.map((head) => made("th", { scope: "col" }, head)))), rows);
  const back = made("button", { click: () => turned(-1) }, "Newer"), on = made("button", { click: () => turned(1) }, "Older");
  const pager = made("div", { class: "row end", hidden: true }, back, on);
  let each = 50;
  main.append(
    made("div", { class: "row head" }, made("h1", {}, "Sessions"),
      !about.read_only && made("button", { class: "main", click: begin }, "New session")),
    made("div", { class: "row filters" }, made("label", { class: "grow" }, "Search", search), made("label", {}, "State", states),
      made("label", {}, "Order", by)),
    table, note, pager);

  async function begin() {
    const name = await asked({ title: "New session", text: "It begins with your first message.", yes: "Begin",
      name: `chat-${new Date().toISOString().slice(5, 19).replace(/[T:]/g, "-")}` });
    if (name) location.hash = address(name);
  }
  function anew() { skip = 0; refresh(); }
  function turned(by_) { skip = Math.max(0, skip + by_ * each); refresh(); }

  async function refresh() {
    const mine = ++turn;
    const query = new URLSearchParams({ words: search.value, state: states.value, sort: by.value, skip });
    const found = await get(`api/sessions?${query}`).catch((error) => { tell(note, error.message); });
    if (mine !== turn || !found) return;
    each = found.each;
    if (!found.rows.length && skip) return turned(-1);  // the last page has become empty
    const focused = rows.contains(document.activeElement) ? document.activeElement.getAttribute("href") : "";
    rows.replaceChildren(...found.rows.map((row, i) => line(row, found.costs[i])));
    rows.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
    table.hidden = !found.rows.length;
    pager.hidden = found.total <= each;
    [back.disabled, on.disabled] = [!skip, skip + each >= found.total];
    const isAll = !search.value && !states.value;
    tell(note, found.total > each ? `${skip + 1} to ${skip + found.rows.length} of ${found.total} sessions`
      : found.total ? `${found.total} session${found.total > 1 ? "s" : ""}`
      : isAll ? "There are no sessions yet: they begin with a first request, for example a chat here." : "No session is like this.");
  }
  return { refresh, leave: () => { turn += 1; clearTimeout(typing); } };
}
