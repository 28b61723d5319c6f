/* One session: its figures, tree, conversation, actions, and the chat. Without a name a new one begins. */

import { composer, isNearEnd, newId, options, toEnd } from "./chat.js";
import { conversations, entitle, newName, title, titled } from "./conversations.js";
import { age, asked, count, exact, folding, get, made, path, post, seconds, shown, tell, toast } from "./dom.js";
import { address, state } from "./sessions.js";
import { element, growing } from "./turns.js";

export function session(main, given, about) {
  const name = given ?? newName();
  const turns = new Map();  // by sequence: what is shown, and its element
  let more = null, stream = null, row = null, turn = 0, isFirst = true, models = "", listed = 0, cost = null, pins = [];
  const badge = made("span"), facts = made("dl", { class: "facts" }), tree = made("section", { class: "tree", hidden: true });
  const list = made("ol", { class: "talk" });
  const note = made("p", { class: "faint", role: "status" });
  const earlier = made("button", { hidden: true, click: () => before() }, "Earlier turns");
  const actions = made("div", { class: "row actions" });
  const head = made("h1", {}, given ? titled(name) ?? name : "New chat"), chat = composer(name, sent, stop), box = chat.form;
  const beside = conversations(given, about.read_only);
  main.append(made("div", { class: "columns" }, beside.element,
    made("div", { class: "conversation" }, made("div", { class: "row title" }, head, badge), earlier,
      made("div", { role: "log", "aria-label": "Conversation", "aria-live": "polite" }, list), note, box),
    given && folding("aside", "Details", actions, facts, tree)));

  async function sent() {
    if (given) await refresh(); else location.hash = address(name);
  }
  async function act(action, details = {}) {
    try {
      toast((await post(path(name, `/${action}`), details)).said);
      await refresh();
      seePins();
      return true;
    } catch (error) {
      toast(error.message, true);
      return false;
    }
  }
  /* Whether the session still has its tokens up to a position as they were after the turn at `seq`. */
  const stands = (position, seq) => position !== undefined && [...turns.values()].every(({ turn: later }) => later.seq <= seq || !(later.kept < position));
  const moved = () => toast("The text before it has changed since: a rewind, or the chat template, has replaced some of it.", true);

  async function fork(position, seq) {
    if (position && !stands(position, seq)) return moved();
    const text = position ? `It begins with the first ${exact(position)} tokens of ${name}.` : `It begins with all tokens of ${name}.`;
    const chosen = await asked({ title: "Fork", text: `${text} Both go on apart.`, yes: "Fork", name: `${name.slice(0, 50)}-fork` });
    if (chosen && await act("fork", { name: chosen, ...(position ? { position } : {}) })) location.hash = address(chosen);
  }
  async function sure(action, yes, text) {
    if (!await asked({ title: `${yes} ${name}?`, text, yes, danger: true })) return;
    if (await act(action) && action === "forget") location.hash = "#/";
  }
  async function rename() {
    const chosen = await asked({ title: "Title", text: `For ${name}. This browser keeps the title; empty removes it.`, yes: "Keep", name: titled(name) ?? "", isFree: true });
    if (chosen === null) return;
    entitle(name, chosen);
    listed = 0;
    refresh();
  }

  /* Cancel what waits and what runs, the last first: else what waits would begin meanwhile. */
  async function stop() {
    const waiting = [...turns.values()].map((one) => one.turn).filter((one) => one.state === "waiting" && one.id).reverse();
    for (const one of waiting) await act("cancel", { id: one.id });
  }

  /* Ask again from a turn on, in a fork of what was before it. */
  async function again(one, text) {
    if (!stands(one.start, one.seq)) return moved();
    const base = name.slice(0, 56).replace(/-v\d+$/, ""), position = one.start;
    const words = (role) => one.said.find((said) => said.role === role)?.text ?? "";
    try {
      const taken = new Set((await get(`api/sessions?${new URLSearchParams({ brief: 1, words: `${base}-v` })}`)).rows.map((found) => found.session));
      let number = 2;
      while (taken.has(`${base}-v${number}`)) number += 1;
      const as = `${base}-v${number}`;
      await post(path(name, "/fork"), { name: as, position });
      await post(path(as, "/ask"), { id: newId(), text: text ?? words("user"), system: words("system"), vary: text === undefined, ...options() });
      location.hash = address(as);
    } catch (error) {
      toast(error.message, true);
    }
  }
  async function edit(one) {
    const text = one.said.find((said) => said.role === "user").text;
    const field = made("textarea", { "aria-label": "The question, changed" });
    const form = made("form", { class: "edit", submit: (event) => { event.preventDefault(); if (field.value.trim()) again(one, field.value); } }, field,
      made("div", { class: "row end" }, made("button", { type: "button", click: () => form.remove() }, "Cancel"), made("button", { class: "main" }, "Ask in a fork")));
    turns.get(one.seq).element.append(form);
    field.value = text;
    field.focus();
    field.setSelectionRange(text.length, text.length);
  }
  const acts = about.read_only ? null : { fork, again, edit };

  function buttons() {
    const isOpen = row && !["closed", "forgotten"].includes(row.state);
    const button = (label, click, kind, title) => made("button", { click, class: kind, title }, label);
    const shown_ = about.read_only || !row ? [] : isOpen ? [
      button("Rename", rename), button("Fork", () => fork(), null, "A conversation that goes on from here, apart from this one"),
      button("Pin", () => act("pin"), null, "Keep its KV on the disk, so that it is never prefilled again"), button("Unpin", () => act("unpin")),
      button("Close", () => sure("close", "Close", "It ends, and some days later it is removed from the log. Its name can be opened again.")),
    ] : [button("Open again", () => act("open"))];
    if (row && !about.read_only && row.state !== "forgotten") {
      shown_.push(button("Delete", () => sure("forget", "Delete", "Its conversation is removed from the log and the workers' disks. This cannot be undone."), "danger"));
    }
    // The last one: its menu covers none of the others.
    const as = (label, form) => made("a", { href: path(name, `/export${form ? `?form=${form}` : ""}`), download: true }, label);
    if (row) shown_.push(made("details", { class: "menu" }, made("summary", { class: "button" }, "Export"),
      made("div", {}, as("Markdown", "md"), as("JSON", "json"), as("Archive, for turnkeep import", ""))));
    if (actions.dataset.state !== `${row?.state}`) actions.replaceChildren(...shown_);
    actions.dataset.state = `${row?.state}`;
    box.hidden = about.read_only || Boolean(row && !isOpen);
  }

  function figures(found) {
    cost = found;
    const all = row ? [["tokens", shown(row.position, exact)],
      ["found in KV", count(cost.found), "tokens of prompts whose KV (what the model keeps of a token) was on the device or the disk"],
      ["prefilled", count(cost.prefilled), "tokens of prompts that the model had to read"],
      ["generated", count(cost.generated), "tokens of answers"], ["time", seconds(cost.seconds), "from requests to their results"], ["last active", age(row.last)],
      ["model", row.model ?? "–"], ["worker", row.worker ?? "–"],
      ...(pins.length ? [["pinned", `the first ${pins.map(exact).join(", ")} tokens`, "KV on the disk that is never evicted"]] : []),
      ...(row.tags?.length ? [["tags", row.tags.join(", ")]] : [])] : [];
    facts.replaceChildren(...all.map(([term, value, title]) => made("div", { title }, made("dt", {}, term), made("dd", {}, value))));
    badge.replaceChildren(...(row ? [state(row)] : []));
  }

  const branch = (one) => made("li", {},
    one.session === name ? made("b", { "aria-current": "page" }, one.session) : made("a", { href: address(one.session) }, one.session),
    made("span", { class: "faint" }, ` ${one.row?.parent ? `at ${exact(one.row.parent.position)}` : one.row ? "" : "gone"}`),
    one.forks.length > 0 && made("ul", {}, ...one.forks.map(branch)));
  async function seePins() {
    pins = await get(path(name, "/pins")).catch(() => []);
    if (cost) figures(cost);
  }
  async function drawTree() {
    const found = await get(path(name, "/tree")).catch(() => null), wasNearEnd = isNearEnd();
    tree.hidden = !found;
    if (found) tree.replaceChildren(made("h2", {}, "Forks"), made("ul", {}, branch(found)));
    if (wasNearEnd) toEnd();
  }

  /* Put turns where they belong, and leave those alone that have not changed. */
  function put(found) {
    const wasNearEnd = isFirst || isNearEnd();
    for (const one of found) {
      const kept = turns.get(one.seq), text = JSON.stringify(one);
      if (kept?.text === text || kept?.element.querySelector(".edit") || (one.state === "waiting" && stream?.seq === one.seq)) continue;
      const isNext = one.state === "waiting" && one.kind === "generate" && !stream;
      const made_ = isNext ? listen(one) : element(one, acts);
      if (one.state === "waiting" && !isNext) made_.append(made("p", { class: "note faint" }, "waiting"));
      if (kept) kept.element.replaceWith(made_);
      else list.insertBefore(made_, [...turns.entries()].filter(([seq]) => seq > one.seq).sort(([a], [b]) => a - b)[0]?.[1].element ?? null);
      turns.set(one.seq, { text: isNext ? "" : text, element: made_, turn: one });
    }
    chat.busy([...turns.values()].some((one) => one.turn.state === "waiting"));
    if (wasNearEnd && found.length) toEnd();
  }

  function listen(one) {
    const grown = growing(one, about.read_only ? null : () => act("cancel", { id: one.id }));
    const events = new EventSource(path(name, `/answers/${one.seq}`));
    const on = (kind, then) => events.addEventListener(kind, (event) => {
      const wasNearEnd = isNearEnd();
      then(JSON.parse(event.data));
      if (wasNearEnd) toEnd();
    });
    const ended = () => { events.close(); if (stream?.events === events) stream = null; };
    stream = { seq: one.seq, events };
    on("begin", () => grown.begin());
    on("chunk", (chunk) => grown.add(chunk));
    on("blocks", (blocks) => grown.draw(blocks));
    on("quiet", (told) => { grown.quiet(told.seconds); dispatchEvent(new Event("doubt")); });
    on("end", (told) => { ended(); if (told.error) toast(told.error, true); refresh(); });
    events.onerror = () => { if (events.readyState === EventSource.CLOSED) ended(); };  // the next refresh tries again
    return grown.box;
  }

  async function refresh(all) {
    const mine = ++turn;
    if (all) models = [...new Set(Object.values(all.workers).filter((one) => one.up).map((one) => one.model))].join(" or ");
    const found = given ? await get(path(name)).catch((error) => { if (isFirst) tell(note, error.message); }) : { row: null, turns: [], more: null };
    if (mine !== turn || !found) return;
    const isChanged = isFirst || row?.entries !== found.row?.entries;
    row = found.row;
    if (isFirst) more = found.more;
    if (row) tell(head, title(row));
    tell(note, found.turns.length || (given && about.read_only) ? "" : `It begins with your first message${models && `; ${models} answers`}.`);
    if (given && !row) tell(note, turns.size ? "This session was removed meanwhile; what is shown is what it was." : `There is no session ${name} yet. ${note.textContent}`);
    chat.begins(!found.turns.length);
    buttons();
    figures(found.cost);
    put(found.turns);
    earlier.hidden = !more;
    if (isFirst && !box.hidden) box.querySelector("textarea").focus({ preventScroll: true });
    isFirst = false;
    if (isChanged && row) { drawTree(); seePins(); }
    if (isChanged || Date.now() > listed + 20000) { listed = Date.now(); beside.refresh(); }
  }

  async function before() {
    const height = document.documentElement.scrollHeight;
    const found = await get(path(name, `?before=${more[0]}&end=${more[1]}`)).catch((error) => toast(error.message, true));
    if (!found) return;
    put(found.turns);
    more = found.more;
    earlier.hidden = !more;
    scrollTo(0, scrollY + document.documentElement.scrollHeight - height);
  }
  const onKey = (event) => {
    if (event.key === "Escape" && acts && !document.querySelector("dialog[open]")) stop();
  };
  document.addEventListener("keydown", onKey);
  return { refresh, leave: () => { turn += 1; stream?.events.close(); document.removeEventListener("keydown", onKey); } };
}
