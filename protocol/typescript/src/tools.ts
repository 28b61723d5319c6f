/** A loop that lets a session call functions until it answers. Each step has an id, so it can be run again. */

import { nuid } from "@nats-io/nats-core";

import type { CallOptions } from "./calls.js";
import { InvalidMessageError, RequestFailedError } from "./errors.js";
import type { Called, Generate, Generated, Message } from "./messages.js";
import { checked, checkKind, TOOL_FIELDS } from "./options.js";
import type { Fields, Session } from "./session.js";
import { checkId } from "./subjects.js";

/** A function that a model may call, with the arguments in one object. It may return anything that is JSON. */
export type Tool = (args: any) => unknown;

export interface RunToolsFields extends Omit<Fields<Generate>, "text" | "tokens"> {
  /** Answers at most; 8 if it is left out. */
  most?: number;
}

/**
 * Generate, run the functions that the answer calls, and send their results, until an answer calls none.
 *
 * Return that answer, or the answer number `most`. `fields` are those of a generate, with the `tools` that
 * describe the functions. What a function throws becomes the call's result, for the model to read. With an
 * `id`, a program that died may do this again: functions are called again, but the results that were sent
 * first stand, and no answer is generated twice. It must be some ten characters shorter than other ids, since
 * each step adds its number. `expect_position` is that of the first step.
 */
export async function runTools(
  session: Session,
  functions: Readonly<Record<string, Tool>>,
  fields: RunToolsFields = {},
  options: CallOptions = {},
): Promise<Generated> {
  const { most = 8, id = nuid.next(), messages, ...first } = checked("the fields of runTools", fields, TOOL_FIELDS);
  checkKind("functions", functions, "object");
  const described = first.tools ?? [];
  const unknown = described.map((tool) => tool?.function?.name).filter((name) => name && !isFunction(functions, name));
  if (unknown.length > 0) throw new InvalidMessageError(`there is no function for ${unknown.join(", ")}`);
  if (most > 1) checkId("request id", `${id}-${most - 1}-results`); // before a function is called
  // Later steps leave the tools to the session, which has another position then; a forced call would never end.
  const { tools: _, expect_position: __, ...later } = { ...first, tool_choice: "auto" as const };
  let answer = await session.generate({ ...first, messages, id: `${id}-0` }, options).result;
  for (let number = 1; number < most && (answer.tool_calls ?? []).length > 0; number += 1) {
    const results: Message[] = [];
    for (const call of answer.tool_calls ?? []) {
      results.push({ role: "tool", tool_call_id: call.id, content: await resultOf(functions, call) });
    }
    try {
      await session.append({ messages: results, id: `${id}-${number}-results` }, options);
    } catch (error) {
      // An earlier run got other results: those stand.
      if (!(error instanceof RequestFailedError && error.code === "id_conflict")) throw error;
    }
    answer = await session.generate({ ...later, id: `${id}-${number}` }, options).result;
  }
  return answer;
}

function isFunction(functions: Readonly<Record<string, Tool>>, name: string): boolean {
  return Object.hasOwn(functions, name) && typeof functions[name] === "function";
}

/** Run a call; return its result as text. */
async function resultOf(functions: Readonly<Record<string, Tool>>, call: Called): Promise<string> {
  const { name } = call.function;
  const run = isFunction(functions, name) ? functions[name] : undefined;
  if (run === undefined) return `there is no function ${name}`;
  try {
    const found: unknown = await run(JSON.parse(call.function.arguments));
    return typeof found === "string" ? found : (JSON.stringify(found) ?? "null");
  } catch (error) {
    return String(error);
  }
}
