// The chat: what is on the page, and what its buttons do.
import { Answers } from "./answers.js";
import { listModels, takesPictures } from "./api.js";
import { Attached, content, thumbnail } from "./attached.js";
import { element } from "./element.js";
import { Store } from "./store.js";
import { Tools, callElement, sentCalls } from "./tools.js";

const find = (id) => document.getElementById(id);
const store = new Store();
const SAMPLING = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const MARKS = { answering: "answering", new: "new answer", failed: "answer failed" };
const SHOWN_MS = 4000;
let current = null;
let passing = 0;

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

// An error stays; other news gives way to what is still true.
function say(text, isBad = false) {
  clearTimeout(passing);
  if (find("status").textContent !== text) find("status").textContent = text;
  find("status").classList.toggle("error", isBad);
  if (text && !isBad) passing = setTimeout(() => say(answers.status(current) ?? ""), SHOWN_MS);
}

const attached = new Attached(find("attached"), say);

function save() {
  const problem = store.save();
  if (problem) say(problem, true);
}

// ---------------------------------------------------------------- the list of conversations

function showList() {
  const buttons = () => [...find("conversations").querySelectorAll("button")];
  const focused = buttons().indexOf(document.activeElement);
  find("conversations").replaceChildren(
    ...store.all.map((each) => {
      const item = element(
        "li",
        {},
        element("button", { onclick: () => open(each) }, ...mark(each), each.title),
        element("button", { className: "delete", textContent: "×", ariaLabel: `Delete ${each.title}`, onclick: () => remove(each) }),
      );
      if (each === current) item.setAttribute("aria-current", "true");
      return item;
    }),
  );
  buttons()[focused]?.focus();
  const others = store.all.filter((each) => each !== current);
  find("toggle-list").replaceChildren(...mark(others.find((each) => each.news) ?? others.find((each) => answers.status(each))), "Chats");
  find("undo").hidden = !removed.length;
  find("undo").textContent = `Undo: bring back “${removed.at(-1)?.[0].title}”`;
  find("send").textContent = answers.status(current) ? "Stop" : "Send";
}

function mark(conversation) {
  const kind = conversation && (answers.status(conversation) ? "answering" : conversation.news);
  return kind ? [element("span", { className: `mark ${kind}`, title: MARKS[kind] }), element("span", { className: "hidden", textContent: `${MARKS[kind]}: ` })] : [];
}

function show(conversation) {
  current = conversation;
  if (conversation.news) {
    delete conversation.news;
    save();
  }
  showList();
  showMessages();
  say(answers.status(conversation) ?? "");
}

function open(conversation) {
  show(conversation);
  toggleList(false);
  find("prompt").focus();
}

const removed = []; // [conversation, where it was], to be undone

function remove(conversation) {
  answers.stop(conversation);
  const index = store.all.indexOf(conversation);
  if (conversation.messages.length) removed.push([conversation, index]);
  store.all.splice(index, 1);
  save();
  if (conversation === current) show(store.all[0] ?? store.create());
  else showList();
  find(removed.length ? "undo" : "prompt").focus();
}

function undo() {
  const [conversation, index] = removed.pop();
  store.all.splice(index, 0, conversation);
  save();
  open(conversation);
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
  parts.push(...(message.calls ?? []).map(callElement));
  if (message.error) parts.push(element("p", { className: "error", textContent: message.error }));
  body.replaceChildren(...parts);
}

function notes(message) {
  const parts = [];
  if (message.ttft_ms !== undefined) parts.push(`first token after ${Math.round(message.ttft_ms)} ms`);
  if (message.tokens_per_s) parts.push(`${message.tokens_per_s.toFixed(1)} tokens/s`);
  if (message.finish === "length") parts.push("cut at the limit of tokens");
  if (message.finish === "stopped") parts.push("stopped");
  if (message.finish === "left") parts.push("ended as the page was left");
  return parts.length ? [element("span", { textContent: parts.join(" · ") })] : [];
}

function scrollToEnd() {
  find("messages").scrollTop = find("messages").scrollHeight;
}

