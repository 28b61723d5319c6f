/**
 * Images of messages: parts with their files, and how a session's log stores these; the same as `images.py`.
 *
 * An entry has a file, or the digests of its pieces, and its subject the SHA-256 of what it stands for.
 */

import { InvalidMessageError } from "./errors.js";
import type { Message } from "./messages.js";

/** The largest piece of a file, and the smallest. */
const PIECE_BYTES = 2 ** 17;
const LEAST_BYTES = 2 ** 12;
const DIGEST_BYTES = 32;
const DATA_URL = /^data:[^,]*;base64,/i;

/** An image as a part of a message's `content`. */
export type ImagePart = { type: "image"; data: string };

/** Return an image, given as the bytes of a PNG, JPEG, WebP or GIF file, as a part of a message's `content`. */
export function image(file: Uint8Array): ImagePart {
  if (!(file instanceof Uint8Array)) throw new InvalidMessageError("an image must be the bytes of its file, as a Uint8Array");
  let binary = "";
  for (let at = 0; at < file.length; at += LEAST_BYTES) binary += String.fromCharCode(...file.subarray(at, at + LEAST_BYTES));
  return { type: "image", data: btoa(binary) };
}

/** Return a request whose images have digests in place of their files, and the files by their digests. */
export async function withDigests<R extends object>(request: R): Promise<[R, Map<string, Uint8Array>]> {
  const files = new Map<string, Uint8Array>();
  const named = async (part: Record<string, unknown> | null) => {
    const data = base64In(part);
    if (data === undefined) return part;
    const file = fromBase64(data);
    const digest = await digestOf(file);
    files.set(digest, file);
    return { type: "image", digest };
  };
  const { messages } = request as { messages?: readonly (Message | null)[] | null };
  // The worker says what is wrong with messages that are none.
  const said = (Array.isArray(messages) ? messages : []).map(async (message: Message | null) =>
    Array.isArray(message?.content) ? { ...message, content: await Promise.all(message.content.map(named)) } : message);
  const found = await Promise.all(said);
  return [files.size > 0 ? { ...request, messages: found } : request, files];
}

function fromBase64(data: string): Uint8Array {
  try {
    return Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
  } catch (error) {
    throw new InvalidMessageError("the data of an image is not base64", { cause: error });
  }
}

function base64In(part: Record<string, unknown> | null): string | undefined {
  if (part === null) return undefined;
  if (part["type"] === "image" && typeof part["data"] === "string") return part["data"];
  const named = part["type"] === "image_url" ? part["image_url"] : undefined;
  const url: unknown = typeof named === "object" && named !== null && "url" in named ? named.url : named;
  return typeof url === "string" && DATA_URL.test(url) ? url.replace(DATA_URL, "") : undefined;
}

/** Return the SHA-256 that names a file or a piece of it, as hex. */
export async function digestOf(data: Uint8Array): Promise<string> {
  return hex(new Uint8Array(await crypto.subtle.digest("SHA-256", data as BufferSource)));
}

/** Return the name and the body of each entry of a file, in the order to store them: its own is the last. */
export async function entries(file: Uint8Array, mostBytes: number): Promise<[string, Uint8Array][]> {
  const size = Math.max(Math.min(mostBytes, PIECE_BYTES), LEAST_BYTES);
  if (file.length <= size) return [[await digestOf(file), file]];
  const found: [string, Uint8Array][] = [];
  for (let at = 0; at < file.length; at += size) {
    const piece = file.subarray(at, at + size);
    found.push([await digestOf(piece), piece]);
  }
  const digests = found.flatMap(([name]) => name.match(/../g)?.map((byte) => parseInt(byte, 16)) ?? []);
  return [...found, [await digestOf(file), Uint8Array.from(digests)]];
}

/** Return a file whose entries `read` returns by name; undefined if one is missing or is not what its name says. */
export async function assembled(
  digest: string,
  read: (name: string) => Promise<Uint8Array | undefined>,
): Promise<Uint8Array | undefined> {
  const body = await read(digest);
  if (body === undefined || (await digestOf(body)) === digest) return body;
  const pieces: Uint8Array[] = [];
  for (let at = 0; at < body.length; at += DIGEST_BYTES) {
    const piece = await read(hex(body.subarray(at, at + DIGEST_BYTES)));
    if (piece === undefined) return undefined;
    pieces.push(piece);
  }
  const file = new Uint8Array(await new Blob(pieces as BlobPart[]).arrayBuffer());
  return (await digestOf(file)) === digest ? file : undefined;
}

function hex(bytes: Uint8Array): string {
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
