/* The images that go with a message, and those of a conversation. */

import { made, path, toast } from "./dom.js";

const SIDE = 96;

const base64 = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/* The files of a session's images, as a question takes them. */
export const files = (session, digests) => Promise.all(digests.map(async (digest) => {
  const answer = await fetch(path(session, `/images/${digest}`));
  if (!answer.ok) throw new Error("an image of the question is no longer in the log");
  return base64(await answer.blob());
}));

/* Shows an image in its full size, until a click or Escape. */
function enlarge(address, title) {
  const dialog = made("dialog", { class: "image", "aria-label": title, click: () => dialog.close(), close: () => dialog.remove() },
    made("img", { src: address, alt: title }));
  document.body.append(dialog);
  dialog.showModal();
}

/* The images of a message, small, as buttons. */
export function thumbnails(session, digests) {
  return made("div", { class: "row thumbs" }, ...digests.map((digest, at) => {
    const address = path(session, `/images/${digest}`), title = `Image ${at + 1}`;
    return made("button", { type: "button", title, "aria-label": `${title}, show it in full size`, click: () => enlarge(address, title) },
      made("img", { src: address, alt: "", loading: "lazy" }));
  }));
}

/* A file as a small picture; it fails if the browser cannot read the file as an image. */
async function drawn(file) {
  const bitmap = await createImageBitmap(file), scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = made("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas;
}

/* The images of the next message: chosen, pasted into `field`, or dropped on what `takes` is given. */
export function attachments(field, changed) {
  let chosen = [];
  const row = made("div", { class: "row thumbs", hidden: true });
  const file = made("input", { type: "file", hidden: true, accept: "image/png,image/jpeg,image/webp,image/gif", multiple: true,
    change: () => { add(file.files); file.value = ""; } });
  const button = made("button", { type: "button", title: "Add images; they can also be pasted or dropped here", click: () => file.click() }, "Image");

  function show() {
    row.replaceChildren(...chosen.map((one) => made("button", { type: "button", title: `Remove ${one.file.name}`, "aria-label": `Remove ${one.file.name}`, click: () => {
      chosen = chosen.filter((other) => other !== one);
      show();
    } }, one.canvas, made("span", { "aria-hidden": "true" }, "×"))));
    row.hidden = !chosen.length;
    changed();
  }
  async function add(files) {
    for (const one of [...files]) {
      try {
        chosen.push({ file: one, canvas: await drawn(one) });
      } catch {
        toast(`${one.name} is no image that this browser can read`, true);
      }
    }
    show();
  }
  const dropped = (event) => event.dataTransfer?.types.includes("Files");
  field.addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  return {
    row, parts: [file, button], any: () => chosen.length > 0,
    clear() { chosen = []; show(); },
    takes(element) {
      element.addEventListener("dragover", (event) => { if (dropped(event)) event.preventDefault(); });
      element.addEventListener("drop", (event) => { if (dropped(event)) { event.preventDefault(); add(event.dataTransfer.files); } });
    },
    files: () => Promise.all(chosen.map(({ file: one }) => base64(one))),
  };
}