function isAtEnd() {
  const box = find("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function isFree() {
  if (answers.status(current)) say("An answer is being written; stop it first (Esc).");
  return !answers.status(current);
}

// As it was, it can be brought back beside what becomes of it.
function cut(index) {
  removed.push([{ ...current, messages: [...current.messages] }, store.all.indexOf(current) + 1]);
  current.messages.length = index;
}

function edit(index) {
  if (!isFree()) return;
  find("prompt").value = current.messages[index].content;
  attached.set(current.messages[index].images ?? []);
  cut(index);
  save();
  show(current);
  find("prompt").focus();
  grow();
}

function retry(index) {
  if (!isFree() || !areSettingsValid()) return;
  cut(index);
  answer();
}

// ---------------------------------------------------------------- an answer

const tools = new Tools(find("tools"), store.settings.tools ?? [], (chosen) => {
  store.settings.tools = chosen;
  save();
});
const answers = new Answers(tools, grew, ended);
let drawing = 0;

function answer() {
  const conversation = current;
  const fixed = { model: find("model").value || undefined, ...sampling(), ...tools.offered };
  const system = find("system").value;
  const next = () => {
    const messages = conversation.messages.flatMap(sent);
    if (system.trim()) messages.unshift({ role: "system", content: system });
    const message = { role: "assistant", model: fixed.model ?? "", content: "", reasoning: "" };
    conversation.messages.push(message);
    return [message, { ...fixed, messages }];
  };
  answers.write(conversation, next, find("key").value);
  save();
  show(conversation);
}

function sent(message) {
  const { role, calls } = message;
  if (!calls?.length) return [{ role, content: content(message) }];
  const [tool_calls, results] = sentCalls(calls);
  return [{ role, content: message.content, tool_calls }, ...results];
}

function grew(conversation, status) {
  if (conversation !== current) return;
  if (status) say(status);
  drawing ||= requestAnimationFrame(draw);
}

function draw() {
  drawing = 0;
  if (!answers.status(current)) return;
  const follows = isAtEnd();
  if (find("messages").children.length !== current.messages.length) showMessages();
  fill(find("messages").lastElementChild.querySelector(".body"), current.messages.at(-1));
  if (follows) scrollToEnd();
}

function ended(conversation, text, isBad) {
  showModelsPictures();
  if (!store.all.includes(conversation)) return;
  if (conversation === current) {
    const top = isAtEnd() ? Infinity : find("messages").scrollTop;
    showMessages();
    find("messages").scrollTop = Math.min(top, find("messages").scrollHeight);
    say(text, isBad);
  } else {
    conversation.news = isBad ? "failed" : "new";
    say(`“${conversation.title}”: ${text}`, isBad);
  }
  save();
  showList();
}

function sampling() {
  const given = {};
  for (const name of SAMPLING) {
    if (find(name).value !== "") given[name] = Number(find(name).value);
  }
  return given;
}

// Says of the first that is not what it must be; `shows` it, too.
function areSettingsValid(shows = true) {
  const isWrong = ({ validity, step }) => validity.badInput || validity.rangeUnderflow || validity.rangeOverflow || (step === "1" && validity.stepMismatch);
  const fields = SAMPLING.map(find);
  for (const field of fields) field.ariaInvalid = isWrong(field);
  const wrong = fields.find(isWrong);
  if (!wrong) return true;
  const { value, min, max, step, labels } = wrong;
  const wanted = `a ${step === "1" ? "whole number" : "number"} ${max ? `from ${min} to ${max}` : `of at least ${min}`}`;
  say(`${labels[0].textContent.trim()} is ${value || "not a number"}; give ${wanted}, or nothing.`, true);
  if (shows) toggleSettings(true);
  if (shows) wrong.focus();
  return false;
}

function submit(event) {
  event.preventDefault();
  if (answers.status(current)) {
    if (event.type === "submit") answers.stop(current);
    else isFree();
    return;
  }
  if (!areSettingsValid()) return;
  const text = find("prompt").value.trim();
  const images = attached.take();
  if (!text && !images.length) return;
  if (!current.messages.length) current.title = text.slice(0, 60) || "A picture";
  current.messages.push({ role: "user", content: text, ...(images.length && { images }) });
  find("prompt").value = "";
  grow();
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
    loadTools();
    showModelsPictures();
  } catch (error) {
    say(`No models: ${error.message}`, true);
  }
}

function loadTools() {
  tools.load(find("key").value).catch((error) => say(`No tools: ${error.message}`, true));
}

const pictured = new Map(); // from a model's name to whether it takes pictures, where that is known

async function showModelsPictures() {
  const model = find("model").value;
  if (!pictured.has(model)) {
    const taken = await takesPictures(model, find("key").value).catch(() => null);
    if (taken !== null) pictured.set(model, taken);
  }
  find("add-picture").hidden = pictured.get(find("model").value) === false;
}

for (const name of ["system", ...SAMPLING]) {
  find(name).value = store.settings[name] ?? "";
  find(name).addEventListener("change", () => {
    store.settings[name] = find(name).value;
    save();
    if (areSettingsValid(false)) say(answers.status(current) ?? "");
  });
}
find("model").addEventListener("change", () => {
  store.settings.model = find("model").value;
  save();
  showModelsPictures();
});
find("key").addEventListener("change", showModels);
find("new").onclick = () => open(store.all.find((each) => !each.messages.length) ?? store.create());
find("toggle-list").onclick = () => toggleList(!find("list").classList.contains("open"));
function toggleSettings(isOpen) {
  if (isOpen) loadTools();
  find("settings").hidden = !isOpen;
  find("toggle-settings").setAttribute("aria-expanded", isOpen);
}
find("toggle-settings").onclick = () => toggleSettings(find("settings").hidden);
find("undo").onclick = undo;
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
  if (find("add-picture").hidden) say(`${find("model").value} takes no pictures.`, true);
  else attached.add(files);
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
  if (event.key === "Escape") answers.stop(current);
});
addEventListener("pagehide", () => {
  answers.leave();
  save(); // what has come of them
});
showModels();
open(store.all[0] ?? store.create());
