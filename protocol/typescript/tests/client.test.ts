// The client against a running worker of NATS_URL.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";
import process from "node:process";
import { after, test } from "node:test";

import { jetstreamManager } from "@nats-io/jetstream";
import { delay, errors, headers as natsHeaders } from "@nats-io/nats-core";
import * as turnkeep from "turnkeep-client";
import { connect, retry, runTools } from "turnkeep-client";

const servers = process.env["NATS_URL"] ?? "";
const run = `test${Date.now()}`; // so that it can run again on the same server
const client = await connect({ servers, tenant: run });
/** An answer of seconds: it is sampled, since drafts complete a greedy one of this model in half a second. */
const LONG = { text: "x", max_tokens: 1900, ignore_eos: true, temperature: 1, seed: 1 } as const;
after(() => client.close());

async function all(answer: turnkeep.Generation): Promise<turnkeep.Piece[]> {
  const pieces = [];
  for await (const piece of answer) pieces.push(piece);
  return pieces;
}

function failsWith(code: string, retryable: boolean) {
  return (error: unknown) =>
    error instanceof turnkeep.RequestFailedError && error.code === code && error.retryable === retryable;
}

test("the pieces of an answer are its result, and a repeated id gets the record", async () => {
  const session = client.session("pieces");
  const appended = await session.append({ messages: [{ role: "system", content: "Be brief." }], id: "a" });
  const messages = [{ role: "user", content: "Go on." }] as const;
  const asked = { messages, id: "g", ignore_eos: true, max_tokens: 40, logprobs: true } as const;
  const answer = session.generate(asked);
  const pieces = await all(answer);
  const result = await answer.result;
  assert.ok(pieces.length > 1);
  assert.equal(pieces.map((piece) => piece.text).join(""), result.text);
  assert.deepEqual(pieces.flatMap((piece) => piece.tokens), result.tokens);
  assert.deepEqual(pieces.flatMap((piece) => piece.logprobs), result.logprobs);
  assert.ok(result.position > appended.position);

  const again = session.generate(asked);
  const [whole, ...more] = await all(again);
  assert.deepEqual([whole?.text, more], [result.text, []]);
  assert.equal((await again.result).repeat_of, answer.seq);
  await assert.rejects(session.generate({ ...asked, max_tokens: 41 }).result, failsWith("id_conflict", false));
});

test("a placeholder stands for a sound, and the result and the first piece say so", async () => {
  const content = [{ type: "input_audio", input_audio: { data: "AAAA", format: "wav" } }];
  const answer = client.session("heard").generate({ messages: [{ role: "user", content }], max_tokens: 8, ignore_eos: true });
  const [first, ...more] = await all(answer);
  const warnings = ["messages[0].content[0]: input_audio replaced by a placeholder"];
  assert.deepEqual((await answer.result).warnings, warnings);
  assert.deepEqual([first?.warnings, more.flatMap((piece) => piece.warnings)], [warnings, []]);
});

test("whoever leaves an answer and comes back gets all of it", async () => {
  const session = client.session("left");
  const answer = session.generate({ text: "x", max_tokens: 300, ignore_eos: true });
  for await (const piece of answer) if (piece.i > 10) break;
  const pieces = await all(answer);
  const result = await answer.result;
  assert.deepEqual(pieces.flatMap((piece) => piece.tokens), result.tokens);
  assert.deepEqual((await all(answer)).map((piece) => piece.text), [result.text]);
});

test("an image is stored once, before the request, which names it by its digest", async () => {
  const begin = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];
  const small = Uint8Array.from([...begin, 1]), large = new Uint8Array(400_000).map((_, at) => begin[at] ?? (at * 7) % 251);
  const session = client.session("looked");
  const url = `data:image/png;base64,${turnkeep.image(small).data}`;
  const content = [turnkeep.image(small), { type: "text", text: "Which?" }, turnkeep.image(large), { type: "image_url", image_url: { url } }];
  const counted = await session.count({ messages: [{ role: "user", content }] });
  const appended = await session.append({ messages: [{ role: "user", content }] });
  assert.ok(appended.position > 0 && counted.tokens >= appended.position);
  await session.append({ messages: [{ role: "user", content: [turnkeep.image(large)] }] });

  const { messages } = await session.history();
  const [first, second] = messages.map((message) => message.content as { type: string; digest?: string }[]);
  assert.deepEqual(first?.map(({ type }) => type), ["image", "text", "image", "image"]);
  const [one = "", , other = "", third] = first?.map(({ digest }) => digest) ?? [];
  assert.deepEqual([second, third], [[{ type: "image", digest: other }], one]);
  assert.deepEqual(Uint8Array.from(await session.image(one)), small);
  assert.deepEqual(Uint8Array.from(await session.image(other)), large);
  await assert.rejects(session.image("0".repeat(64)), turnkeep.InvalidMessageError);

  const manager = await jetstreamManager(client.connection);
  const { state } = await manager.streams.info("turnkeep_log", { subjects_filter: `turnkeep.${run}.looked.image.*` });
  assert.deepEqual(Object.values(state.subjects ?? {}), [1, 1, 1, 1, 1, 1]); // a file of one piece, and one of four
});

/** Streams without a worker: the log of one prefix, and what is published by hand. */
async function byHand(own: turnkeep.Client, prefix: string) {
  const manager = await jetstreamManager(own.connection);
  const kept = { storage: "memory", allow_direct: true } as const;
  const logged = ["in", "out", "closed", "image.*"].map((kind) => `${prefix}.*.*.${kind}`);
  await manager.streams.add({ ...kept, name: `${prefix}_log`, subjects: logged });
  await manager.streams.add({ ...kept, name: `${prefix}_tok`, subjects: [`${prefix}.*.*.tok.*`] });
  const store = (subject: string, body: object) =>
    manager.jetstream().publish(`${prefix}.default.s.${subject}`, JSON.stringify(body));
  const requests = own.connection.subscribe(`${prefix}.default.s.in`)[Symbol.asyncIterator]();
  const chunk = (seq: number, i: number, text = String(i)) => store("tok.g", { i, tokens: [i], text, seq });
  const purge = () => manager.streams.purge(`${prefix}_log`, { filter: `${prefix}.default.s.in` });
  return { manager, store, requests, chunk, purge };
}

