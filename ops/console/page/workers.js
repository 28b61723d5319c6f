/* The workers of the prefix, and an hour of one of them. */

import { bytes, clock, count, get, made, seconds, shown, span, GONE } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const PLOTS = [
  ["Time to first token", seconds, [["p50", "first_token_p50_s"], ["p95", "first_token_p95_s"]]],
  ["Request duration", seconds, [["p50", "duration_p50_s"], ["p95", "duration_p95_s"]]],
  ["Generated tokens a second", count, [["generated", "generated_per_s"]]],
  ["Prompt tokens a second", count, [["found in KV", "cached_per_s"], ["prefilled", "prefilled_per_s"]]],
  ["KV on the device", bytes, [["KV", "kv_bytes"]], "kv_limit_bytes"],
  ["Snapshots on disk", bytes, [["stored", "disk_bytes"]], "disk_limit_bytes"],
  ["Requests", count, [["running", "running"], ["waiting", "waiting"]]],
  ["Sessions", count, [["in memory", "sessions"], ["with KV on the device", "resident_sessions"]]],
];
const found = (one) => {
  const all = one.cached_per_s + one.prefilled_per_s;
  return all > 0 ? `${Math.round(100 * one.cached_per_s / all)}%` : GONE;
};
const drafts = (one) => one.draft_gain == null ? GONE
  : `${one.draft_gain.toFixed(2)} times, ${Math.round(100 * one.accepted_share)}%`;
const COLUMNS = [
  ["state", (one) => one.up ? `up ${span(one.uptime_s)}${one.drains ? ", gives its sessions away" : ""}` : `silent for ${span(one.age_s)}`],
  ["sessions", (one) => shown(one.sessions, count)],
  ["running", (one) => shown(one.running, count)],
  ["waiting", (one) => shown(one.waiting, count)],
  ["tokens/s", (one) => shown(one.generated_per_s, count)],
  ["first token p95", (one) => shown(one.first_token_p95_s, seconds)],
  ["found", found],
  ["drafts", drafts],
  ["KV", (one) => shown(one.kv_bytes, bytes)],
  ["disk", (one) => shown(one.disk_bytes, bytes)],
];
/* What a head means, for whoever points at it. */
const MEANS = { "found": "share of prompt tokens whose KV was there already",
  "drafts": "how many times as fast they make the answers, and how many of their tokens are right", "KV": "what the model keeps of tokens, on the device",
  "disk": "stored KV", "first token p95": "95 of 100 answers began within this time" };

const drawn = (name, attributes, parent, text) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
};
/* The length of a point's line that has no neighbour, as just after the first message. */
const DASH = 12;
const at = (at_s) => clock(new Date(at_s * 1000));

/* A round number, not below the value, whose half is round too. */
const nice = (value, format) => {
  if (!(value > 0)) return 1;
  const unit = format === bytes ? 1024 ** Math.floor(Math.log(value) / Math.log(1024)) : 1;
  const power = 10 ** Math.floor(Math.log10(value / unit));
  const step = [1, 2, 4, 6, 8, 10].find((one) => one * power * unit >= value) ?? 10;
  const found = step * power * unit;
  return format === count ? Math.max(found, 2) : found;
};

function legend(box, format, lines, course, index, limit) {
  box.replaceChildren(...lines.map(([label, key], i) =>
    made("span", {}, made("i", { class: `s${i}` }), `${label} ${shown(course[key][index], format)}`)));
  if (limit && course[limit][index]) box.append(made("span", { class: "faint" }, `of ${format(course[limit][index])}`));
}

