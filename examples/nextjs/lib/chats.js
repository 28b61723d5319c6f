// Chats in files, and their answers. An answer itself is in the gateway's log from its first token on, under the
// id of the message that it answers: so whoever asks again, after whatever has died, joins the same answer.

import { mkdir, readFile, rename, writeFile } from "node:fs/promises";
import path from "node:path";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { consumeStream, convertToModelMessages, streamText } from "ai";

const FOLDER = process.env.CHATS ?? "chats";
const gateway = createOpenAICompatible({
  name: "turnkeep",
  baseURL: process.env.GATEWAY ?? "http://127.0.0.1:8080/v1",
});

const file = (id) => path.join(FOLDER, `${id.replace(/[^\w-]/g, "")}.json`);

export const load = (id) => readFile(file(id), "utf8").then(JSON.parse, () => []);

export async function save(id, messages) {
  const written = `${file(id)}.${crypto.randomUUID()}`;
  await mkdir(FOLDER, { recursive: true });
  await writeFile(written, JSON.stringify(messages));
  await rename(written, file(id));
}

export async function answer(id, messages) {
  const asked = messages.at(-1).id;
  const result = streamText({
    model: gateway("any"),
    messages: await convertToModelMessages(messages),
    maxOutputTokens: Number(process.env.MAX_TOKENS ?? 1000),
    headers: { "Idempotency-Key": `${id}-${asked}` },
  });
  return result.toUIMessageStreamResponse({
    originalMessages: messages,
    generateMessageId: () => `answer-${asked}`,
    onFinish: ({ messages: all, finishReason }) => finishReason && save(id, all),
    consumeSseStream: consumeStream, // to its end, also if the page has gone
  });
}