const answer = { type: "generated", id: "g", position: 4, finish_reason: "stop", text: "0123", tokens: [0, 1, 2, 3] };

test("missed chunks are read from their stream, and what contradicts itself is no answer", async () => {
  await using own = await connect({ servers, prefix: run });
  const { store, requests, chunk, purge } = await byHand(own, run);
  await chunk(1, 0);
  await chunk(1, 1);
  const pieces = own.session("s").generate({ id: "g" })[Symbol.asyncIterator]();
  const first = pieces.next();
  await requests.next();
  await chunk(1, 2);
  const texts = [await first, await pieces.next(), await pieces.next()].map(({ value }) => value?.text);
  assert.deepEqual(texts, ["0", "1", "2"]);
  await store("out", { ...answer, seq: 1 });
  assert.deepEqual([(await pieces.next()).value?.text, (await pieces.next()).done], ["3", true]);
  const wrong = assert.rejects(all(own.session("s").generate({ id: "g" })), turnkeep.StreamBrokenError);
  const removed = assert.rejects(own.session("s").append({ text: "x" }), turnkeep.ResultRemovedError);
  await requests.next();
  await requests.next();
  await chunk(3, 0);
  await store("out", { ...answer, seq: 3, tokens: [7, 8] });
  await purge();
  await Promise.all([wrong, removed]);
});

test("a request that the server has lost is missed, also while an earlier one waits", async () => {
  const prefix = `${run}lost`;
  await using own = await connect({ servers, prefix });
  const { store, manager } = await byHand(own, prefix);
  const waiting = assert.rejects(own.session("s").append({ id: "a", text: "x" }), turnkeep.ClientClosedError);
  while ((await manager.streams.info(`${prefix}_log`)).state.last_seq < 1) await delay(1);
  const lost = assert.rejects(own.session("s").append({ id: "b", text: "x" }), turnkeep.ResultRemovedError);
  while ((await manager.streams.info(`${prefix}_log`)).state.last_seq < 2) await delay(1);
  await manager.streams.delete(`${prefix}_log`);
  await byHand(own, prefix);
  for (const id of ["a", "c"]) await store("in", { type: "append", id, text: "x" });
  await lost;
  await store("out", { type: "failed", id: null, seq: 1, code: "invalid_request", message: "of another", retryable: false });
  await own.close();
  await waiting;
});

test("a repeat sees the chunks of the first request, and no others of its id", async () => {
  const prefix = `${run}ids`;
  await using own = await connect({ servers, prefix });
  const { store, requests, chunk, purge } = await byHand(own, prefix);
  await store("in", { messages: [{ content: "x", role: "user" }], id: "g", type: "generate" });
  await chunk(1, 0);
  const asked = { id: "g", messages: [{ role: "user", content: "x" }] } as const;
  const repeat = own.session("s").generate(asked)[Symbol.asyncIterator]();
  const next = repeat.next();
  await requests.next();
  await requests.next();
  await chunk(1, 1);
  assert.deepEqual([(await next).value?.text, (await repeat.next()).value?.text], ["0", "1"]);
  await store("out", { ...answer, seq: 2, repeat_of: 1 });
  assert.equal((await repeat.next()).value?.text, "23");

  await purge(); // so the id is free again
  const later = own.session("s").generate(asked);
  const pieces = later[Symbol.asyncIterator]();
  const begin = pieces.next();
  await requests.next();
  await chunk(4, 1, "new");
  await chunk(4, 0, "all ");
  await chunk(9, 0, "of a later one");
  await store("out", { ...answer, seq: 4, text: "all new", tokens: [0, 1] });
  const texts = [(await begin).value?.text];
  for await (const { text } of { [Symbol.asyncIterator]: () => pieces }) texts.push(text);
  assert.equal(texts.join(""), "all new");
});

test("a repeat sees the chunks of a first request that is only in its result", async () => {
  const prefix = `${run}left`;
  await using own = await connect({ servers, prefix });
  const { store, requests, chunk, purge } = await byHand(own, prefix);
  const request = { messages: [{ content: "x", role: "user" }], id: "g", type: "generate" };
  await store("in", request);
  await chunk(1, 0);
  await store("out", { ...answer, seq: 1, asked: { stored: new Date(), request } });
  await purge();
  const asked = { id: "g", messages: [{ role: "user", content: "x" }] } as const;
  const repeat = own.session("s").generate(asked)[Symbol.asyncIterator]();
  const next = repeat.next();
  await requests.next();
  await requests.next();
  await chunk(1, 1);
  assert.deepEqual([(await next).value?.text, (await repeat.next()).value?.text], ["0", "1"]);
  await store("out", { ...answer, seq: 3, repeat_of: 1 });
  assert.equal((await repeat.next()).value?.text, "23");
});

test("a repeat with an image sees the chunks of the first request, which names it by its digest", async () => {
  const prefix = `${run}seen`;
  await using own = await connect({ servers, prefix });
  const { store, requests, chunk } = await byHand(own, prefix);
  const file = Uint8Array.of(1, 2, 3);
  const digest = createHash("sha256").update(file).digest("hex");
  await store(`image.${digest}`, {});
  const first = { type: "generate", id: "g", messages: [{ role: "user", content: [{ type: "image", digest }] }] };
  const { seq } = await store("in", first);
  await chunk(seq, 0);
  const asked = { id: "g", messages: [{ role: "user", content: [turnkeep.image(file)] }] } as const;
  const repeat = own.session("s").generate(asked)[Symbol.asyncIterator]();
  const next = repeat.next();
  await requests.next();
  await requests.next();
  await chunk(seq, 1);
  await Promise.race([next, delay(3000)]);
  await store("out", { ...answer, seq: seq + 1, repeat_of: seq });
  assert.equal((await next).value?.text, "0");
});

