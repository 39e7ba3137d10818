// Chats, kept in this browser only: a key for each, so that several tabs do not overwrite each other's.
import { create, readConversation } from "./conversation.js";

const CHAT = "engine-core.chat.";
const SETTINGS = "engine-core.settings";
const MOST = 200;

// null: it is none.
function parsed(text) {
  try {
    return readConversation(JSON.parse(text));
  } catch {
    return null;
  }
}

function readAll() {
  try {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(CHAT));
    return keys.map((key) => parsed(localStorage.getItem(key))).filter(Boolean);
  } catch {
    return []; // the browser keeps nothing
  }
}

function readSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

export class Store {
  // What another tab writes is taken, unless `isKept(conversation)`; then `show(conversation)` is called.
  constructor(isKept, show) {
    this.all = readAll().sort((one, other) => other.created - one.created);
    this.written = new Map(this.all.map((each) => [each.id, JSON.stringify(each)]));
    // Of the page: tools that are on, presets, and what a new chat begins with.
    this.settings = { tools: [], presets: {}, first: {}, ...readSettings() };
    for (const message of this.all.flatMap(({ messages }) => messages)) {
      if (message.role === "assistant" && !message.error && !message.response) message.finish ??= "left"; // it was being written
    }
    addEventListener("storage", ({ key, newValue }) => {
      const read = key?.startsWith(CHAT) && newValue && parsed(newValue);
      if (read) this.take(read, isKept, show);
    });
  }

  take(read, isKept, show) {
    const known = this.all.find(({ id }) => id === read.id);
    if (known && isKept(known)) return;
    const taken = known ? Object.assign(known, read) : read;
    if (!known) this.all.unshift(read);
    this.written.set(read.id, JSON.stringify(taken));
    show(taken);
  }

  add(conversation = create(this.settings.first)) {
    this.all.unshift(conversation);
    this.all.length = Math.min(this.all.length, MOST);
    return conversation;
  }

  // Returns what went wrong, if anything: the browser may refuse, or have no room left.
  save() {
    try {
      const now = new Map(this.all.filter(({ messages }) => messages.length).map((each) => [each.id, JSON.stringify(each)]));
      for (const id of this.written.keys()) if (!now.has(id)) localStorage.removeItem(CHAT + id);
      for (const [id, text] of now) if (this.written.get(id) !== text) localStorage.setItem(CHAT + id, text);
      this.written = now;
      localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
      return "";
    } catch (error) {
      return `Chats are not kept: ${error.message}. Export them, and delete some.`;
    }
  }
}
