// Tools that the server runs: which of them a model may see, and what it may do with them. None runs unasked.
import { callTool, listToolServers } from "./api.js";
import { pictureUrl } from "./attached.js";
import { element } from "./element.js";

const STATES = { waiting: "waits for you", running: "runs", done: "done", failed: "failed", refused: "refused", left: "not run" };
const ANSWERS = { once: "Allow once", always: "Allow in this conversation", refuse: "Refuse" };
const REFUSED = "The user refused this call. Do not try it again: go on without it, or ask.";
const running = new WeakSet(); // calls

export class Tools {
  // `box` gets the switches; `chosen` are names of tools that are on; `changed` is told when they change.
  constructor(box, chosen, changed) {
    this.known = new Map();
    this.chosen = new Set(chosen);
    Object.assign(this, { box, changed });
  }

  async load(key) {
    const servers = await listToolServers(key);
    this.known = new Map(servers.flatMap((server) => server.tools.map((tool) => [tool.name, { ...tool, server: server.name }])));
    this.box.hidden = !servers.length;
    this.box.replaceChildren(element("legend", { textContent: "Tools that the server runs" }), ...servers.map((each) => this.switches(each)));
  }

  switches({ name, problem, tools }) {
    const isOn = (tool) => this.chosen.has(tool.name);
    const boxes = tools.map((tool) => {
      const box = element("input", { type: "checkbox", checked: isOn(tool) });
      box.onchange = () => this.choose(tool.name, box.checked);
      return element("label", { title: tool.description }, box, element("b", { textContent: tool.tool }), tool.description.split("\n")[0]);
    });
    const summary = element("summary", { textContent: `${name}: ${problem ?? `${tools.length} tools`}` });
    return element("details", { open: tools.some(isOn) }, summary, ...boxes);
  }

  choose(name, isOn) {
    this.chosen[isOn ? "add" : "delete"](name);
    this.changed([...this.chosen]);
  }

  // Fields of a request: the tools that are on, and there.
  get offered() {
    const on = [...this.known.values()].filter(({ name }) => this.chosen.has(name));
    const tools = on.map(({ name, description, parameters }) => ({ type: "function", name, description, parameters, strict: false }));
    return tools.length ? { tools } : {};
  }

  // Asks, unless the tool is allowed in the conversation, and fills in the result. `tell` gets each new status.
  async run(conversation, call, key, signal, tell) {
    const end = (state, text, images = []) => Object.assign(call, { state, result: { text, images } });
    const tool = this.known.get(call.name);
    if (!tool || !this.chosen.has(call.name)) return end("failed", `There is no tool ${call.name}.`);
    call.title = `${tool.server}: ${tool.tool}`;
    const given = parsed(call.arguments);
    if (!given) return end("failed", "The arguments are not JSON.");
    if (!conversation.allowed?.includes(call.name)) {
      const decided = decision(call, signal);
      tell(`The model wants to run ${call.title}. Allow it?`);
      const answer = await decided;
      if (answer === "refuse") return end("refused", REFUSED);
      if (answer === "always") (conversation.allowed ??= []).push(call.name);
    }
    running.add(call);
    tell(`${call.title} runs.`);
    try {
      const { is_error, text, images } = await callTool(tool.server, tool.tool, given, key, signal);
      return end(is_error ? "failed" : "done", text, await Promise.all(images.map(smaller)));
    } catch (error) {
      if (signal.aborted) throw error;
      return end("failed", error.message);
    } finally {
      running.delete(call);
    }
  }
}

export function parsed(text) {
  try {
    return JSON.parse(text || "{}");
  } catch {
    return null;
  }
}

function decision(call, signal) {
  return new Promise((resolve, reject) => {
    call.decide = resolve; // a function: it is not kept with the conversation
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  }).finally(() => delete call.decide);
}

// Conversations must fit where the browser keeps them.
async function smaller({ data, mime_type }) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  return pictureUrl(new Blob([bytes], { type: mime_type })).catch(() => "");
}

export function stateOf(call) {
  return call.state ?? (call.decide ? "waiting" : running.has(call) ? "running" : "left");
}

// A call, with its result or the question whether it may run. All of it is foreign text.
export function callElement(call) {
  const state = stateOf(call);
  const made = element("details", { className: `call ${state}`, open: state === "waiting" });
  made.append(element("summary", { textContent: `${call.title ?? call.name} (${STATES[state]})` }), ...block("Arguments", call.arguments || "{}"));
  if (call.result) made.append(...block("Result", call.result.text));
  for (const url of call.result?.images ?? []) if (url) made.append(element("img", { src: url, alt: `Picture of ${call.title}`, className: "thumbnail" }));
  if (state !== "waiting") return made;
  const button = ([answer, textContent]) => element("button", { type: "button", textContent, className: answer === "once" ? "" : "plain", onclick: () => call.decide?.(answer) });
  made.append(element("p", { className: "answers" }, ...Object.entries(ANSWERS).map(button)));
  return made;
}

function block(name, text) {
  return [element("h3", { textContent: name }), element("pre", { textContent: text, tabIndex: 0 })];
}
