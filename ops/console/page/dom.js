/* Elements, figures and requests. All text is set as text: nothing here or elsewhere parses HTML. */

export const GONE = "–";

export function made(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

/* A node of Markdown, as the console has parsed it: a text, or [tag, attributes, node, ...]. */
const TAGS = new Set(["a", "blockquote", "br", "code", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s", "span", "strong",
  "table", "tbody", "td", "th", "thead", "tr", "ul"]);
export function tree(node) {
  if (typeof node === "string") return node;
  const [tag, { language, ...attributes }, ...inner] = node;
  if (tag === "math") return attributes.display === "block" ? wide(formula(node)) : formula(node);
  if (!TAGS.has(tag)) return made("span", {}, ...inner.map(tree));
  if (attributes.href && !/^(https?:|mailto:)/i.test(attributes.href)) delete attributes.href;
  const element = made(tag, attributes.href ? { ...attributes, target: "_blank", rel: "noreferrer" } : attributes, ...inner.map(tree));
  if (tag === "table") return wide(element);
  if (tag !== "pre") return element;
  element.tabIndex = 0;  // it scrolls
  return made("div", { class: "code" }, made("div", { class: "row" }, made("span", {}, language || "text"),
    made("button", { class: "link", type: "button", click: () => copied(element.textContent) }, "Copy")), element);
}
const wide = (element) => made("div", { class: "wide", tabindex: 0 }, element);

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MATH = /^(math|m([inos]|frac|over|padded|phantom|root|row|space|sqrt|style|sub|subsup|sup|table|td|text|tr|under|underover))$/;
function formula(node) {
  if (typeof node === "string") return node;
  const [tag, attributes, ...inner] = node;
  const element = document.createElementNS(MATHML, MATH.test(tag) ? tag : "mrow");
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...inner.map(formula));
  return element;
}

export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch {
    toast("The browser does not let this page copy; select the text instead", true);
  }
}

/* A part that is always open where there is room, and folded on a narrow screen. */
const roomy = matchMedia("(min-width: 1001px)");
export function folding(kind, title, ...children) {
  const element = made("details", { class: kind, open: roomy.matches }, made("summary", {}, title), ...children);
  roomy.addEventListener("change", () => { element.open = roomy.matches; });
  return element;
}

const scaled = (value, base, units) => {
  let at = 0;
  while (value >= base && at < units.length - 1) { value /= base; at += 1; }
  return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toPrecision(value < 10 ? 2 : 3)}${units[at]}`;
};
export const count = (value) => value < 10 && !Number.isInteger(value) ? value.toFixed(1) : scaled(value, 1000, ["", "k", "M", "G"]);
export const exact = (value) => value.toLocaleString("en");
export const bytes = (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
export const seconds = (value) => value > 0 && value < 1 ? `${Math.round(value * 1000)} ms`
  : value < 120 ? `${value.toFixed(value < 10 && !Number.isInteger(value) ? 1 : 0)} s` : span(value);
export const span = (value) => value < 60 ? `${Math.round(value)} s` : value < 7200 ? `${Math.round(value / 60)} min`
  : value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
export const shown = (value, format) => value === null || value === undefined ? GONE : format(value);
export const clock = (date) => date.toTimeString().slice(0, 8);
export const age = (iso) => `${span(Math.max(0, (Date.now() - Date.parse(iso)) / 1000))} ago`;

async function answered(answer) {
  if (answer.ok) return answer.json();
  const told = await answer.json().catch(() => ({}));
  const why = answer.status === 401 ? "the console was started again: open the address that it printed" : told.error;
  throw new Error(why ?? `HTTP ${answer.status}`);
}
export const get = async (path) => answered(await fetch(path));
export const post = async (path, body) => answered(await fetch(path, {
  method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } }));
export const path = (session, rest = "") => `api/sessions/${encodeURIComponent(session)}${rest}`;

/* Change a text that screen readers announce, unless it is the same. */
export const tell = (element, text) => { if (element.textContent !== text) element.textContent = text; };

const byId = (id) => document.getElementById(id);
let fading;
export function toast(text, isBad = false) {
  const box = byId("toast");
  clearTimeout(fading);
  box.textContent = text;
  box.className = isBad ? "bad" : "";
  box.hidden = false;
  fading = setTimeout(() => { box.hidden = true; }, isBad ? 10000 : 5000);
}

/* Ask in a dialog; with `name` for a name too, which is free if it is only a title. Returns the name, or true; null if the
   user thought better of it. */
export function asked({ title, text, yes, name, isFree = false, danger = false }) {
  const dialog = byId("dialog");
  byId("dialog-title").textContent = title;
  byId("dialog-text").textContent = text;
  byId("dialog-yes").textContent = yes;
  byId("dialog-yes").className = danger ? "main danger" : "main";
  byId("dialog-field").hidden = name === undefined;
  byId("dialog-name").required = name !== undefined && !isFree;
  byId("dialog-name").pattern = isFree ? ".*" : "[A-Za-z0-9][A-Za-z0-9_\\-]*";
  byId("dialog-name").value = name ?? "";
  dialog.returnValue = "";
  byId("dialog-no").onclick = () => dialog.close();  // no submit button: Enter would press the first one
  dialog.showModal();
  byId("dialog-name").select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue !== "yes" ? null : name === undefined || byId("dialog-name").value);
    }, { once: true });
  });
}
