// The answers that are being written, at most one a conversation. Each goes on while another conversation is shown.
import { ApiError, chat } from "./api.js";

export class Answers {
  // `grew(conversation, status)` is called after each part, with a status that is new; `ended(conversation, text, isBad)`
  // with what became of it.
  constructor(grew, ended) {
    this.running = new Map();
    Object.assign(this, { grew, ended });
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

  // Fills `message`, the conversation's last one.
  async write(conversation, message, request, key) {
    const mine = { controller: new AbortController(), status: "Waiting for the first token." };
    this.running.set(conversation, mine);
    const started = performance.now();
    let usage = null;
    let result = ["The answer is complete.", false];
    try {
      for await (const part of chat(request, key, mine.controller.signal)) {
        const isFirst = (part.text || part.reasoning) && message.ttft_ms === undefined;
        if (isFirst) {
          message.ttft_ms = performance.now() - started;
          mine.status = "Answering.";
        }
        message.content += part.text;
        message.reasoning += part.reasoning;
        message.finish = part.finish ?? message.finish;
        usage = part.usage ?? usage;
        this.grew(conversation, isFirst ? mine.status : null);
      }
    } catch (error) {
      const { aborted, reason } = mine.controller.signal;
      if (aborted) {
        message.finish = reason;
        result = ["Stopped.", false];
      } else {
        message.error = error instanceof ApiError ? error.message : `The server cannot be reached: ${error.message}`;
        result = ["The answer failed.", true];
      }
    }
    message.finish ??= "ended";
    const seconds = (performance.now() - started - (message.ttft_ms ?? 0)) / 1000;
    if (usage?.completion_tokens > 1) message.tokens_per_s = (usage.completion_tokens - 1) / seconds;
    this.running.delete(conversation);
    this.ended(conversation, ...result);
  }
}
