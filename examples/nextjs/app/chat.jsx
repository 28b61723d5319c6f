"use client";

import { useChat } from "@ai-sdk/react";
import { DefaultChatTransport } from "ai";
import { useState } from "react";

const transport = new DefaultChatTransport({
  prepareSendMessagesRequest: ({ id, messages }) => ({ body: { id, message: messages.at(-1) } }),
});

export function Chat({ id, messages: known }) {
  const { messages, sendMessage, status, error } = useChat({ id, messages: known, transport, resume: true });
  const [input, setInput] = useState("");

  function send(event) {
    event.preventDefault();
    sendMessage({ text: input });
    setInput("");
  }

  return (
    <main>
      {messages.map((message) => (
        <p key={message.id} className={message.role} style={{ whiteSpace: "pre-wrap" }}>
          {message.parts.map((part) => (part.type === "text" ? part.text : "")).join("")}
        </p>
      ))}
      <form onSubmit={send}>
        <input value={input} onChange={(event) => setInput(event.target.value)} aria-label="Message" />
        <button>Send</button>
      </form>
      <p id="status">{error ? `${error.message}: reload the page` : status}</p>
    </main>
  );
}