test("an image that two clients store at once is stored once", async () => {
  const prefix = `${run}twice`;
  await using own = await connect({ servers, prefix });
  const { manager } = await byHand(own, prefix);
  const content = [turnkeep.image(new Uint8Array(300_000).map((_, at) => at % 251))];
  const clients = Array.from({ length: 4 }, () => new turnkeep.Client(own.connection, { prefix }));
  const waiting = clients.map((each) => each.session("s").append({ messages: [{ role: "user", content }] }));
  const ended = Promise.allSettled(waiting);
  const state = async () => (await manager.streams.info(`${prefix}_log`, { subjects_filter: ">" })).state.subjects ?? {};
  const subject = `${prefix}.default.s.in`;
  while (((await state())[subject] ?? 0) < clients.length) await delay(10);
  const { [subject]: _, ...images } = await state();
  assert.deepEqual(Object.values(images), [1, 1, 1, 1]);
  await own.close();
  await ended;
});

test("a request whose acknowledgement was lost is found by its result, and else is not to be sent under another id", async () => {
  const prefix = `${run}full`;
  await using own = await connect({ servers, prefix });
  const manager = await jetstreamManager(own.connection);
  const kept = { storage: "memory", allow_direct: true } as const;
  await manager.streams.add({ ...kept, name: `${prefix}_log`, subjects: [`${prefix}.*.*.out`] });
  const seen = new Set(["refused at once"]); // the first attempt of others has no answer
  own.connection.subscribe(`${prefix}.default.s.in`, {
    callback: (_, request) => {
      const { text } = request.json<{ text: string }>();
      const error = { code: 503, err_code: 10077, description: "maximum messages exceeded" };
      if (seen.has(text)) request.respond(JSON.stringify({ error }));
      seen.add(text);
    },
  });
  for (const [seq, id] of ["before", "a"].entries()) {
    const asked = { stored: new Date(), request: { text: "x", type: "append", id } };
    const appended = { type: "appended", id, seq, position: 7, asked };
    await manager.jetstream().publish(`${prefix}.default.s.out`, JSON.stringify(appended));
  }
  const send = (id: string, text: string) => own.session("s").append({ id, text });
  assert.equal((await send("a", "x")).position, 7);
  await assert.rejects(send("b", "refused at once"), failsWith("overloaded", true));
  await assert.rejects(send("a", "another of this id"), failsWith("overloaded", false));
});

test("a session forks, rewinds, is counted and described, and is forgotten", async () => {
  const session = client.session("parent");
  const { position } = await session.append({ text: "one two" });
  const fork = await session.fork("child", { position: 3, tags: ["red"] });
  const { parent, tags } = await fork.info();
  assert.deepEqual([parent, tags], [{ session: "parent", position: 3 }, ["red"]]);
  assert.equal((await fork.append({ text: "!" })).position, 4);
  assert.equal((await session.rewind(3)).position, 3);
  await assert.rejects(session.rewind(99), failsWith("invalid_request", false));
  await assert.rejects(session.append({ text: "x", expect_position: position }), failsWith("position_conflict", false));
  assert.deepEqual(await session.count({ text: "four" }), { type: "counted", tokens: 4, position: 7 });
  assert.equal((await fork.close()).position, 4);
  assert.equal(typeof (await fork.forget()).settled, "boolean", "a closed session is forgotten without an open");
  const forgotten = await session.forget();
  assert.ok(forgotten.removed_entries);
  assert.equal(typeof forgotten.settled, "boolean");
  await assert.rejects(session.append({ text: "x" }), failsWith("unknown_session", false));
});

test("a conversation is read from the log as it stands, also a fork's", async () => {
  const session = client.session("read");
  const system = { role: "system", content: "Be brief." } as const;
  await session.append({ messages: [system] });
  const question = { role: "user", content: "Why?" } as const;
  const first = await session.generate({ messages: [question], prefix: "As ", max_tokens: 5, ignore_eos: true }).result;
  await session.generate({ text: "More?", max_tokens: 5, ignore_eos: true }).result;
  await assert.rejects(session.rewind(9999));
  await session.rewind(first.position);
  const said = { role: "assistant", content: `As ${first.text}` };
  const { messages, turns, position, isWhole } = await session.history();
  assert.deepEqual([messages, position, isWhole], [[system, question, said], first.position, true]);
  assert.equal(turns[1]?.answer?.id, first.id);

  const fork = await session.fork("readfork", { position: first.position - 2 });
  await fork.append({ text: "And?" });
  const forked = await fork.history();
  assert.deepEqual(forked.messages.slice(0, 2), [system, question]);
  assert.deepEqual(forked.messages.at(-1), { role: "user", content: "And?" });
  assert.deepEqual(forked.turns.map((turn) => turn.isCut), [false, true, false]);
  await session.forget();
  while ((await fork.history()).isWhole) await delay(10); // its entries are removed after its result is stored
});

test("turns whose tokens a later one has replaced stay in the conversation", async () => {
  const session = client.session("replaced");
  const tools = [{ type: "function", function: { name: "clock", parameters: { type: "object" } } }] as const;
  const ask = { max_tokens: 3, ignore_eos: true };
  const first = await session.generate({ ...ask, messages: [{ role: "user", content: "a?" }], tools: [...tools] }).result;
  const second = await session.generate({ ...ask, messages: [{ role: "user", content: "b?" }], tools: [] }).result;
  assert.ok(second.position < first.position, "without the tools");
  const { messages, isWhole, position } = await (await session.fork("replacedfork")).history();
  assert.deepEqual(messages.map(({ content }) => content), ["a?", first.text, "b?", second.text]);
  assert.deepEqual([isWhole, position], [true, second.position]);
});

test("results tell which model gave an answer, and which one the turn before", async () => {
  await using own = await connect({ servers });
  const session = await own.session("moved").fork(`${run}moved`); // another model gave the answer in there
  const { model, previous_model } = await session.generate({ text: "b", max_tokens: 2 }).result;
  assert.deepEqual([model?.name, previous_model?.name], ["tiny", "before"]);
  assert.notEqual(model?.weights, previous_model?.weights);
  assert.deepEqual((await session.info()).answered_by, model);
  const answers = (await session.history()).turns.map(({ answer }) => answer?.model);
  assert.deepEqual(answers, [previous_model, model]);
});

