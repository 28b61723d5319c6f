/* One conversation: its turns, what can be done with it, and the chat. Without a name a new one begins. */

import { composer, dropDraft, isNearEnd, newId, options, toEnd } from "./chat.js";
import { conversations, entitle, newName, stem, title, titled } from "./conversations.js";
import { details } from "./details.js";
import { asked, exact, get, made, path, post, tell, toast } from "./dom.js";
import { files } from "./images.js";
import { menu } from "./menu.js";
import { address, state } from "./sessions.js";
import { element, growing } from "./turns.js";

/* So many parts of a conversation are read again at most, for turns that waited when they were read. */
const MOST_PARTS = 5;
/* Where a message was on the screen whose variant was chosen: the next page shows it at the same place. */
let place = null;

export function session(main, given, about) {
  const name = given ?? newName();
  const turns = new Map();  // by sequence: what is shown, and its element
  let more = null, stream = null, row = null, turn = 0, isFirst = true, models = "", listed = 0, cost = null, isLeft = false, isAsking = false;
  let varied = { begins: null, members: [name], open: [name], next: null, at: {} };
  const badge = made("span"), list = made("ol", { class: "talk" }), note = made("p", { class: "faint", role: "status" });
  const earlier = made("button", { hidden: true, click: () => before() }, "Earlier turns");
  const actions = made("span", { class: "actions" }), more_ = details(name);
  const head = made("h1", {}, given ? titled(name) ?? "" : "New chat"), chat = composer(name, given, sent, stop), box = chat.form;
  const beside = conversations(given, about.read_only);
  const conversation = made("div", { class: "conversation" }, made("div", { class: "row title" }, head, badge, actions), given && more_.element, earlier,
      made("div", { role: "log", "aria-label": "Conversation", "aria-live": "polite" }, list), note, box);
  main.append(made("div", { class: "columns" }, beside.element, conversation));
  if (!about.read_only) chat.takes(conversation);

  /* Show another page, unless the user has left this one meanwhile. */
  const show = (hash) => { if (!isLeft) location.hash = hash; };
  async function sent() {
    if (given) await refresh(); else show(address(name));
  }
  async function act(action, details_ = {}, of = name) {
    try {
      toast((await post(path(of, `/${action}`), details_)).said);
      return true;
    } catch (error) {
      toast(error.message, true);
      return false;
    }
  }
  async function acted(action, details_) {
    const isDone = await act(action, details_);
    await refresh();
    return isDone;
  }
  /* Whether the session still has its tokens up to a position as they were after the turn at `seq`. */
  const stands = (position, seq) => position !== undefined && [...turns.values()].every(({ turn: later }) => later.seq <= seq || !(later.kept < position));
  const moved = () => toast("The text before it has changed since: a rewind, or the chat template, has replaced some of it.", true);

  async function fork(position, seq) {
    if (position && !stands(position, seq)) return moved();
    const text = position ? `It begins with the first ${exact(position)} tokens of this one.` : "It begins with all of this one.";
    const chosen = await asked({ title: "Fork", text: `${text} Both go on apart.`, yes: "Fork", name: `${stem(name).slice(0, 50)}-fork` });
    if (chosen && await act("fork", { name: chosen, ...(position ? { position } : {}) })) show(address(chosen));
  }
  /* Ends all variants of the conversation; to close one that is closed would fail. */
  async function end(action, yes, text) {
    const members = action === "close" ? varied.open : varied.members;
    const number = members.length, all = number > 1 ? ` Its ${number} variants end together.` : "";
    if (!await asked({ title: `${yes} "${head.textContent}"?`, text: text + all, yes, danger: true })) return;
    for (const one of members) if (!await act(action, {}, one)) return;
    if (action !== "forget") return void refresh();
    entitle(name, "");
    dropDraft(name);
    show("#/");
  }
  async function rename() {
    const chosen = await asked({ title: "Title", text: "This browser keeps it; empty removes it.", yes: "Keep", name: titled(name) ?? "", isFree: true });
    if (chosen === null) return;
    entitle(name, chosen);
    listed = 0;
    refresh();
  }

  /* Cancel what waits and what runs, the last first: else what waits would begin meanwhile. */
  async function stop() {
    const waiting = [...turns.values()].map((one) => one.turn).filter((one) => one.state === "waiting" && one.id).reverse();
    for (const one of waiting) await act("cancel", { id: one.id });
    await refresh();
  }

  /* Ask again from a turn on, in a variant: a fork of what was before it. */
  async function again(one, text) {
    if (isAsking) return;  // by a first click
    if (!stands(one.start, one.seq)) return moved();
    const of = (role) => one.said.find((said) => said.role === role), words = (role) => of(role)?.text ?? "";
    let forked = null;
    isAsking = true;
    try {
      const question = { id: newId(), text: text ?? words("user"), images: await files(name, of("user")?.images ?? []), system: words("system"), vary: text === undefined, ...options() };
      const { next } = await get(path(name, "/variants"));
      await post(path(name, "/fork"), { name: next, position: one.start, is_variant: true });
      forked = next;
      await post(path(next, "/ask"), question);
      show(address(next));
    } catch (error) {
      toast(error.message, true);
      if (forked) post(path(forked, "/forget"), {}).catch(() => {});  // nothing was asked in it
    } finally {
      isAsking = false;
    }
  }
  /* Show another variant, and leave the message where it is. */
  function go(other, seq, start) {
    place = { start, top: turns.get(seq).element.getBoundingClientRect().top };
    show(address(other));
  }
  const acts = about.read_only ? null : { fork, again };

  function buttons() {
    const isOpen = row && !["closed", "forgotten"].includes(row.state), may = row && !about.read_only;
    const as = (label, form) => [label, null, path(name, `/export${form ? `?form=${form}` : ""}`)];
    box.hidden = about.read_only || Boolean(row && !isOpen);
    const kind = row && `${isOpen} ${row.state === "forgotten"}`;  // what the entries depend on: an open menu stays
    if (!row || actions.dataset.kind === kind) return;
    actions.dataset.kind = kind;
    actions.replaceChildren(menu([
      may && ["Rename", null, rename],
      may && isOpen && ["Fork", "a conversation of its own that goes on from here", () => fork()],
      as("Export as Markdown", "md"), as("Export as JSON", "json"), as("Export for turnkeep import", ""),
      may && isOpen && ["Close", "ends it; the log keeps it for some days", () => end("close", "Close", "It ends, and some days later it is removed from the log. Its name can be opened again.")],
      may && !isOpen && row.state !== "forgotten" && ["Open again", "begins anew under its name", () => acted("open")],
      may && row.state !== "forgotten" && ["Delete", "removes it from the log and the disks, for ever", () => end("forget", "Delete", "It is removed from the log and the workers' disks. This cannot be undone."), "danger"]]));
  }

  async function seeVariants() {
    varied = await get(path(name, "/variants")).catch(() => varied);
  }

  /* The variants of a message that begins at a position: their sessions, and which one is shown. */
  function choice(start) {
    const sessions = varied.at[start];
    return sessions ? { sessions, shown: Math.max(0, sessions.indexOf(name)) } : null;
  }

  /* Add earlier turns, as far back as one is shown that waits: it may be done. */
  async function reachBack(found) {
    const waiting = [...turns.values()].map((one) => one.turn).filter((one) => one.state === "waiting" && one.seq !== stream?.seq);
    for (let parts = 0; parts < MOST_PARTS && found.more && waiting.some((one) => one.seq < found.more[0]); parts += 1) {
      const part = await get(path(name, `?before=${found.more[0]}&end=${found.more[1]}`)).catch(() => null);
      if (!part) return;
      found.turns.unshift(...part.turns);
      found.more = part.more;
    }
  }

  /* Take away turns that the log no longer has; also all before those that were found, if some between may be missing, or one
     of them would wait for ever. */
  function prune(found) {
    const there = new Set(found.turns.map((one) => one.seq)), first = found.more ? found.turns.find((one) => one.stored)?.seq ?? 0 : 0;
    const others = [...turns].filter(([seq]) => !there.has(seq) && seq !== stream?.seq);
    const isAnew = found.more && (![...there].some((seq) => turns.has(seq)) || others.some(([seq, one]) => seq < first && one.turn.state === "waiting"));
    for (const [seq, one] of others) {
      if (seq < first && !isAnew) continue;
      one.element.remove();
      turns.delete(seq);
    }
    if (isAnew || !found.more) more = found.more;
  }

  /* Put turns where they belong, and leave those alone that have not changed. */
  function put(found) {
    const wasNearEnd = isFirst || isNearEnd();
    for (const one of found) {
      const variants = one.kind === "generate" ? choice(one.start) : null;
      const kept = turns.get(one.seq), text = JSON.stringify([one, variants]);
      if (kept?.text === text || kept?.element.querySelector(".edit") || (one.state === "waiting" && stream?.seq === one.seq)) continue;
      const isNext = one.state === "waiting" && one.kind === "generate" && !stream;
      const made_ = isNext ? listen(one) : element(name, one, acts, variants, (other) => go(other, one.seq, one.start));
      if (one.state === "waiting" && !isNext) made_.append(made("p", { class: "note faint" }, "waiting"));
      if (kept) kept.element.replaceWith(made_);
      else list.insertBefore(made_, [...turns.entries()].filter(([seq]) => seq > one.seq).sort(([a], [b]) => a - b)[0]?.[1].element ?? null);
      turns.set(one.seq, { text: isNext ? "" : text, element: made_, turn: one });
    }
    chat.busy([...turns.values()].some((one) => one.turn.state === "waiting"));
    const back = isFirst && place && [...turns.values()].find((one) => one.turn.start === place.start);
    if (back) scrollBy(0, back.element.getBoundingClientRect().top - place.top);
    else if (wasNearEnd && found.length) toEnd();
    if (isFirst) place = null;
  }

  function listen(one) {
    const grown = growing(name, one, models);
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
    on("waits", (what) => { grown.waits(what); if (!what.is_heard) dispatchEvent(new Event("doubt")); });
    on("end", ({ error }) => { ended(); if (!error) refresh(); });  // a failure is the turn's; the next refresh tries again
    events.onerror = () => { if (events.readyState === EventSource.CLOSED) ended(); };  // the next refresh tries again
    return grown.box;
  }

  async function refresh(all) {
    if (isLeft) return;
    const mine = ++turn;
    if (all) models = [...new Set(Object.values(all.workers).filter((one) => one.up).map((one) => one.model))].join(" or ");
    const found = given ? await get(path(name)).catch((error) => { if (isFirst) { tell(head, name); tell(note, error.message); } }) : { row: null, turns: [], more: null };
    if (mine !== turn || !found) return;
    await reachBack(found);
    const isChanged = isFirst || row?.last !== found.row?.last;
    if (isChanged && found.row) await seeVariants();
    if (mine !== turn) return;
    row = found.row;
    cost = found.cost;
    if (row) prune(found);
    if (row) tell(head, title({ ...row, begins: varied.begins ?? row.begins }));
    else if (given) tell(head, titled(name) ?? name);
    if (given) document.title = `${head.textContent} · Turnkeep`;
    tell(note, found.turns.length || (given && about.read_only) ? "" : `It begins with your first message${models && `; ${models} answers`}.`);
    if (given && !row) tell(note, turns.size ? "This session was removed meanwhile; what is shown is what it was." : `There is no session ${name} yet. ${note.textContent}`);
    chat.begins(!found.turns.length);
    badge.replaceChildren(...(row && row.state !== "idle" ? [state(row)] : []));
    buttons();
    if (row) more_.show(row, cost);
    put(found.turns);
    earlier.hidden = !more;
    if (isFirst && !box.hidden && document.activeElement === main) box.querySelector("textarea").focus({ preventScroll: true });
    isFirst = false;
    if (isChanged && row) more_.drawTree();
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
    if (event.key === "Escape" && !event.isComposing && acts && !document.querySelector("dialog[open]")) stop();
  };
  document.addEventListener("keydown", onKey);
  return { refresh, leave: () => { isLeft = true; turn += 1; stream?.events.close(); document.removeEventListener("keydown", onKey); } };
}
