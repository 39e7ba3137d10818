// A message on the page, and what its buttons do.
import { attachments } from "./attached.js";
import { copyButton, element } from "./element.js";
import { showFormatted } from "./formatted.js";
import { callElement, stateOf } from "./tools.js";

const ENDS = {
  max_output_tokens: "cut at the limit of tokens",
  stopped: "stopped",
  left: "ended as the page was left",
};

// `others` are all versions of the message; `act` has choose(message), edit(message) and regenerate(message).
export function messageElement(message, others, act) {
  const isUser = message.role === "user";
  const body = element("div", { className: "body" });
  const under = element("div", { className: "under" });
  const name = element("h2", { textContent: isUser ? "You" : message.model || "Model" });
  const made = element("article", { className: `message ${message.role}` }, name, body, under);
  if (isUser) body.append(...attachments(message), message.content);
  else showAnswer(body, message);
  if (others.length > 1) under.append(versionButtons(message, others, act));
  under.append(copyButton(() => message.content));
  if (isUser) under.append(element("button", { type: "button", textContent: "Edit", onclick: () => act.edit(message) }));
  else under.append(element("button", { type: "button", textContent: "Regenerate", onclick: () => act.regenerate(message) }));
  under.append(...notes(message));
  return made;
}

function versionButtons(message, others, { choose }) {
  const at = others.indexOf(message);
  const button = (textContent, ariaLabel, other) => element("button", { type: "button", textContent, ariaLabel, disabled: !other, onclick: () => choose(other) });
  const group = element("span", { className: "versions" }, button("‹", "Version before", others[at - 1]), `${at + 1}/${others.length}`, button("›", "Next version", others[at + 1]));
  group.setAttribute("role", "group");
  group.ariaLabel = "Versions";
  return group;
}

// Fills the body anew or with what has come.
export function showAnswer(body, message) {
  if (!body.children.length) {
    const reasoning = element("details", { className: "reasoning", open: !message.content }, element("summary", { textContent: "Reasoning" }), element("div"));
    body.append(reasoning, element("div", { className: "content" }), element("div", { className: "after" }));
  }
  const [reasoning, content, after] = body.children;
  reasoning.hidden = !message.reasoning;
  showFormatted(reasoning.lastElementChild, message.reasoning ?? "");
  if (message.content && !content.hasChildNodes()) reasoning.open = false;
  showFormatted(content, message.content);
  const calls = message.calls ?? [];
  const state = [...calls.map(stateOf), message.error ?? ""].join("\n");
  if (after.dataset.state === state) return; // what the reader has opened stays open
  after.dataset.state = state;
  after.replaceChildren(...calls.map(callElement), ...(message.error ? [element("p", { className: "error", textContent: message.error })] : []));
}

const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

function notes(message) {
  const parts = [];
  if (message.tokens_per_s) parts.push(`${message.tokens_per_s.toFixed(1)} tokens/s`);
  if (message.ttft_ms !== undefined) parts.push(`first after ${duration(message.ttft_ms)}`);
  if (message.finish !== "ended" && message.finish) parts.push(ENDS[message.finish] ?? message.finish);
  return parts.length ? [element("span", { className: "notes", textContent: parts.join(" · ") })] : [];
}
