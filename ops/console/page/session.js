/* One session: its figures, tree, conversation, actions, and the chat. */

import { composer, isNearEnd, toEnd } from "./chat.js";
import { age, asked, count, exact, get, made, path, post, seconds, shown, tell, toast } from "./dom.js";
import { address, state } from "./sessions.js";
import { element, growing } from "./turns.js";


export function session(main, name, about) {
  const turns = new Map();  // by sequence: what is shown, and its element
  let more = null, stream = null, row = null, turn = 0, isFirst = true;
  const badge = made("span"), facts = made("dl", { class: "facts" }), tree = made("section", { class: "tree", hidden: true });
  const list = made("ol", { class: "talk" });
  const note = made("p", { class: "faint", role: "status" });
  const earlier = made("button", { hidden: true, click: () => before() }, "Earlier turns");
  const actions = made("div", { class: "row actions" });
  const chat = composer(name, refresh), box = chat.form;
  main.append(made("div", { class: "columns" },
    made("aside", {}, made("div", { class: "row title" }, made("h1", {}, name), badge), actions, facts, tree),
    made("div", { class: "conversation" }, earlier,
      made("div", { role: "log", "aria-label": "Conversation", "aria-live": "polite" }, list), note, box)));

  const act = async (action, details = {}) => {
    try {
      toast((await post(path(name, `/${action}`), details)).said);
      await refresh();
      return true;
    } catch (error) {
      toast(error.message, true);
      return false;
    }
  };
  async function fork(position) {
    const text = position ? `It begins with the first ${exact(position)} tokens of ${name}.` : `It begins with all tokens of ${name}.`;
    const chosen = await asked({ title: "Fork", text: `${text} Both go on apart.`, yes: "Fork", name: `${name.slice(0, 50)}-fork` });
    if (chosen && await act("fork", { name: chosen, ...(position ? { position } : {}) })) location.hash = address(chosen);
  }
  async function sure(action, yes, text) {
    if (!await asked({ title: `${yes} ${name}?`, text, yes, danger: true })) return;
    if (await act(action) && action === "forget") location.hash = "#/sessions";
  }

  function buttons() {
    const isOpen = row && !["closed", "forgotten"].includes(row.state);
    const button = (label, click, kind) => made("button", { click, class: kind }, label);
    const shown_ = about.read_only || !row ? [] : isOpen ? [
      button("Pin", () => act("pin")), button("Unpin", () => act("unpin")), button("Fork", () => fork()),
      button("Close", () => sure("close", "Close", "It ends, and some days later it is removed from the log. Its name can be opened again.")),
    ] : [button("Open again", () => act("open"))];
    if (row) shown_.push(made("a", { class: "button", href: path(name, "/export"), download: true }, "Export"));
    if (row && !about.read_only && row.state !== "forgotten") {
      shown_.push(button("Forget", () => sure("forget", "Forget", "Its conversation is removed from the log and the worker's disk. This cannot be undone."), "danger"));
    }
    if (actions.dataset.state !== `${row?.state}`) actions.replaceChildren(...shown_);
    actions.dataset.state = `${row?.state}`;
    box.hidden = about.read_only || Boolean(row && !isOpen);
  }

  function figures(cost) {
    const all = row ? [["tokens", shown(row.position, exact)], ["found in KV", count(cost.found)], ["prefilled", count(cost.prefilled)],
      ["generated", count(cost.generated)], ["time", seconds(cost.seconds)], ["last active", age(row.last)],
      ["model", row.model ?? "–"], ["worker", row.worker ?? "–"],
      ...(row.tags?.length ? [["tags", row.tags.join(", ")]] : [])] : [];
    facts.replaceChildren(...all.map(([head, value]) => made("div", {}, made("dt", {}, head), made("dd", {}, value))));
    badge.replaceChildren(...(row ? [state(row)] : []));
  }

  const branch = (one) => made("li", {},
    one.session === name ? made("b", { "aria-current": "page" }, one.session) : made("a", { href: address(one.session) }, one.session),
    made("span", { class: "faint" }, ` ${one.row?.parent ? `at ${exact(one.row.parent.position)}` : one.row ? "" : "gone"}`),
    one.forks.length > 0 && made("ul", {}, ...one.forks.map(branch)));
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
      if (kept?.text === text || (one.state === "waiting" && stream?.seq === one.seq)) continue;
      const isNext = one.state === "waiting" && one.kind === "generate" && !stream;
      const made_ = isNext ? listen(one) : element(one, about.read_only ? null : fork);
      if (one.state === "waiting" && !isNext) made_.append(made("p", { class: "note faint" }, "waiting"));
      if (kept) kept.element.replaceWith(made_);
      else list.insertBefore(made_, [...turns.entries()].filter(([seq]) => seq > one.seq).sort(([a], [b]) => a - b)[0]?.[1].element ?? null);
      turns.set(one.seq, { text: isNext ? "" : text, element: made_ });
    }
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
    on("quiet", (told) => grown.quiet(told.seconds));
    on("end", (told) => { ended(); if (told.error) toast(told.error, true); refresh(); });
    events.onerror = () => { if (events.readyState === EventSource.CLOSED) ended(); };  // the next refresh tries again
    return grown.box;
  }

  async function refresh() {
    const mine = ++turn;
    const found = await get(path(name)).catch((error) => { tell(note, error.message); });
    if (mine !== turn || !found) return;
    const isChanged = isFirst || row?.entries !== found.row?.entries;
    row = found.row;
    if (isFirst) more = found.more;
    tell(note, found.turns.length ? "" : about.read_only ? "There is no such session." : "A new session: it begins with your first message.");
    chat.begins(!found.turns.length);
    buttons();
    figures(found.cost);
    put(found.turns);
    earlier.hidden = !more;
    if (isFirst && !box.hidden) box.querySelector("textarea").focus({ preventScroll: true });
    isFirst = false;
    if (isChanged) drawTree();
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
  return { refresh, leave: () => { turn += 1; stream?.events.close(); } };
}
