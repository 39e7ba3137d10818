// Conversations as files: JSON has all of it, Markdown what is shown.
import { append, create, path, readConversation } from "./conversation.js";

const FORMAT = "engine-core.conversations";
const MARK = /^<!-- (user|assistant) -->\n\n?## .*\n/m; // before each message; readers of Markdown do not show it

export function asJson(conversations) {
  const copies = conversations.map(({ allowed, news, ...kept }) => kept); // whoever reads it allows nothing yet
  return JSON.stringify({ format: FORMAT, version: 1, conversations: copies }, null, 1);
}

export function asMarkdown(conversation) {
  const parts = path(conversation).map(({ role, model, content, files = [], images = [] }) => {
    const pictures = images.map((url, index) => `![Picture ${index + 1}](${url})\n\n`);
    const texts = files.map((file) => `${asBlock(file)}\n\n`);
    return `<!-- ${role} -->\n\n## ${role === "user" ? "You" : model || "Model"}\n\n${[...pictures, ...texts].join("")}${content}\n`;
  });
  return `# ${conversation.title}\n\n${parts.join("\n")}`;
}

// A text file as a model reads it.
export function asBlock({ name, text }) {
  const fence = "`".repeat(Math.max(3, 1 + Math.max(0, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length))));
  return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

// The conversations of a file. Throws an Error that says what is wrong.
export function imported(text) {
  if (MARK.test(text)) return [fromMarkdown(text)];
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("it is neither JSON nor Markdown that this page exported");
  }
  const all = Array.isArray(data?.conversations) ? data.conversations : [data];
  return all.map(readConversation).map((each) => {
    for (const message of each.messages) delete message.response; // the server that kept it may be another
    return { ...each, id: create().id, created: Date.now() };
  });
}

function fromMarkdown(text) {
  const [head, ...rest] = text.split(new RegExp(MARK, "m"));
  const made = { ...create(), title: /^# (.+)$/m.exec(head)?.[1].slice(0, 200) ?? "Imported" };
  const models = [...text.matchAll(new RegExp(MARK, "gm"))].map(([mark]) => mark.split("## ")[1].trim());
  for (let at = 0; at < rest.length; at += 2) {
    const images = [];
    const content = rest[at + 1].replace(/^!\[Picture \d+\]\((data:image\/[^)]+)\)\n\n/gm, (_, url) => (images.push(url), ""));
    const message = { role: rest[at], content: content.trim(), ...(images.length && { images }) };
    append(made, rest[at] === "user" ? message : { ...message, model: models[at / 2] });
  }
  return { ...readConversation(made), id: made.id };
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  Object.assign(document.createElement("a"), { href: url, download: name.replace(/[^\p{L}\p{N} ._-]/gu, "_") }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