test("a request with an image waits while the log does not answer", async () => {
  const prefix = `${run}silent`;
  await using own = await connect({ servers, prefix });
  const asked: string[] = [];
  own.connection.subscribe(`$JS.API.DIRECT.GET.${prefix}_log`, {
    callback: (_, request) => {
      asked.push(request.string());
      if (asked.length > 1) request.respond("", { headers: natsHeaders(404, "No Results") });
    },
  });
  own.connection.subscribe(`${prefix}.default.s.>`, {
    callback: (_, request) => {
      request.respond(JSON.stringify({ stream: `${prefix}_log`, seq: 1, type: "counted" }));
    },
  });
  const content = [turnkeep.image(Uint8Array.of(1, 2, 3))];
  await own.session("s").count({ messages: [{ role: "user", content }] });
  assert.equal(asked[0], asked[1]);
});

test("a part of the log that lost a message with the connection is no history", async () => {
  const prefix = `${run}holes`;
  await using own = await connect({ servers, prefix });
  let missing = -1;
  own.connection.subscribe(`$JS.API.DIRECT.GET.${prefix}_log`, {
    callback: (_, request) => {
      const seqs = [5, 7, 9].filter((seq) => seq >= request.json<{ seq: number }>().seq);
      const messages = [...seqs, 0].map((seq, n) => {
        const headers = seq ? natsHeaders() : natsHeaders(204, "EOB");
        headers.set("Nats-Last-Sequence", `${seqs[n - 1] ?? 0}`);
        if (seq) headers.set("Nats-Sequence", `${seq}`);
        return headers;
      });
      for (const headers of messages.filter((_, n) => n !== missing)) request.respond("{}", { headers });
    },
  });
  assert.deepEqual((await own.session("s").history()).turns, []);
  for (missing of [0, 1, 2]) await assert.rejects(own.session("s").history(), /the connection was lost/);
});

test("a replica that lags behind its leader is read until it has what was stored before", async () => {
  const stored = client.session("lagging");
  for (const id of ["first", "second"]) await stored.append({ text: id, id });
  let numLags = 0;
  const connection = new Proxy(client.connection, {
    get(real, name) {
      if (name === "info") return { ...real.info, cluster: "of three" };
      if (name === "requestMany" && numLags-- > 0) {
        return async function* () {
          yield { headers: natsHeaders(404, "Message Not Found") };
        };
      }
      const value: unknown = Reflect.get(real, name);
      return typeof value === "function" ? value.bind(real) : value;
    },
  });
  const session = new turnkeep.Client(connection, { tenant: run }).session("lagging");
  for (numLags of [0, 1, 3]) {
    assert.deepEqual((await session.history()).turns.map(({ request }) => request.id), ["first", "second"]);
  }
  numLags = 100;
  await assert.rejects(session.history(), /a replica lags behind its leader/);
});

test("recorded logs are read as the Python client reads them", async () => {
  type Recorded = { messages: [string, string][]; is_whole: boolean; position: number };
  const file = await readFile(new URL("logs.json", import.meta.url), "utf8");
  const { entries, sessions } = JSON.parse(file) as {
    entries: { seq: number; subject: string; headers: Record<string, string>; body: string }[];
    sessions: Record<string, Recorded>;
  };
  const prefix = `${run}recorded`;
  await using own = await connect({ servers, prefix });
  own.connection.subscribe(`$JS.API.DIRECT.GET.${prefix}_log`, {
    callback: (_, request) => {
      const { seq, next_by_subj } = request.json<{ seq: number; next_by_subj: string }>();
      for (const one of entries) {
        if (one.seq < seq || next_by_subj !== `${prefix}.default.${one.subject}`) continue;
        const headers = natsHeaders();
        headers.set("Nats-Sequence", `${one.seq}`);
        for (const [name, value] of Object.entries(one.headers)) headers.set(name, value);
        request.respond(one.body, { headers });
      }
      request.respond("", { headers: natsHeaders(204, "EOB") });
    },
  });
  for (const [name, expected] of Object.entries(sessions)) {
    const { messages, isWhole, position } = await own.session(name).history();
    assert.deepEqual(messages.map(({ role, content }) => [role, content]), expected.messages, name);
    assert.deepEqual([isWhole, position], [expected.is_whole, expected.position]);
  }
});

test("a fork that was imported before its parent has the parent's turns", async () => {
  const prefix = `${run}copies`;
  await using own = await connect({ servers, prefix });
  const stored = [
    [1, "fork.in", { type: "open", id: "o", from: { session: "parent" } }],
    [2, "fork.out", { type: "opened", id: "o", seq: 1, position: 3, parent: { session: "parent", position: 3 } }],
    [3, "parent.in", { type: "append", id: "a", text: "Hello" }],
    [4, "parent.out", { type: "appended", id: "a", seq: 3, position: 3 }],
  ] as const;
  own.connection.subscribe(`$JS.API.DIRECT.GET.${prefix}_log`, {
    callback: (_, request) => {
      const { seq, next_by_subj } = request.json<{ seq: number; next_by_subj: string }>();
      for (const [at, subject, body] of stored) {
        if (at < seq || next_by_subj !== `${prefix}.default.${subject}`) continue;
        const headers = natsHeaders();
        headers.set("Nats-Sequence", `${at}`);
        headers.set("Turnkeep-Began", "2026-11-20T08:00:00Z");
        headers.set("Turnkeep-History", "the same");
        request.respond(JSON.stringify(body), { headers });
      }
      request.respond("", { headers: natsHeaders(204, "EOB") });
    },
  });
  const { messages, isWhole } = await own.session("fork").history();
  assert.deepEqual([messages, isWhole], [[{ role: "user", content: "Hello" }], true]);
});

