// Keys of the page, and the list of them.
import { element, find } from "./element.js";

// [as `pressed` names it, as it is shown, what it does, name of the action]; without an action the fields do it.
const KEYS = [
  ["", "Enter", "send the message"],
  ["", "Shift+Enter", "a new line in it"],
  ["ArrowUp", "↑", "edit the last question, in an empty message", "editLast"],
  ["Escape", "Esc", "stop the answer, or editing", "stop"],
  ["Ctrl+Shift+O", "Ctrl+Shift+O", "new chat", "create"],
  ["Ctrl+K", "Ctrl+K", "search in chats", "search"],
  ["Alt+ArrowUp", "Alt+↑", "the chat above", "above"],
  ["Alt+ArrowDown", "Alt+↓", "the chat below", "below"],
  ["F2", "F2", "rename the chat", "rename"],
  ["?", "?", "this list", "help"],
];

const isField = ({ tagName }) => ["INPUT", "TEXTAREA", "SELECT"].includes(tagName);

function pressed({ ctrlKey, metaKey, altKey, shiftKey, key }) {
  const isControlled = ctrlKey || metaKey;
  const held = [isControlled && "Ctrl", altKey && "Alt", isControlled && shiftKey && "Shift"].filter(Boolean);
  return [...held, key.length === 1 ? key.toUpperCase() : key].join("+");
}

// `actions` by their names; one that returns false leaves the key to the browser.
export function listenForKeys(actions) {
  const help = find("shortcuts");
  const rows = KEYS.map(([, shown, words]) => element("tr", {}, element("th", { scope: "row" }, element("kbd", { textContent: shown })), element("td", { textContent: words })));
  help.querySelector("tbody").replaceChildren(...rows);
  const all = { ...actions, help: () => help.showModal() };
  find("show-shortcuts").onclick = all.help;
  find("close-shortcuts").onclick = () => help.close();
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || help.open) return;
    const wanted = pressed(event);
    const found = KEYS.find(([keys]) => keys && keys === wanted);
    const isElse = wanted === "ArrowUp" ? event.target !== find("prompt") : wanted === "?" && isField(event.target);
    if (found && !isElse && all[found[3]](event) !== false) event.preventDefault();
  });
}
