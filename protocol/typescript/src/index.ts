/** All but `connect`, which `node.ts` and `web.ts` add. */

export type { CallOptions } from "./calls.js";
export type { Piece } from "./chunks.js";
export { Client } from "./client.js";
export type { ClientOptions, ConnectOptions, Embeddings, Input, Ranking } from "./client.js";
export * from "./errors.js";
export type { Generation } from "./generation.js";
export type * from "./messages.js";
export type { History, Turn } from "./history.js";
export { image } from "./images.js";
export type { ImagePart } from "./images.js";
export type { Listed } from "./listing.js";
export { retry } from "./retrying.js";
export type { Fields, Session } from "./session.js";
export { runTools } from "./tools.js";
export type { RunToolsFields } from "./tools.js";
