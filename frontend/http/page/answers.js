// The answers that are being written, at most one a conversation. Each goes on while another conversation is shown.
import { ApiError, chat } from "./api.js";

const MOST_ROUNDS = 16; // of calls, of one question

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

  stop(conversation, why = "stopped") {
    this.running.get(conversation)?.controller.abort(why);
  }

  leave() {
    for (const conversation of this.running.keys()) this.stop(conversation, "left");
  }

  // `next` appends a message to the conversation, and returns it with its request: one, and one more after each round of calls.
  async write(conversation, next, key) {
    const mine = { controller: new AbortController(), status: "" };
    const { signal } = mine.controller;
    this.running.set(conversation, mine);
    const tell = (status) => {
      mine.status = status ?? mine.status;
      this.grew(conversation, status);
    };
    let message;
    let result = ["The answer is complete.", false];
    try {
      for (let round = 0; ; round++) {
        let request;
        [message, request] = next();
        tell("Waiting for the first token.");
        await this.stream(message, request, key, signal, tell);
        if (message.finish !== "tool_calls") break;
        if (round === MOST_ROUNDS) throw new ApiError(`After ${MOST_ROUNDS} rounds of calls the model wants more; ask it to go on`);
        for (const call of message.calls) await this.tools.run(conversation, call, key, signal, tell);
      }
    } catch (error) {
      if (signal.aborted) {
        message.finish = signal.reason;
        result = ["Stopped.", false];
      } else {
        message.error = error instanceof ApiError ? error.message : `The server cannot be reached: ${error.message}`;
        result = ["The answer failed.", true];
      }
    }
    message.finish ??= "ended";
    this.running.delete(conversation);
    this.ended(conversation, ...result);
  }

  // Fills the message.
  async stream(message, request, key, signal, tell) {
    const started = performance.now();
    let usage = null;
    try {
      for await (const part of chat(request, key, signal)) {
        const isFirst = (part.text || part.reasoning || part.calls.length) && message.ttft_ms === undefined;
        if (isFirst) message.ttft_ms = performance.now() - started;
        message.content += part.text;
        message.reasoning += part.reasoning;
        for (const { index, id, function: called } of part.calls) {
          message.calls ??= [];
          message.calls[index] ??= { id, name: called.name, arguments: "" };
          message.calls[index].arguments += called.arguments ?? "";
        }
        message.finish = part.finish ?? message.finish;
        usage = part.usage ?? usage;
        tell(isFirst ? "Answering." : null);
      }
    } finally {
      const seconds = (performance.now() - started - (message.ttft_ms ?? 0)) / 1000;
      if (usage?.completion_tokens > 1) message.tokens_per_s = (usage.completion_tokens - 1) / seconds;
    }
  }
}