function plot(figure, [title, format, lines, limit], course) {
  const box = figure.querySelector(".legend"), svg = figure.querySelector("svg");
  const width = svg.clientWidth || 380, height = 150, left = 58, right = 10, top = 8, bottom = 22;
  const times = course.at_s, last = times.length - 1;
  const values = lines.flatMap(([, key]) => course[key].filter((value) => value !== null));
  const most = nice(Math.max(0, ...values), format);
  const from = times[0], to = Math.max(times[last], from + 60);
  const x = (at_s) => left + (width - left - right) * (at_s - from) / (to - from);
  const y = (value) => top + (height - top - bottom) * (1 - value / most);
  legend(box, format, lines, course, last, limit);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", `${title}: ${box.textContent}`);
  for (const part of [0, 0.5, 1]) {
    drawn("line", { x1: left, x2: width - right, y1: y(part * most), y2: y(part * most) }, svg);
    if (values.length) drawn("text", { x: left - 7, y: y(part * most) + 4, "text-anchor": "end" }, svg, format(part * most));
  }
  for (const [part, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
    const at_s = from + part * (to - from);
    drawn("text", { x: x(at_s), y: height - 5, "text-anchor": anchor }, svg, at(at_s));
  }
  if (!values.length) drawn("text", { x: (left + width) / 2, y: height / 2, "text-anchor": "middle" }, svg, "nothing yet");
  lines.forEach(([, key], i) => {
    const course_ = course[key], isGap = (index) => (course_[index] ?? null) === null;
    let path = "";
    course_.forEach((value, index) => {
      if (value === null) return;
      const isAlone = isGap(index - 1) && isGap(index + 1);  // then a short line: nobody sees a dot
      const from_x = isAlone ? Math.max(left, Math.min(x(times[index]) - DASH / 2, width - right - DASH)) : x(times[index]);
      path += `${isGap(index - 1) ? "M" : "L"}${from_x.toFixed(1)} ${y(value).toFixed(1)}${isAlone ? `h${DASH}` : ""}`;
    });
    drawn("path", { d: path, class: `s${i}` }, svg);
  });
  const cross = drawn("line", { y1: top, y2: height - bottom, visibility: "hidden" }, svg);
  svg.onpointermove = (event) => {
    const wanted = from + (to - from) * (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right);
    let index = 0;
    times.forEach((at_s, i) => { if (Math.abs(at_s - wanted) < Math.abs(times[index] - wanted)) index = i; });
    legend(box, format, lines, course, index, limit);
    box.append(made("span", { class: "faint" }, at(times[index])));
    for (const key of ["x1", "x2"]) cross.setAttribute(key, x(times[index]));
    cross.setAttribute("visibility", "visible");
  };
  svg.onpointerleave = () => {
    legend(box, format, lines, course, last, limit);
    cross.setAttribute("visibility", "hidden");
  };
}

/* A line of the log; one for a program as one for people. */
function plain(line) {
  try {
    const { timestamp, level, event, ...more } = JSON.parse(line);
    return [timestamp?.slice(11, 19), level, event, ...Object.entries(more).map(([name, value]) => `${name}=${JSON.stringify(value)}`)].join("  ");
  } catch {
    return line;
  }
}

function figure(title) {
  const made_ = made("figure", {}, made("h3", {}, title), made("div", { class: "legend" }));
  drawn("svg", { role: "img" }, made_);
  return made_;
}

const row = (name, one, isChosen) => made("tr", { class: isChosen && "chosen" },
  made("th", { scope: "row", "data-head": "worker" },
    made("a", { href: `#/worker/${encodeURIComponent(name)}`, "aria-current": isChosen && "true" }, name),
    made("span", { class: "words" }, `${one.model} on ${one.device}`)),
  ...COLUMNS.map(([head, cell]) => made("td", { "data-head": head },
    made("span", { class: head === "state" && (one.up ? "good" : "bad") }, cell(one)))));

export function workers(main, worker) {
  const rows = made("tbody"), name = made("h2"), plots = made("div", { class: "plots" }, ...PLOTS.map(([title]) => figure(title)));
  const heads = ["worker", ...COLUMNS.map(([head]) => head)].map((head) => made("th", { scope: "col", title: MEANS[head] }, head));
  const table = made("table", { class: "workers", hidden: true }, made("thead", {}, made("tr", {}, ...heads)), rows);
  let latest = null;
  main.append(made("h1", { class: "hidden" }, "Workers"), table, name, plots, made("p", { class: "faint small" },
    "Rates, shares and percentiles are of the minute before each moment; generated tokens a second leave out the time in "
    + "which no answer ran. A gap: nothing happened, or the worker was silent."));
  const lines = made("pre", { tabindex: 0, "aria-label": "Log" }), log = made("section", { hidden: true }, made("h2", {}, "Log"),
    made("p", { class: "faint small" }, "The last lines of the worker that runs this console."), made("div", { class: "code log" }, lines));
  main.append(log);
  plots.hidden = true;

  async function follow() {
    const said = (await get("api/log").catch(() => [])).map(plain).join("\n");
    if (!said || said === lines.textContent) return;
    const isAtEnd = log.hidden || lines.scrollTop + lines.clientHeight > lines.scrollHeight - 40;
    log.hidden = false;
    lines.textContent = said;
    if (isAtEnd) lines.scrollTop = lines.scrollHeight;
  }

  function draw() {
    const names = Object.keys(latest.workers), focused = document.activeElement?.getAttribute("href");
    table.hidden = !names.length;
    rows.replaceChildren(...names.map((one) => row(one, latest.workers[one], one === latest.worker)));
    rows.querySelector(`a[href="${CSS.escape(focused ?? "")}"]`)?.focus();
    name.textContent = latest.worker ?? (latest.is_served ? "A worker is up; its figures come soon" : "No worker has been heard of yet");
    plots.hidden = !latest.worker;
    if (latest.worker) PLOTS.forEach((one, i) => plot(plots.children[i], one, latest.course));
    document.body.dataset.points = latest.course.at_s.length;
  }
  return {
    worker,
    refresh: (found) => { latest = found; draw(); return follow(); },
    resized: () => { if (latest) draw(); },
  };
}
