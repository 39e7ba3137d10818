// The chat: brings the parts of the page together.
import { Answers } from "./answers.js";
import { Attached } from "./attached.js";
import { append, choose, path, versions } from "./conversation.js";
import { element, find } from "./element.js";
import { List } from "./list.js";
import { messageElement, showAnswer } from "./messages.js";
import { requestOf } from "./request.js";
import { Settings } from "./settings.js";
import { listenForKeys } from "./shortcuts.js";
import { Store } from "./store.js";
import { Tools } from "./tools.js";
import { asJson, asMarkdown, download, imported } from "./transfer.js";

const EXAMPLES = [
  "Explain what a KV cache is, in three sentences.",
  "Write a Python function that says whether a number is prime.",
  "Suggest five names for a small bakery.",
  "What is the derivative of $x^2 \\sin x$, step by step?",
];
const SHOWN_MS = 4000;
const store = new Store(
  (conversation) => answers.status(conversation) !== undefined,
  (conversation) => {
    list.show();
    if (conversation === current) showMessages();
  },
);
let current = null;
let editing = null; // the question that the next message is another version of
let passing = 0;

// An error stays; other news gives way to what is still true.
function say(text, isBad = false) {
  clearTimeout(passing);
  if (find("status").textContent !== text) find("status").textContent = text;
  find("status").classList.toggle("error", isBad);
  if (text && !isBad) passing = setTimeout(() => say(answers.status(current) ?? ""), SHOWN_MS);
}

function save() {
  const problem = store.save();
  if (problem) say(problem, true);
}

const takesPictures = () => settings.pictured.get(find("model").value) !== false;
const attached = new Attached(find("attached"), say, takesPictures);
const tools = new Tools(find("tools"), store.settings.tools, (chosen) => {
  store.settings.tools = chosen;
  save();
});
const answers = new Answers(tools, grew, ended);
const settings = new Settings(store, say, () => {
  save();
  showHead();
});
const list = new List(store, {
  isAnswering: (conversation) => answers.status(conversation) !== undefined,
  open,
  remove(conversation) {
    answers.stop(conversation);
    save();
    if (conversation === current) show(store.all[0] ?? store.add());
    else list.show();
  },
  restore(conversation, index) {
    store.all.splice(index, 0, conversation);
    save();
    open(conversation);
  },
});

// ---------------------------------------------------------------- what is shown

function show(conversation) {
  current = conversation;
  delete conversation.news;
  edit(null);
  list.show(current);
  settings.show(current); // saves
  showMessages();
  say(answers.status(current) ?? "");
}

function open(conversation) {
  if (!conversation) return;
  const text = list.searched.toLowerCase();
  const isFound = ({ content }) => content.toLowerCase().includes(text);
  if (text && !path(conversation).some(isFound) && !answers.status(conversation)) {
    const hidden = conversation.messages.find(isFound);
    if (hidden) choose(conversation, hidden);
  }
  show(conversation);
  list.toggle(false);
  focusPrompt();
  if (text) find("messages").children[path(current).findIndex(isFound)]?.scrollIntoView();
}

// Title, context and buttons.
function showHead() {
  if (!current) return;
  find("chat-head").hidden = !current.messages.length;
  if (document.activeElement !== find("title")) find("title").value = current.title;
  const used = path(current).findLast(({ num_tokens }) => num_tokens)?.num_tokens;
  const length = settings.lengths.get(find("model").value);
  find("context").hidden = !used || !length;
  if (used && length) {
    find("context-meter").value = Math.min(1, used / length);
    find("context-text").textContent = `${used.toLocaleString("en")} of ${length.toLocaleString("en")} tokens`;
  }
  const isAnswering = answers.status(current) !== undefined;
  find("send").textContent = isAnswering ? "Stop" : "Send";
  find("attach").title = takesPictures() ? "Pictures and text files" : "Text files";
}

function showMessages() {
  const act = { edit, regenerate, choose: chooseVersion };
  const shown = path(current).map((message) => messageElement(message, versions(current, message), act));
  find("messages").replaceChildren(...(shown.length ? shown : [welcome()]));
  showHead();
  scrollToEnd();
}

