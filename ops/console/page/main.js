/* Shows the page that the address names, and keeps it fresh while somebody looks. */

import { connect } from "./connect.js";
import { seek } from "./conversations.js";
import { clock, get, made, tell } from "./dom.js";
import { models } from "./models.js";
import { session } from "./session.js";
import { sessions } from "./sessions.js";
import { workers } from "./workers.js";

const FRESH_MS = 4000;
const PAGES = { "": "chat", session: "chat", worker: "workers" };
const main = document.getElementById("main"), state = document.getElementById("state");
const about = { prefix: "", tenant: "", read_only: true };
let page = null, turn = 0, next, isKnown = false;

function named() {
  const [kind, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  try {
    return [kind, decodeURIComponent(rest.join("/"))];
  } catch {
    return ["?", ""];
  }
}

function nowhere() {
  main.append(made("h1", {}, "There is no such page"), made("p", {}, `The address ends with ${location.hash}, which is none of this console's pages; `,
    made("a", { href: "#/" }, "here is the first one"), "."));
  return { refresh: () => {} };
}

function open(found) {
  const [kind, name] = named();
  page?.leave?.();
  main.replaceChildren();
  if ((kind === "session" && name) || (!kind && !about.read_only)) page = session(main, name || null, about);
  else if (kind === "sessions") page = sessions(main, about);
  else if (["", "worker", "workers"].includes(kind)) page = workers(main, name || null);
  else page = kind === "connect" ? connect(main, about) : kind === "models" ? models(main, about) : nowhere();
  for (const link of document.querySelectorAll("nav a[data-page]")) {
    const isHere = link.dataset.page === (PAGES[kind] ?? kind);
    if (isHere) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  document.title = `${main.querySelector("h1")?.textContent ?? "Workers"} · Turnkeep`;
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
  look(found);
}

/* What is missing, in words, above what is shown; nothing if all is there. */
function missing(words) {
  const gone = document.getElementById("gone");
  gone.hidden = !words;
  tell(gone, words);
}

function told(found) {
  const heard = Object.values(found.workers).filter((one) => one.up).length, up = heard || Number(found.is_served === true);
  state.className = found.connected && up ? "good" : "bad";
  tell(state, !found.connected ? "no connection to NATS" : up ? `${up} worker${up > 1 ? "s" : ""} up`
    : "no worker");
  missing(!found.connected ? "NATS does not answer. What is shown may be old, and goes on by itself when the server is back."
    : up ? "" : "No worker is up: turnkeep serve starts one. Until then questions wait in the log.");
  state.title = `as of ${clock(new Date())}`;
}

/* Show what this console is and what may be done here; before, nothing may. */
function learn(found) {
  isKnown = true;
  Object.assign(about, { prefix: found.prefix, tenant: found.tenant, read_only: found.read_only });
  const words = [`prefix ${found.prefix}`, ...(found.tenant === "default" ? [] : [found.tenant]), ...(found.read_only ? ["read-only"] : [])];
  document.getElementById("about").textContent = words.join(" · ");
  document.getElementById("about").title = "Of all workers on this NATS server, this page shows those that run with this --prefix, and their sessions";
  if (found.models.length > 1) {
    const choice = document.getElementById("model");
    choice.append(...found.models.map((one) => new Option(one.name, one.at, one.is_this, one.is_this)));
    choice.onchange = () => { location.assign(choice.value); };
    choice.hidden = false;
  }
  if (found.read_only) { PAGES[""] = "workers"; document.querySelector("nav [data-page=chat]").hidden = true; }
  open(found);
}

async function look(given) {
  const mine = ++turn, shown = page, began = Date.now();
  try {
    const found = (!shown?.worker && given) || await get(`api/workers${shown?.worker ? `?worker=${encodeURIComponent(shown.worker)}` : ""}`);
    if (!isKnown) return learn(found);
    told(found);
    if (mine === turn) await shown.refresh(found);
  } catch (error) {
    if (mine !== turn) return;
    state.className = "bad";
    const isSilent = error instanceof TypeError;
    tell(state, isSilent ? "no console" : "refused");
    missing(isSilent ? "The console does not answer: is turnkeep console still running? What is shown stays, and goes on by itself when it is back."
      : `${error.message}.`);
  }
  clearTimeout(next);  // a log that takes long to read is read less often
  next = setTimeout(() => { if (!document.hidden) look(); }, Math.min(Math.max(FRESH_MS, 5 * (Date.now() - began)), 4 * FRESH_MS));
}

document.querySelector(".skip").onclick = (event) => { event.preventDefault(); main.focus(); };
addEventListener("hashchange", () => { if (isKnown) open(); });
addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || event.altKey || about.read_only || document.querySelector("dialog[open]")) return;
  const key = event.key.toLowerCase(), isNew = event.shiftKey && key === "o";
  if (!isNew && (event.shiftKey || key !== "k")) return;
  event.preventDefault();
  if (isNew) location.hash = "#/";
  else if (document.querySelector(".side")) seek();
  else { location.hash = "#/"; addEventListener("hashchange", seek, { once: true }); }
});
addEventListener("doubt", () => look());  // an answer that is on its way has stopped
addEventListener("resize", () => page?.resized?.());
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
look();
