// Conversations, kept in this browser only.
import { create, readConversation } from "./conversation.js";

const KEY = "engine-core.conversations";
const SETTINGS = "engine-core.settings";
const MOST = 200;

function read(key, fallback) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

export class Store {
  constructor() {
    this.all = read(KEY, []).flatMap((each) => {
      try {
        return [readConversation(each)];
      } catch {
        return [];
      }
    });
    // Of the page: tools that are on, presets, and what a new conversation begins with.
    this.settings = { tools: [], presets: {}, ...read(SETTINGS, {}) };
    this.settings.first ??= {};
    for (const message of this.all.flatMap(({ messages }) => messages)) {
      if (message.role === "assistant" && !message.error && !message.response) message.finish ??= "left"; // it was being written
    }
  }

  add(conversation = create(this.settings.first)) {
    this.all.unshift(conversation);
    this.all.length = Math.min(this.all.length, MOST);
    return conversation;
  }

  // Returns what went wrong, if anything: the browser may refuse, or have no room left.
  save() {
    try {
      localStorage.setItem(KEY, JSON.stringify(this.all.filter((each) => each.messages.length)));
      localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
      return "";
    } catch (error) {
      return `Conversations are not kept: ${error.message}. Export them, and delete some.`;
    }
  }
}