test("sessions that are forked from each other in turn have one conversation, however often", async () => {
  const name = (cycle: number) => (cycle % 2 ? "swapped" : "swap");
  await client.session(name(0)).append({ text: "0" });
  for (let cycle = 1; cycle <= 24; cycle += 1) {
    const parent = client.session(name(cycle - 1));
    const fork = await parent.fork(name(cycle));
    await fork.append({ text: `${cycle}` });
    await parent.close();
  }
  const { messages, isWhole } = await client.session(name(24)).history(); // each open read the parent again: 10^10 reads
  assert.deepEqual(messages.map(({ content }) => content), Array.from({ length: 25 }, (_, cycle) => `${cycle}`));
  assert.ok(isWhole);
});

test("the sessions of a tenant are listed, the last used one first", async () => {
  await using own = await connect({ servers, tenant: `${run}list` });
  assert.deepEqual(await own.sessions(), []);
  own.connection.publish(`turnkeep.${run}list.b!d.in`, "{}"); // a name that is none
  const { position } = await own.session("one").append({ text: "ab" });
  const repeated = { text: "ab", id: "a" };
  await own.session("two").append(repeated);
  await own.session("two").close();
  const [two, one] = await own.sessions();
  assert.deepEqual([two?.name, two?.isClosed, one?.name, one?.isClosed], ["two", true, "one", false]);
  assert.deepEqual([one?.position, one?.isWaiting], [position, false]);
  assert.ok(two && one && two.last >= one.last && Date.now() - two.last.getTime() < 60_000);

  await own.session("two").append(repeated);
  assert.equal((await own.sessions())[0]?.isClosed, true);
  await assert.rejects(own.session("two").append({ text: "late" }), failsWith("unknown_session", false));
  assert.deepEqual((await own.sessions()).map((one) => [one.isClosed, one.position]), [[true, 2], [false, 2]]);
  const running = own.session("one").generate(LONG);
  for await (const piece of running) if (piece.i > 3) break;
  const waiting = own.session("one").generate({ text: "y", max_tokens: 3 });
  const cancelled = waiting.result;
  while (waiting.seq === undefined) await delay(1);
  while (!(await waiting.cancel().catch(() => undefined))) await delay(1);
  await cancelled;
  assert.equal((await own.sessions())[0]?.isWaiting, true, "the one before it still runs");
  await running.cancel();
  await running.result;
  assert.equal((await own.sessions())[0]?.isWaiting, false);
});

test("more sessions are listed than the server looks up at a time", async () => {
  const prefix = `${run}most`;
  await using own = await connect({ servers, prefix });
  await byHand(own, prefix);
  const js = (await jetstreamManager(own.connection)).jetstream();
  const names = Array.from({ length: 1100 }, (_, n) => `s${n}`);
  await Promise.all(names.map((name) => js.publish(`${prefix}.default.${name}.in`, JSON.stringify({ id: "g" }))));
  const found = await own.sessions();
  assert.deepEqual(found.map(({ name }) => name).sort(), names.sort());
  assert.ok(found.every(({ isWaiting, position }) => isWaiting && position === undefined));
  const large = JSON.stringify({ id: "g", text: "x".repeat(900_000) });
  for (const name of names.slice(0, 80)) await js.publish(`${prefix}.large.${name}.in`, large);
  await using other = await connect({ servers, prefix, tenant: "large" });
  assert.equal((await other.sessions()).length, 80, "in several batches");
});

test("texts and token ids have vectors of length 1, also more than a request takes", async () => {
  await using embedder = await connect({ servers: process.env["EMBEDDER_URL"] ?? "" });
  const inputs = [...Array.from({ length: 20 }, (_, i) => `text ${i}`), [5, 6, 7]];
  const { vectors, tokens, model } = await embedder.embed(inputs);
  assert.equal(model, "embedding");
  assert.deepEqual([vectors.length, tokens.at(-1)], [21, 3]);
  for (const vector of vectors) assert.ok(Math.abs(vector.reduce((sum, one) => sum + one * one, 0) - 1) < 1e-4);
  const [again] = (await embedder.embed(["text 0"])).vectors;
  const likeness = again?.reduce((sum, one, i) => sum + one * (vectors[0]?.[i] ?? 0), 0) ?? 0;
  assert.ok(likeness > 0.9999);
  await assert.rejects(embedder.embed([...inputs, []]), new RegExp(`inputs\\[${inputs.length}\\] has 0 tokens`));
  const short = await embedder.embed(["text 0"], { dimensions: 4 });
  assert.equal(short.vectors[0]?.length, 4);
  await assert.rejects(client.embed(["a model that chats"]), failsWith("invalid_request", false));
});

test("documents have the scores that a reranker gives them, also more than a request takes", async () => {
  await using judge = await connect({ servers: process.env["RERANKER_URL"] ?? "" });
  const documents = Array.from({ length: 20 }, (_, i) => `document ${i % 5}`);
  const { scores, tokens, model } = await judge.rerank("Why?", documents);
  assert.equal(model, "reranker");
  assert.deepEqual([scores.length, tokens.length, new Set(tokens).size], [20, 20, 1]);
  assert.ok(scores.every((score, i) => score > 0 && score < 1 && Math.abs(score - (scores[i % 5] ?? 0)) < 1e-5));
  assert.ok(Math.abs((scores[0] ?? 0) - (scores[1] ?? 0)) > 1e-6);
  const told = await judge.rerank("Why?", ["document 0"], { instruction: "Find poems", document_tokens: 3 });
  assert.notEqual(told.scores[0], scores[0]);
  assert.ok((told.tokens[0] ?? 0) > 0);
  await assert.rejects(client.rerank("Why?", ["a model without a judgement"]), failsWith("invalid_request", false));
});

test("what failed for a reason that may pass is sent again, and nothing else", async () => {
  const session = client.session("retried");
  let number = 0;
  const send = (limit: number) => () => session.append({ text: "x", deadline_s: ++number < limit ? 1e-6 : 60 });
  assert.equal((await retry(send(2))).position, 1);
  assert.equal(number, 2);
  await assert.rejects(retry(send(9), { attempts: 2 }), failsWith("expired", true));
  assert.equal(number, 4);
  await assert.rejects(retry(() => (number++, session.rewind(99))), failsWith("invalid_request", false));
  assert.equal(number, 5);
});

