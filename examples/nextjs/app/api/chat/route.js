import { answer, load, save } from "../../../lib/chats.js";

export async function POST(request) {
  const { id, message } = await request.json();
  const messages = [...(await load(id)), message];
  await save(id, messages);
  return answer(id, messages);
}
