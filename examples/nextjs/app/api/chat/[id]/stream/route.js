import { answer, load } from "../../../../../lib/chats.js";

// What `useChat({ resume: true })` asks for: the answer that runs, from its first token on, if there is one.
export async function GET(_, { params }) {
  const { id } = await params;
  const messages = await load(id);
  return messages.at(-1)?.role === "user" ? answer(id, messages) : new Response(null, { status: 204 });
}