test("leaving the block of an answer cancels it", async () => {
  const session = client.session("block");
  const asked = { ...LONG, id: "long" } as const;
  {
    await using answer = session.generate(asked);
    for await (const piece of answer) if (piece.i > 3) break;
  }
  assert.equal((await session.generate(asked).result).finish_reason, "cancelled");
  const stop = new AbortController();
  await assert.rejects(async () => {
    await using answer = session.generate({ ...asked, id: "stopped" }, { signal: stop.signal });
    for await (const piece of answer) if (piece.i > 3) stop.abort(new Error("enough"));
  }, /enough/);
  assert.equal((await session.generate({ ...asked, id: "stopped" }).result).finish_reason, "cancelled");
  await using whole = session.generate({ text: "y", max_tokens: 2 });
  assert.notEqual((await whole.result).finish_reason, "cancelled");
  await using unsent = session.generate({ text: "never" });
  assert.equal(unsent.seq, undefined);
});

test("leaving the block of a complete answer reads nothing", async () => {
  const prefix = `${run}complete`;
  await using own = await connect({ servers, prefix });
  const { store, requests } = await byHand(own, prefix);
  let numReads = 0;
  own.connection.subscribe(`$JS.API.DIRECT.GET.${prefix}_log`, { callback: () => void (numReads += 1) });
  {
    await using whole = own.session("s").generate({ id: "g" });
    const result = whole.result;
    await requests.next();
    await store("out", { ...answer, seq: 1 });
    await result;
  }
  await own.connection.flush();
  assert.equal(numReads, 0);
});

test("a signal ends the wait and not the answer, which a cancel ends", async () => {
  const session = client.session("stopped");
  const stop = new AbortController();
  const answer = session.generate(LONG, { signal: stop.signal });
  await assert.rejects(async () => {
    for await (const piece of answer) if (piece.i > 5) stop.abort(new Error("enough"));
  }, /^Error: enough$/);
  await assert.rejects(answer.result, /^Error: enough$/);
  const second = session.generate({ text: "y", max_tokens: 3 });
  const result = second.result;
  assert.equal((await answer.cancel()).was, "running");
  assert.ok((await result).tokens.length);
  assert.ok(!(await session.info()).waiting.length);
});

test("a signal ends the wait of a reader who is slower than the answer", async () => {
  const stop = new AbortController();
  const answer = client.session("slow").generate(LONG, { signal: stop.signal });
  await assert.rejects(async () => {
    for await (const piece of answer) {
      if (piece.i > 5) stop.abort(new Error("enough"));
      await delay(30);
    }
  }, /^Error: enough$/);
  await answer.cancel();
});

test("a call whose signal is aborted before it begins sends nothing", async () => {
  const session = client.session("unsent");
  const signal = AbortSignal.abort(new Error("too late"));
  await assert.rejects(session.append({ text: "x" }, { signal }), /^Error: too late$/);
  await assert.rejects(session.generate({ text: "x", max_tokens: 3 }, { signal }).result, /^Error: too late$/);
  await session.append({ text: "x", id: "first" });
  assert.deepEqual((await session.history()).turns.map(({ request }) => request.id), ["first"]);
});

test("calls that wait for one session share a subscription, and all get their own results", async () => {
  const session = client.session("many");
  const positions = await Promise.all(Array.from({ length: 20 }, () => session.append({ text: "ab" })));
  assert.deepEqual(positions.map((one) => one.position).sort((a, b) => a - b), Array.from({ length: 20 }, (_, n) => 2 * n + 2));
});

