// The chat: what is on the page, and what its buttons do.
import { ApiError, chat, listModels } from "./api.js";
import { Attached, content, thumbnail } from "./attached.js";
import { Store } from "./store.js";

const find = (id) => document.getElementById(id);
const store = new Store();
const SAMPLING = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
let current = null;
let running = null; // of the answer that is written

function element(tag, fields = {}, ...children) {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children);
  return made;
}

// A model's answer is foreign text: nothing of it but formatting reaches the page.
function formatted(text) {
  const html = DOMPurify.sanitize(marked.parse(text, { breaks: true }), {
    FORBID_TAGS: ["style", "img", "form", "input", "button", "svg", "math", "video", "audio"],
    FORBID_ATTR: ["style", "class", "id"],
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of html.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noreferrer noopener" });
  for (const code of html.querySelectorAll("pre")) code.tabIndex = 0;
  return html;
}

function say(text, isBad = false) {
  find("status").textContent = text;
  find("status").classList.toggle("error", isBad);
}

const attached = new Attached(find("attached"), say);

function save() {
  const problem = store.save();
  if (problem) say(problem, true);
}

// ---------------------------------------------------------------- the list of conversations

function showList() {
  find("conversations").replaceChildren(
    ...store.all.map((each) => {
      const item = element(
        "li",
        {},
        element("button", { textContent: each.title, onclick: () => open(each) }),
        element("button", { className: "delete", textContent: "×", ariaLabel: `Delete ${each.title}`, onclick: () => remove(each) }),
      );
      if (each === current) item.setAttribute("aria-current", "true");
      return item;
    }),
  );
}

function open(conversation) {
  running?.abort();
  current = conversation;
  showList();
  showMessages();
  toggleList(false);
  find("prompt").focus();
}

function remove(conversation) {
  store.remove(conversation);
  if (conversation === current) open(store.all[0] ?? store.create());
  else showList();
}

function toggleList(isOpen) {
  find("list").classList.toggle("open", isOpen);
  find("toggle-list").setAttribute("aria-expanded", isOpen);
}

// ---------------------------------------------------------------- messages

function showMessages() {
  const shown = current.messages.map(messageElement);
  if (!shown.length) shown.push(element("p", { className: "empty", textContent: "Conversations stay in this browser." }));
  find("messages").replaceChildren(...shown);
  scrollToEnd();
}

function messageElement(message, index) {
  const isUser = message.role === "user";
  const body = element("div", { className: "body" });
  const under = element("div", { className: "under" });
  const made = element("article", { className: `message ${message.role}` }, element("h2", { textContent: isUser ? "You" : message.model || "Model" }), body, under);
  fill(body, message);
  under.append(...notes(message));
  const button = (text, onclick) => under.append(element("button", { type: "button", textContent: text, onclick }));
  button("Copy", () => navigator.clipboard?.writeText(message.content).then(() => say("Copied."), () => say("The browser does not allow copying.", true)));
  if (isUser) button("Edit", () => edit(index));
  else button("Retry", () => retry(index));
  return made;
}

function fill(body, message) {
  if (message.role === "user") {
    const shown = (message.images ?? []).map((url, index) => thumbnail(url, `Picture ${index + 1}`));
    body.replaceChildren(...shown, message.content);
    return;
  }
  const parts = [];
  if (message.reasoning) {
    const details = element("details", { open: !message.content }, element("summary", { textContent: "Reasoning" }), formatted(message.reasoning));
    parts.push(details);
  }
  parts.push(formatted(message.content));
  if (message.error) parts.push(element("p", { className: "error", textContent: message.error }));
  body.replaceChildren(...parts);
}

function notes(message) {
  const parts = [];
  if (message.ttft_ms !== undefined) parts.push(`first token after ${Math.round(message.ttft_ms)} ms`);
  if (message.tokens_per_s) parts.push(`${message.tokens_per_s.toFixed(1)} tokens/s`);
  if (message.finish === "length") parts.push("cut at the limit of tokens");
  if (message.finish === "stopped") parts.push("stopped");
  return parts.length ? [element("span", { textContent: parts.join(" · ") })] : [];
}

function scrollToEnd() {
  find("messages").scrollTop = find("messages").scrollHeight;
}

function isAtEnd() {
  const box = find("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function edit(index) {
  if (running) return;
  find("prompt").value = current.messages[index].content;
  attached.set(current.messages[index].images ?? []);
  current.messages.length = index;
  changed();
  find("prompt").focus();
  grow();
}

function retry(index) {
  if (running) return;
  current.messages.length = index;
  changed();
  answer();
}

function changed() {
  save();
  showList();
  showMessages();
}

// ---------------------------------------------------------------- an answer

async function answer() {
  const conversation = current;
  const message = { role: "assistant", model: find("model").value, content: "", reasoning: "" };
  const messages = conversation.messages.map((each) => ({ role: each.role, content: content(each) }));
  if (find("system").value.trim()) messages.unshift({ role: "system", content: find("system").value });
  conversation.messages.push(message);
  showMessages();
  const body = find("messages").lastElementChild.querySelector(".body");
  running = new AbortController();
  find("send").textContent = "Stop";
  say("Waiting for the first token.");
  const started = performance.now();
  let usage = null;
  let drawing = 0;
  const draw = () => {
    drawing = 0;
    const follows = isAtEnd();
    fill(body, message);
    if (follows) scrollToEnd();
  };
  try {
    for await (const part of chat({ model: message.model || undefined, messages, ...sampling() }, find("key").value, running.signal)) {
      if ((part.text || part.reasoning) && message.ttft_ms === undefined) {
        message.ttft_ms = performance.now() - started;
        say("Answering.");
      }
      message.content += part.text;
      message.reasoning += part.reasoning;
      message.finish = part.finish ?? message.finish;
      usage = part.usage ?? usage;
      drawing ||= requestAnimationFrame(draw);
    }
    say("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") {
      message.finish = "stopped";
      say("Stopped.");
    } else {
      message.error = error instanceof ApiError ? error.message : `The server cannot be reached: ${error.message}`;
      say("The answer failed.", true);
    }
  }
  cancelAnimationFrame(drawing);
  const seconds = (performance.now() - started - (message.ttft_ms ?? 0)) / 1000;
  if (usage?.completion_tokens > 1) message.tokens_per_s = (usage.completion_tokens - 1) / seconds;
  running = null;
  find("send").textContent = "Send";
  save();
  if (conversation === current) showMessages();
}

function sampling() {
  const given = {};
  for (const name of SAMPLING) {
    if (find(name).value !== "") given[name] = Number(find(name).value);
  }
  return given;
}

function submit(event) {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = find("prompt").value.trim();
  const images = attached.take();
  if (!text && !images.length) return;
  if (!current.messages.length) current.title = text.slice(0, 60) || "A picture";
  current.messages.push({ role: "user", content: text, ...(images.length && { images }) });
  find("prompt").value = "";
  grow();
  changed();
  answer();
}

function grow() {
  const box = find("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

// ---------------------------------------------------------------- start

async function showModels() {
  try {
    const models = await listModels(find("key").value);
    find("model").replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === store.settings.model)));
    say("");
  } catch (error) {
    say(`No models: ${error.message}`, true);
  }
}

for (const name of ["system", ...SAMPLING]) {
  find(name).value = store.settings[name] ?? "";
  find(name).addEventListener("change", () => {
    store.settings[name] = find(name).value;
    save();
  });
}
find("model").addEventListener("change", () => {
  store.settings.model = find("model").value;
  save();
});
find("key").addEventListener("change", showModels);
find("new").onclick = () => open(store.all.find((each) => !each.messages.length) ?? store.create());
find("toggle-list").onclick = () => toggleList(!find("list").classList.contains("open"));
find("toggle-settings").onclick = () => {
  find("settings").hidden = !find("settings").hidden;
  find("toggle-settings").setAttribute("aria-expanded", !find("settings").hidden);
};
find("composer").addEventListener("submit", submit);
find("prompt").addEventListener("input", grow);
find("add-picture").onclick = () => find("pictures-chosen").click();
find("pictures-chosen").onchange = (event) => {
  attached.add([...event.target.files]);
  event.target.value = "";
};
function takeFiles(event, transfer) {
  const files = [...(transfer?.files ?? [])];
  if (!files.length) return;
  event.preventDefault();
  attached.add(files);
}
find("prompt").addEventListener("paste", (event) => takeFiles(event, event.clipboardData));
document.querySelector("main").addEventListener("drop", (event) => takeFiles(event, event.dataTransfer));
document.querySelector("main").addEventListener("dragover", (event) => {
  if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
showModels();
open(store.all[0] ?? store.create());
