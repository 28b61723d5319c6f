/* The models that are served, those that are here, and others that are known to be good for this machine. */

import { asked, bytes, copied, count, get, made, post, tell, toast } from "./dom.js";

const fits = (one) => made("span", { class: one.fits ? "good" : "bad", title: `about ${bytes(one.needed_bytes)} while it is served, estimated from its weights` },
  one.fits ? `fits: ${bytes(one.needed_bytes)}` : `too large: ${bytes(one.needed_bytes)}`);
const row = (name, words, ...cells) => made("tr", {}, made("th", { scope: "row" }, made("b", {}, name), made("span", { class: "words" }, words)),
  ...cells.map(([head, cell]) => made("td", { "data-head": head }, cell)));
const table = (caption, heads, rows) => made("table", { class: "models" }, made("caption", { class: "hidden" }, caption),
  made("thead", {}, made("tr", {}, ...heads.map((head) => made("th", { scope: "col" }, head || made("span", { class: "hidden" }, "change"))))), rows);

export function models(main, about) {
  const served = made("tbody"), here = made("tbody"), good = made("tbody"), note = made("p", { class: "faint", role: "status" });
  const field = made("input", { placeholder: "org/name, or org/name:Q4_K_M for a GGUF file", autocomplete: "off", spellcheck: "false", required: true });
  const form = !about.read_only && made("form", { class: "row", submit: (event) => { event.preventDefault(); pull(field.value.trim()); } },
    made("label", { class: "grow" }, "Another model of the hub", field), made("button", {}, "Download"));
  const inUse = table("Models that are served", ["model", "state", ""], served);
  let last = "", soon, isLeft = false;
  const all = made("div", { hidden: true }, inUse, made("h2", {}, "On this machine"),
    table("Models on this machine", ["model", "size", "memory", "context", "serve"], here),
    made("h2", {}, "Known to be good"), table("Models to download", ["model", "on a GPU", "size", "here", ""], good), ...(form ? [made("h2", {}, "Download"), form] : []));
  main.append(made("div", { class: "row head" }, made("h1", {}, "Models")), note, all);
  tell(note, "Loading the list of models ...");

  async function act(path, name) {
    try {
      toast((await post(path, { name })).said);
      await refresh();
    } catch (error) {
      toast(error.message, true);
    }
  }
  const pull = (name) => act("api/models", name);
  async function serve(name) {
    const text = "The worker is started again, which takes some seconds. Conversations go on with this model; an answer that is on its way ends where it is.";
    if (await asked({ title: `Serve ${name}?`, text, yes: "Serve" })) { toast(`Looking at ${name}`); await act("api/models/serve", name); }
  }
  async function unload(name) {
    const text = "Its memory is freed. Conversations can be read meanwhile; the next request, or an answer that is on its way, loads it again.";
    if (await asked({ title: `Unload ${name}?`, text, yes: "Unload" })) await act("api/models/unload", name);
  }
  function state(one) {
    return made("span", { class: one.is_loaded && "good" }, one.is_loaded ? "in memory" : "not loaded");
  }
  function change(one, isOne) {
    const [word, does] = one.is_loaded ? ["Unload", () => unload(one.name)] : ["Load", () => act("api/models/serve", one.name)];
    return !about.read_only && (isOne || one.is_loaded) && made("button", { class: "link", click: does, "aria-label": `${word} ${one.name}` }, word);
  }
  function progress(name, pull_) {
    if (pull_.error) return made("span", { class: "bad" }, pull_.error);
    const bar = made("progress", { max: pull_.total || 1, "aria-label": `download of ${name}` });
    if (pull_.total) bar.value = pull_.done;
    return made("span", {}, bar, ` ${pull_.total ? `${bytes(pull_.done)} of ${bytes(pull_.total)}` : "asking the hub"}`);
  }

  async function refresh() {
    clearTimeout(soon);
    if (isLeft) return;
    const found = await get("api/models").catch((error) => { if (!last) tell(note, error.message); });
    if (isLeft || !found || last === JSON.stringify(found)) return;
    last = JSON.stringify(found);
    const canServe = found.can_serve && !about.read_only;
    const how = found.served.length && !found.can_serve ? "Each model of turnkeep.toml is loaded by its next request; name others there to serve them."
      : `A worker serves one model. ${canServe ? "Serve loads another one in its place, until turnkeep serve is next started" : "Copy the line that starts it with another one"}; for several at a time name them in turnkeep.toml.`;
    tell(note, `This machine has ${bytes(found.memory_bytes)} of memory.${found.on_cpu ? " On its CPU each weight takes 4 bytes." : ""} ${how}`);
    all.hidden = false;
    const focused = all.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    inUse.hidden = !found.served.length;
    served.replaceChildren(...found.served.map((one) => row(one.name, "", ["state", state(one)], ["", change(one, found.can_serve)])));
    const isServed = (name) => found.served.some((one) => one.name === name);
    here.replaceChildren(...found.here.map((one) => row(one.name, [one.dtype, one.in_use && "in use"].filter(Boolean).join(" · "), ["size", bytes(one.size_bytes)],
      ["memory", fits(one)], ["context", one.context_tokens ? `${count(one.context_tokens)} tokens` : "unbounded"],
      ["serve", made("span", { class: "acts" }, canServe && one.fits && !one.in_use && !isServed(one.name) && made("button", { class: "link", click: () => serve(one.name), "aria-label": `Serve ${one.name}` }, "Serve"), made("button", { class: "link", click: () => copied(one.serve), title: one.serve, "aria-label": `Copy line that serves ${one.name}` }, "Copy line"))])));
    const known = found.good.map((one) => row(one.name, made("span", { title: one.sources.join("; ") }, one.use), ["on a GPU", `with ${one.memory_gb} GB`], ["size", bytes(one.size_bytes)], ["here", fits(one)],
      ["", found.pulls[one.name] ? progress(one.name, found.pulls[one.name]) : !about.read_only && one.fits
        && made("button", { class: "link", click: () => pull(one.name), "aria-label": `Download ${one.name}` }, "Download")]));
    const others = Object.entries(found.pulls).filter(([name]) => !found.good.some((one) => one.name === name));
    good.replaceChildren(...known, ...others.map(([name, one]) => row(name, "", ["on a GPU", ""], ["size", ""], ["here", ""], ["", progress(name, one)])));
    if (focused) all.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
    if (Object.values(found.pulls).some((one) => !one.error)) soon = setTimeout(refresh, 1000);
  }
  return { refresh, leave: () => { isLeft = true; clearTimeout(soon); } };
}