test("functions are called until the model answers, and again from the record", async () => {
  const parameters = {
    type: "object",
    properties: { city: { enum: ["Rome"] } },
    required: ["city"],
    additionalProperties: false,
  };
  const tools = [{ type: "function" as const, function: { name: "weather", parameters } }];
  const asked: string[] = [];
  const weather = ({ city }: { city: string }) => {
    asked.push(city);
    if (asked.length === 1) throw new RangeError(city);
    return { sky: "blue" };
  };
  const fields = { tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 120, id: "step" } as const;
  const messages = [{ role: "user", content: "Weather in Rome?" }] as const;
  const session = client.session("tools");
  const first = await runTools(session, { weather }, { ...fields, messages, expect_position: 0 });
  assert.equal(first.id, "step-1");
  assert.deepEqual(asked, ["Rome"]);
  const again = await runTools(session, { weather }, { ...fields, messages, expect_position: 0 });
  assert.deepEqual([again.tokens, asked], [first.tokens, ["Rome", "Rome"]]);
  await assert.rejects(runTools(session, {}, { tools }), /there is no function for weather/);
  await assert.rejects(runTools(session, { weather }, { ...fields, id: "x".repeat(55) }), /x-7-results" is not valid/);
});

test("a control request without a reply is sent again, to a worker that has started since", async () => {
  const prefix = `${run}again`;
  await using own = await connect({ servers, prefix });
  let numAsked = 0;
  own.connection.subscribe(`${prefix}.default.s.ctl`, {
    callback: (_, request) => {
      if (++numAsked > 1) request.respond(JSON.stringify({ type: "counted", tokens: numAsked, position: 7 }));
    },
  });
  assert.equal((await own.session("s").count({ text: "x" })).tokens, 2);
});

test("a count with an image ends by its limit and by its signal", async () => {
  const prefix = `${run}uncounted`;
  await using own = await connect({ servers, prefix });
  own.connection.subscribe(`$JS.API.DIRECT.GET.${prefix}_log`, { callback: () => {} });
  const asked = { messages: [{ role: "user", content: [turnkeep.image(Uint8Array.of(1, 2, 3))] }] } as const;
  await assert.rejects(own.session("s").count(asked, { timeoutMs: 200 }), turnkeep.NoAnswerError);
  const signal = AbortSignal.timeout(20);
  await assert.rejects(own.session("s").count(asked, { signal }), (error) => error === signal.reason);
});

test("a limit may be of any length, also none", async () => {
  const prefix = `${run}slow`;
  await using own = await connect({ servers, prefix, controlTimeoutMs: 2 ** 40 });
  own.connection.subscribe(`${prefix}.default.*.ctl`, {
    callback: (_, request) => {
      setTimeout(() => request.respond(JSON.stringify({ type: "embedded", vectors: [], tokens: [], model: "slow" })), 50);
    },
  });
  assert.equal((await own.embed(["x"], { timeoutMs: Infinity })).model, "slow");
  await assert.rejects(own.session("s").info(), /the answer is "embedded"/);
  for (const timeoutMs of [0, -1]) await assert.rejects(own.embed(["x"], { timeoutMs }), turnkeep.NoAnswerError);
});

test("a number of attempts may be without limit too", async () => {
  assert.equal(await retry(async () => 1, { attempts: Infinity }), 1);
  await using own = await connect({ servers, tenant: run, maxReconnectAttempts: Infinity, maxPingOut: Infinity });
  const messages: turnkeep.Message[] = [{ role: "user", content: "x" }];
  const answer = await runTools(own.session("unlimited"), {}, { most: Infinity, max_tokens: 1, messages });
  assert.equal(answer.tokens.length, 1);
});

test("a request that was read back may be sent to another session", async () => {
  await client.session("original").generate({ text: "abc", max_tokens: 1 }).result;
  const [turn] = (await client.session("original").history()).turns;
  const again = await client.session("resent").generate({ ...turn!.request, id: undefined }).result;
  assert.equal(again.usage.prompt_tokens, 3);
});

test("a client that loses its server passes by one that has no connection left", async () => {
  const full = process.env["FULL_URL"] ?? "";
  await using own = await connect({ servers: [servers, full], noRandomize: true, tenant: run });
  const began = Date.now();
  const back = (async () => {
    for await (const { type } of own.connection.status()) if (type === "reconnect") return;
  })();
  await own.connection.reconnect();
  await back;
  assert.ok(Date.now() - began < 15_000, "NATS's packages wait 20 s for a server that has hung up");
  assert.equal((await own.session("passed").append({ text: "abc" })).position, 3);
});

test("who may not read the log is told so", async () => {
  const connection = new Proxy(client.connection, {
    get(real, name) {
      if (name === "requestMany") return () => Promise.reject(new errors.PermissionViolationError("no", "publish", "$JS.API"));
      const value: unknown = Reflect.get(real, name);
      return typeof value === "function" ? value.bind(real) : value;
    },
  });
  const barred = new turnkeep.Client(connection, { tenant: run });
  await assert.rejects(barred.session("s").history(), turnkeep.NotPermittedError);
  await assert.rejects(barred.sessions(), turnkeep.NotPermittedError);
});

test("what cannot be done is told by the class of its error", async () => {
  assert.throws(() => client.session("a b"), turnkeep.InvalidMessageError);
  assert.throws(() => client.session("s").generate({ id: "a.b" }), turnkeep.InvalidMessageError);
  const circle: Record<string, unknown> = {};
  circle["self"] = circle;
  const refused: [object, turnkeep.CallOptions][] = [
    [{ text: "x", chat_template_kwargs: circle }, {}],
    [{ messages: [{ role: "user", content: [{ type: "image", data: "?" }] }] }, {}],
    [{ text: "x" }, { headers: { traceparent: "a\r\nb" } }],
    [{ text: "x" }, { headers: { "a:b": "c" } }],
    [{ text: "x" }, { headers: { number: 5 as unknown as string } }],
    [{ text: "half \ud800" }, {}],
  ];
  for (const [fields, options] of refused) {
    await assert.rejects(client.session("s").append(fields, options), turnkeep.InvalidMessageError);
  }
  const any = (value: unknown) => value as never; // what JavaScript, and TypeScript's any, let pass
  const s = client.session("s");
  const mistaken: [() => unknown, RegExp][] = [
    [() => s.generate({ messages: any("Hello.") }).result, /messages must be `array \| null`, not `string`/],
    [() => s.generate({ max_tokens: any(null) }), /max_tokens must be `integer`, not `null`/],
    [() => s.generate({ tool_choice: any("maybe") }), /tool_choice must be `"auto" \| "none" \| "required" \| object`/],
    [() => s.generate({ tokens: any(Uint8Array.of(1)) }), /tokens must be `array \| null`, not `Uint8Array`/],
    [() => s.generate(any({ maxTokens: 3 })), /the fields of generate have no maxTokens; they have messages, .*max_tokens/],
    [() => s.generate(any(null)), /the fields of generate must be `object`, not `null`/],
    [() => s.generate({ text: "x" }, any(null)), /the options of generate must be `object`, not `null`/],
    [() => s.append({ text: "x", id: any(null) }), /id must be `string`, not `null`/],
    [() => s.append({ text: "x" }, { signal: any("soon") }), /signal must be `AbortSignal`, not `string`/],
    [() => s.append({ text: "x" }, { signal: any(null) }), /signal must be `AbortSignal`, not `null`/],
    [() => s.append({ text: "x" }, { headers: any(new Map([["a", "b"]])) }), /headers must be `object`, not `Map`/],
    [() => s.append({ text: "x" }, any({ timeoutMs: 5 })), /the options of append have no timeoutMs; they have signal, headers/],
    [() => s.rewind(any("3")), /position must be `integer`, not `string`/],
    [() => s.rewind(0, any(null)), /the fields of rewind must be `object`, not `null`/],
    [() => s.fork("f", any(null)), /the fields of fork must be `object`, not `null`/],
    [() => s.fork("f", { tags: any("x") }), /tags must be `array`, not `string`/],
    [() => s.forget(any(null)), /the options of close must be `object`, not `null`/],
    [() => s.info(any(null)), /the fields of info must be `object`, not `null`/],
    [() => s.count({}, any(null)), /the options of count must be `object`, not `null`/],
    [() => s.count({ text: "x" }, { timeoutMs: NaN }), /timeoutMs must be `number`, not `NaN`/],
    [() => client.embed([], any(null)), /the options of embed must be `object`, not `null`/],
    [() => client.rerank("x", [], { timeoutMs: any("5") }), /timeoutMs must be `number`, not `string`/],
    [() => client.rerank(any(null), ["x"]), /query must be `string`, not `null`/],
    [() => new turnkeep.Client(client.connection, any(null)), /the options of Client must be `object`, not `null`/],
    [() => runTools(s, any(null), {}), /functions must be `object`, not `null`/],
    [() => runTools(s, {}, { most: any("2") }), /most must be `number`, not `string`/],
    [() => runTools(s, {}, any({ text: "x" })), /the fields of runTools have no text/],
    [() => retry(any(null)), /send must be `function`, not `null`/],
    [() => retry(async () => 1, any(null)), /the options of retry must be `object`, not `null`/],
    [() => connect(any(null)), /the options of connect must be `object`, not `null`/],
    [() => connect({ servers: any(null) }), /servers must be `string \| array`, not `null`/],
    [() => connect({ servers, controlTimeoutMs: any("5") }), /controlTimeoutMs must be `number`, not `string`/],
    [() => connect({ servers: any([5]) }), /servers\[0\] must be `string`, not `number`/],
    [() => connect({ servers: "" }), /servers names none; leave it out/],
    [() => connect({ servers, token: any(5) }), /token must be `string`, not `number`/],
    [() => connect({ servers, tls: any(true) }), /tls must be `object \| null`, not `boolean`/],
    [() => connect(any({ servers, tennant: "x" })), /the options of connect have no tennant; they have tenant, prefix/],
    [() => connect({ servers, port: 4222 }), /the options of connect do not agree: 'servers','port' are mutually exclusive/],
    [() => s.append({ messages: any(["Hello."]) }), /messages\[0\] must be `object`, not `str`/],
    [() => s.count({ messages: any([null]) }), /messages\[0\] must be `object`, not `null`/],
    [() => s.append({ messages: [{ role: "user", content: any([null]) }] }), /content\[0\] must be `object`/],
    [() => s.append({ text: "x", priority: any(5n) }), /priority must be `integer`, not `bigint`/],
    [() => s.append({ text: "x", chat_template_kwargs: { a: 5n } }), /cannot be written as JSON: .*BigInt/],
    [() => s.append(), /exactly one of messages, text, tokens/],
    [() => s.append({ text: "x", id: any(7) }), /id must be `string`, not `number`/],
    [() => s.cancel(any(undefined)), /request id undefined is not valid/],
    [() => client.session(any(undefined)), /session undefined is not valid/],
    [() => client.embed(any("one text")), /inputs must be `array`, not `string`/],
    [() => client.embed(any([null])), /inputs\[0\] must be `str \| array`, not `null`/],
    [() => client.rerank("x", any(undefined)), /documents must be `array`, not `undefined`/],
    [() => runTools(s, {}, { tools: any("x"), messages: [] }), /tools must be `array \| null`, not `string`/],
    [() => turnkeep.image(any(new ArrayBuffer(4))), /an image must be the bytes of its file, as a Uint8Array/],
    [() => connect(any(servers)), /the options of connect must be `object`, not `string`/],
    [() => connect({ servers, prefix: any(7) }), /prefix must be `string`, not `number`/],
  ];
  for (const [call, message] of mistaken) {
    const told = (error: unknown) => error instanceof turnkeep.TurnkeepError && message.test(error.message);
    await assert.rejects(async () => call(), told, String(message));
  }
  const began = Date.now();
  await assert.rejects(async () => {
    await using never = client.session("s").generate({ text: "half \ud800" });
    await never.result;
  }, turnkeep.InvalidMessageError);
  assert.ok(Date.now() - began < 500, "there is nothing to cancel");
  const large = "x".repeat(2 ** 21);
  await assert.rejects(client.session("s").append({ text: large }), turnkeep.InvalidMessageError);
  await assert.rejects(connect({ servers: "nats://wrong@" + servers.split("@")[1] }), turnkeep.NotPermittedError);
  for (const secret of ["user:p@ss", "50%", "user:%ff"]) {
    const refused = (error: unknown) => error instanceof turnkeep.NotPermittedError && !error.message.includes("ss@");
    await assert.rejects(connect({ servers: `nats://${secret}@${servers.split("@")[1]}` }), refused, secret);
  }
  const hidden = (error: unknown) => error instanceof turnkeep.NoServerError && !error.message.includes("secret");
  await assert.rejects(connect({ servers: "nats://us/er:secret@127.0.0.1:9" }), hidden);
  await assert.rejects(connect({ servers: "127.0.0.1:9" }), turnkeep.NoServerError);
  const full = process.env["FULL_URL"] ?? "";
  const tried = Date.now();
  await assert.rejects(connect({ servers: full }), (error) =>
    error instanceof turnkeep.FullServerError && error.message.endsWith("none left (max_connections)"));
  for (let number = 0; number < 8; number += 1) await (await connect({ servers: [full, servers] })).close();
  assert.ok(Date.now() - tried < 10_000, "NATS's packages wait 20 s for a server that has hung up");
  const unencrypted = servers.replace("nats:", "tls:");
  await assert.rejects(connect({ servers: unencrypted }), turnkeep.NoServerError);
  await assert.rejects(connect({ servers, prefix: "a b" }), turnkeep.InvalidMessageError);
  await using other = await connect({ servers, prefix: "nobody" });
  await assert.rejects(other.session("s").info(), turnkeep.NoAnswerError);
  await assert.rejects(other.sessions(), turnkeep.NoAnswerError);
  await assert.rejects(other.session("s").append({ text: "x" }), /no worker was ever started/);
  other.connection.subscribe("nobody.default.s.ctl", { callback: () => {} });
  const waiting = [other.session("s").append({ text: "x" }), other.session("s").info()];
  const ended = Promise.allSettled(waiting);
  await other.connection.flush();
  await other.close();
  for (const one of await ended) assert.ok(one.status === "rejected" && one.reason instanceof turnkeep.ClientClosedError);
  await assert.rejects(other.session("s").history(), turnkeep.ClientClosedError);
});
