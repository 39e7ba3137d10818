// Conversations, kept in this browser only.
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
    this.all = read(KEY, []).filter((each) => Array.isArray(each.messages));
    this.settings = read(SETTINGS, {});
    for (const { messages } of this.all) {
      const last = messages.at(-1);
      if (last?.role === "assistant" && !last.error) last.finish ??= "left"; // it was being written
    }
  }

  create() {
    const made = { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "New chat", messages: [] };
    this.all.unshift(made);
    this.all.length = Math.min(this.all.length, MOST);
    return made;
  }

  // Returns what went wrong, if anything: the browser may refuse, or have no room left.
  save() {
    try {
      localStorage.setItem(KEY, JSON.stringify(this.all.filter((each) => each.messages.length)));
      localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
      return "";
    } catch (error) {
      return `Conversations are not kept: ${error.message}`;
    }
  }
}
