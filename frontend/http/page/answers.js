// The answers that are being written, at most one a conversation. Each goes on while another conversation is shown, and
// on the server while the page is away.
import { ApiError, forget, respond, resume } from "./api.js";
import { append, path } from "./conversation.js";

const MOST_ROUNDS = 16; // of calls, of one question
const MOST_TRIES = 5; // to reach the server again

export class Answers {
  // `grew(conversation, status)` is called after each part, with a status that is new; `ended(conversation, text, isBad)`
  // with what became of it.
  constructor(tools, grew, ended) {
    this.running = new Map();
    Object.assign(this, { tools, grew, ended });
  }

  // In words; undefined: none is written there.
  status(conversation) {
    return this.running.get(conversation)?.status;
  }

  stop(conversation) {
    this.running.get(conversation)?.controller.abort();
  }

  // Appends the answer, and one more after each round of calls. `request(messages)` is their request. A message of
  // the conversation that the server still writes may be given: it is read on.
  async write(conversation, model, request, key, resumed = null) {
    const mine = { controller: new AbortController(), status: "" };
    const { signal } = mine.controller;
    this.running.set(conversation, mine);
    const tell = (status) => {
      mine.status = status ?? mine.status;
      this.grew(conversation, status);
    };
    let message = resumed;
    let result = ["The answer is complete.", false];
    try {
      for (let round = 0; ; round++) {
        const body = message ? null : request(path(conversation));
        message ??= append(conversation, { role: "assistant", model, content: "", reasoning: "" });
        tell(message.content ? "Answering." : "Waiting for the first token.");
        await this.stream(message, body, key, signal, tell);
        if (!message.calls) break;
        if (round === MOST_ROUNDS) throw new ApiError(`After ${MOST_ROUNDS} rounds of calls the model wants more; ask it to go on`);
        for (const call of message.calls) if (!call.state) await this.tools.run(conversation, call, key, signal, tell);
        message = null;
      }
      if (message.finish !== "ended") result = ["The answer is not complete.", false];
    } catch (error) {
      if (message.response) forget(message.response, key);
      delete message.response;
      if (signal.aborted) {
        message.finish = "stopped";
        result = ["Stopped.", false];
      } else if (resumed && error.status === 404) {
        message.finish = "left"; // the server has dropped it, or was started anew
        result = ["", false];
      } else {
        message.error = error instanceof ApiError ? error.message : `The server cannot be reached: ${error.message}`;
        result = ["The answer failed.", true];
      }
    }
    this.running.delete(conversation);
    this.ended(conversation, ...result);
  }

  // Fills the message. A connection that is lost is made again.
  async stream(message, body, key, signal, tell) {
    const started = message.response ? null : performance.now(); // null: before this page was
    let parts = message.response ? resume(message.response, key) : respond(body, key);
    for (let tries = 0; !message.finish; ) {
      try {
        for await (const part of until(signal, parts, message, key)) {
          tries = 0;
          fill(message, part, started, tell);
        }
        message.finish ??= "stopped"; // elsewhere
      } catch (error) {
        if (error instanceof ApiError || signal.aborted || !message.response || ++tries > MOST_TRIES) throw error;
        tell("The server cannot be reached. Trying again.");
        await new Promise((resolve) => setTimeout(resolve, 1000 * tries));
        parts = resume(message.response, key);
      }
    }
    forget(message.response, key);
    delete message.response;
  }
}

// Its parts until the signal aborts; then the server ends the answer, also one whose id is not known yet.
async function* until(signal, parts, message, key) {
  const aborted = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason), { once: true }));
  aborted.catch(() => null);
  for (;;) {
    const next = parts.next();
    try {
      signal.throwIfAborted();
      const { value, done } = await Promise.race([next, aborted]);
      if (done) return;
      yield value;
    } catch (error) {
      if (signal.aborted) {
        const known = message.response;
        delete message.response;
        if (known) forget(known, key);
        next.then(({ value }) => !known && value?.id && forget(value, key)).catch(() => null);
      }
      throw error;
    }
  }
}

function fill(message, { number, id, text, reasoning, call, finish, usage }, started, tell) {
  const isFirst = started !== null && message.ttft_ms === undefined && (text || reasoning || call);
  if (isFirst) message.ttft_ms = performance.now() - started;
  message.content += text ?? "";
  message.reasoning += reasoning ?? "";
  if (call) (message.calls ??= []).push(call);
  if (id) message.response = { id };
  message.response.number = number;
  if (usage) {
    const { input_tokens, output_tokens } = usage;
    message.num_tokens = input_tokens + output_tokens;
    const seconds = (performance.now() - started - message.ttft_ms) / 1000;
    if (output_tokens > 1 && started !== null) message.tokens_per_s = (output_tokens - 1) / seconds;
  }
  message.finish = finish ?? message.finish;
  tell(isFirst ? "Answering." : null);
}
