/* What is known of a session besides its conversation: its name, figures and forks, folded. */

import { age, count, exact, get, made, path, seconds, shown } from "./dom.js";
import { isNearEnd, toEnd } from "./chat.js";
import { address } from "./sessions.js";

export function details(name) {
  const facts = made("dl", { class: "facts" }), tree = made("section", { class: "tree", hidden: true });
  const branch = (one) => made("li", {},
    one.session === name ? made("b", { "aria-current": "page" }, one.session) : made("a", { href: address(one.session) }, one.session),
    made("span", { class: "faint" }, ` ${one.row?.parent ? `at ${exact(one.row.parent.position)}` : one.row ? "" : "gone"}`),
    one.forks.length > 0 && made("ul", {}, ...one.forks.map(branch)));

  return {
    element: made("details", { class: "about" }, made("summary", {}, made("span", { class: "id" }, name)), facts, tree),
    show(row, cost) {
      const all = [["tokens", shown(row.position, exact)],
        ["found in KV", count(cost.found), "tokens of prompts whose KV (what the model keeps of a token) was on the device or the disk"],
        ["prefilled", count(cost.prefilled), "tokens of prompts that the model had to read"],
        ["generated", count(cost.generated), "tokens of answers"], ["time", seconds(cost.seconds), "from requests to their results"], ["last active", age(row.last)],
        ["model", row.model ?? "–"], ["worker", row.worker ?? "–"],
        ...(row.tags?.length ? [["tags", row.tags.join(", ")]] : [])];
      facts.replaceChildren(...all.map(([term, value, title]) => made("div", { title }, made("dt", {}, term), made("dd", {}, value))));
    },
    async drawTree() {
      const found = await get(path(name, "/tree")).catch(() => null), wasNearEnd = isNearEnd();
      tree.hidden = !found;
      if (found) tree.replaceChildren(made("h2", {}, "Forks"), made("ul", {}, branch(found)));
      if (wasNearEnd) toEnd();
    },
  };
}
