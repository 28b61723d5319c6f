import { load } from "../lib/chats.js";
import { Chat } from "./chat.jsx";

export default async function Page({ searchParams }) {
  const { chat = "first" } = await searchParams;
  return <Chat id={chat} messages={await load(chat)} />;
}