function welcome() {
  const button = (textContent) => element("button", { type: "button", className: "plain", textContent, onclick: () => ask(textContent) });
  return element("div", { className: "empty" }, element("p", { textContent: "Ask something. Chats stay in this browser." }), ...EXAMPLES.map(button));
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

function chooseVersion(message) {
  if (!isFree()) return;
  const { scrollTop } = find("messages");
  const pressed = document.activeElement.ariaLabel;
  choose(current, message);
  save();
  showMessages();
  find("messages").scrollTop = scrollTop;
  const buttons = [...find("messages").children[path(current).indexOf(message)].querySelectorAll(".versions button:enabled")];
  (buttons.find(({ ariaLabel }) => ariaLabel === pressed) ?? buttons[0])?.focus();
}

// ---------------------------------------------------------------- a question

// null ends it.
function edit(message) {
  if (message && !isFree()) return;
  const wasEditing = editing;
  editing = message;
  find("editing").hidden = !message;
  if (!message && !wasEditing) return;
  find("prompt").value = message?.content ?? "";
  attached.set(message ?? {});
  grow();
  find("prompt").focus();
}

function focusPrompt() {
  if (!matchMedia("(pointer: coarse)").matches) find("prompt").focus(); // a phone's keyboard would cover the answer
}

function regenerate(message) {
  if (!isFree() || !settings.areValid()) return;
  focusPrompt();
  current.head = message.parent;
  answer();
}

function submit(event) {
  event.preventDefault();
  if (answers.status(current)) {
    if (event.type === "submit") answers.stop(current);
    else isFree();
    return;
  }
  ask(find("prompt").value.trim());
}

function ask(text) {
  if (!settings.areValid() || (!text && !attached.all.length)) return;
  const unfinished = current.messages.find(({ response }) => response);
  if (unfinished) return answer(current, unfinished); // which another tab has begun
  const message = { role: "user", content: text, ...attached.take() };
  if (!current.messages.length) current.title = text.slice(0, 60) || message.files?.[0].name || "A picture";
  append(current, message, editing?.parent);
  find("prompt").value = "";
  editing = null;
  find("editing").hidden = true;
  grow();
  focusPrompt();
  answer();
}

function grow() {
  const box = find("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

// ---------------------------------------------------------------- an answer

let drawing = 0;

function answer(conversation = current, resumed = null) {
  const fixed = conversation === current ? settings.current : conversation.settings;
  const request = (messages) => ({ ...requestOf(messages, fixed), ...tools.offered });
  answers.write(conversation, fixed.model, request, find("key").value, resumed);
  if (conversation === current) {
    list.show();
    showMessages();
  }
  save();
}

function grew(conversation, status) {
  if (status) save(); // with the response's id, by which it is read on
  if (conversation !== current) return;
  if (status) say(status);
  drawing ||= requestAnimationFrame(draw);
}

function draw() {
  drawing = 0;
  if (!answers.status(current)) return;
  const follows = isAtEnd();
  const shown = path(current);
  if (find("messages").children.length !== shown.length) showMessages();
  showAnswer(find("messages").lastElementChild.querySelector(".body"), shown.at(-1));
  if (follows) scrollToEnd();
}

function ended(conversation, text, isBad) {
  settings.learn(find("model").value);
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
  list.show();
}

// ---------------------------------------------------------------- files

function takeFiles(event, transfer) {
  const files = [...(transfer?.files ?? [])];
  if (!files.length) return;
  event.preventDefault();
  attached.add(files);
}

async function importFiles(files) {
  for (const file of files) {
    try {
      const all = imported(await file.text());
      for (const each of all.reverse()) store.add(each);
      open(store.all[0]);
      say(`${file.name}: ${all.length} ${all.length === 1 ? "chat is" : "chats are"} here.`);
    } catch (error) {
      say(`${file.name} was not imported: ${error.message}.`, true);
    }
  }
}

const chosen = (id, take) => {
  find(id).onchange = async (event) => {
    await take([...event.target.files]);
    event.target.value = "";
  };
};
chosen("files-chosen", (files) => attached.add(files));
chosen("import-chosen", importFiles);
find("attach").onclick = () => find("files-chosen").click();
find("import").onclick = () => find("import-chosen").click();
find("export-markdown").onclick = () => download(`${current.title}.md`, asMarkdown(current), "text/markdown");
find("export-json").onclick = () => download(`${current.title}.json`, asJson([current]), "application/json");
find("export-all").onclick = () => download("chats.json", asJson(store.all.filter(({ messages }) => messages.length)), "application/json");
find("prompt").addEventListener("paste", (event) => takeFiles(event, event.clipboardData));
document.querySelector("main").addEventListener("drop", (event) => takeFiles(event, event.dataTransfer));
document.querySelector("main").addEventListener("dragover", (event) => {
  if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
});

// ---------------------------------------------------------------- keys and start

const create = () => open(store.all.find((each) => !each.messages.length) ?? store.add());
listenForKeys({
  create,
  search: () => (list.toggle(true), find("search").focus()),
  above: () => open(list.neighbour(-1)),
  below: () => open(list.neighbour(1)),
  rename: () => find("title").select(),
  stop() {
    if (!editing && !answers.status(current)) return false; // Esc closes the menu, too
    if (editing) edit(null);
    else answers.stop(current);
  },
  editLast() {
    const last = path(current).findLast(({ role }) => role === "user");
    if (find("prompt").value || !last) return false;
    edit(last);
  },
});
find("new").onclick = create;
find("cancel-edit").onclick = () => edit(null);
find("title").addEventListener("change", () => {
  current.title = find("title").value.trim() || "New chat";
  save();
  list.show();
});
find("composer").addEventListener("submit", submit);
find("prompt").addEventListener("input", grow);
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
const loadTools = () => tools.load(find("key").value).catch((error) => say(`No tools: ${error.message}`, true));
find("toggle-settings").addEventListener("click", loadTools);

async function start() {
  if (!(await settings.loadModels())) return; // the server wants a key, or is away
  loadTools();
  for (const conversation of store.all) {
    const last = conversation.messages.find(({ response }) => response);
    if (last && !answers.status(conversation)) answer(conversation, last);
  }
}
find("key").addEventListener("change", start);
addEventListener("pagehide", save); // what has come of the answers; the server writes them on
open(store.all[0] ?? store.add());
start();
