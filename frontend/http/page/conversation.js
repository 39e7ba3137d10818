// A conversation is a tree: `parent` of a message is the index of the one before it (-1: none), `head` the last one shown.
// What Edit and Regenerate replace stays, as another version of the same place.

// From the first message to the last one shown.
export function path({ messages, head }) {
  const found = [];
  for (let at = head; at >= 0; at = messages[at].parent) found.push(messages[at]);
  return found.reverse();
}

// Appends behind the message of that index, shows it, and returns it.
export function append(conversation, message, parent = conversation.head) {
  conversation.head = conversation.messages.push({ ...message, parent }) - 1;
  return conversation.messages[conversation.head];
}

export function versions({ messages }, message) {
  return messages.filter(({ parent }) => parent === message.parent);
}

// Shows the message, and behind it the newest.
export function choose(conversation, message) {
  const { messages } = conversation;
  let at = messages.indexOf(message);
  for (let next = at; next >= 0; next = messages.findLastIndex(({ parent }) => parent === at)) at = next;
  conversation.head = at;
}

export function create(settings = {}) {
  const id = crypto.randomUUID?.() ?? String(Date.now() + Math.random());
  return { id, created: Date.now(), title: "New chat", settings: { ...settings }, messages: [], head: -1 };
}

export function contains({ title, messages }, text) {
  const wanted = text.toLowerCase();
  return [title, ...messages.map(({ content }) => content)].some((each) => each.toLowerCase().includes(wanted));
}

const isText = (value) => typeof value === "string";
const PICTURE = /^data:image\/(png|jpeg|webp|gif);base64,[\w+/=]*$/;
const TEXTS = ["model", "reasoning", "finish", "error"];
const NUMBERS = ["ttft_ms", "tokens_per_s", "num_tokens"];
export const SAMPLING = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
export const SETTINGS = ["model", "system", ...SAMPLING];

function kept(given, names, isKept) {
  return Object.fromEntries(names.filter((name) => isKept(given?.[name])).map((name) => [name, given[name]]));
}

// A conversation as it was kept or exported, by this page or an older one; a list of messages of OpenAI's form, too.
// Nothing but what the page knows is taken. Throws an Error that says what is wrong.
export function readConversation(given) {
  const messages = Array.isArray(given) ? given : given?.messages;
  if (!Array.isArray(messages)) throw new Error("there are no messages");
  const spoken = messages.filter((each) => each?.role !== "system");
  const system = messages.find((each) => each?.role === "system")?.content;
  const read = spoken.map((message, index) => {
    const { role, content, parent = index - 1, images = [], files = [], calls = [] } = message ?? {};
    if (role !== "user" && role !== "assistant") throw new Error(`message ${index + 1} is of role ${String(role).slice(0, 20)}, not user or assistant`);
    if (!isText(content)) throw new Error(`message ${index + 1} has no text`);
    if (!Number.isInteger(parent) || parent < -1 || parent >= index) throw new Error(`message ${index + 1} follows none before it`);
    return {
      ...{ role, content, parent },
      ...kept(message, TEXTS, isText),
      ...kept(message, NUMBERS, Number.isFinite),
      ...(isText(message.response?.id) && { response: kept(message.response, ["id", "number"], (value) => isText(value) || Number.isInteger(value)) }),
      ...(images.length && { images: images.filter((url) => PICTURE.test(url)) }),
      ...(files.length && { files: files.map(({ name, text }) => ({ name: String(name), text: String(text) })) }),
      ...(calls.length && { calls: calls.map(readCall) }),
    };
  });
  const { head } = given;
  return {
    ...create({ ...(isText(system) && { system }), ...kept(given.settings, SETTINGS, isText) }),
    ...kept(given, ["id"], isText),
    ...kept(given, ["created"], Number.isFinite),
    title: isText(given.title) ? given.title.slice(0, 200) : read[0]?.content.slice(0, 60) || "Imported",
    messages: read,
    head: Number.isInteger(head) && head >= -1 && head < read.length ? head : read.length - 1,
    ...(Array.isArray(given.allowed) && { allowed: given.allowed.filter(isText) }),
    ...(isText(given.news) && { news: given.news }),
  };
}

function readCall(call) {
  const result = call.result && { text: String(call.result.text), images: (call.result.images ?? []).filter((url) => PICTURE.test(url)) };
  return { ...kept(call, ["id", "name", "arguments", "title", "state"], isText), ...(result && { result }) };
}
