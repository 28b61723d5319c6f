/* What keeps people from reading a page, or from using it with a keyboard (WCAG 2.2, AA). */

const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgba = (color) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const over = (front, back) => back.map((one, i) => front[i] * front[3] / 255 + one * (1 - front[3] / 255));
const ground = (element) => element
  ? over(rgba(getComputedStyle(element).backgroundColor), ground(element.parentElement)) : [255, 255, 255];
const light = (color) => color.map((one) => one / 255)
  .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
  .reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
const ratio = (front, back) => {
  const [low, high] = [light(over(rgba(front), back)), light(back)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const isSeen = (one) => one.checkVisibility({ opacityProperty: true, visibilityProperty: true });
const named = (one) => `${one.tagName} ${(one.innerText || one.id || one.className).slice(0, 30)}`;

const checks = {
  /* Texts, placeholders and borders of fields with too little contrast. */
  contrast() {
    const found = [];
    const check = (what, front, back, least) => {
      const got = ratio(front, back);
      if (got < least) found.push(`${what}: ${got.toFixed(2)}`);
    };
    for (const one of document.body.querySelectorAll("*")) {
      if (!isSeen(one) || one.disabled) continue;
      const style = getComputedStyle(one), back = ground(one);
      const colour = style.fill !== "rgb(0, 0, 0)" ? style.fill : style.color;
      const text = [...one.childNodes].map((node) => node.nodeType === 3 ? node.data.trim() : "").join("");
      if (text) check(`${one.tagName} ${text.slice(0, 30)}`, colour, back, 4.5);
      if (one.placeholder) check(one.placeholder, getComputedStyle(one, "::placeholder").color, back, 4.5);
      if (one.matches("input, select, textarea:not(.composer textarea#message), .composer"))
        check(`border of ${one.className || one.type}`, style.borderTopColor, ground(one.parentElement), 3);
    }
    return found;
  },

  /* The page's language and title, its main part, headings and ids. */
  outline() {
    const found = [], ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
    const levels = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")]
      .filter((one) => isSeen(one) && !one.closest(".rich, dialog")).map((one) => Number(one.tagName[1]));
    if (!document.documentElement.lang || !document.title) found.push("no language or no title");
    if (document.querySelectorAll("main").length !== 1) found.push("not one main part");
    if (levels.filter((one) => one === 1).length !== 1) found.push(`not one heading of level 1: ${levels}`);
    if (levels.some((one, i) => one > (levels[i - 1] ?? 0) + 1)) found.push(`a level of headings is left out: ${levels}`);
    for (const id of new Set(ids.filter((one, i) => ids.indexOf(one) !== i))) found.push(`two elements have the id ${id}`);
    return found;
  },

  /* All elements that can be clicked or filled in, and those that scroll; begins a walk over them. */
  controls() {
    document.activeElement.blur();
    scrollTo(0, 0);
    return [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
      .filter((one) => isSeen(one) && !one.disabled);
  },

  /* The element with the focus, and whether that is not seen or behind something else; nothing if it is the page's. */
  focus() {
    const one = document.activeElement, found = [];
    if (one === document.body) return null;
    const ring = one.matches("#message") ? one.closest(".composer") : one, style = getComputedStyle(ring);
    const colour = ring === one ? style.outlineColor : style.borderTopColor;
    const hasRing = ring !== one || (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2);
    if (!hasRing || ratio(colour, ground(ring.parentElement)) < 3) found.push(`the focus of ${named(one)} cannot be seen`);
    const box = one.getBoundingClientRect();
    const top = document.elementFromPoint(box.left + Math.min(box.width / 2, 20), box.top + Math.min(box.height / 2, 20));
    if (!one.contains(top) && !top?.contains(one)) found.push(`${named(one)} has the focus behind ${top && named(top)}`);
    return [one, found];
  },
};
return checks[arguments[0]]();
