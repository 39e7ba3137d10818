// The list of conversations: search, marks, deletion that can be undone.
import { contains } from "./conversation.js";
import { element, find } from "./element.js";

const MARKS = { answering: "answering", new: "new answer", failed: "answer failed" };

export class List {
  // `isAnswering(conversation)`; `open`, `remove` and `restore(conversation, index)` are what its buttons do.
  constructor(store, act) {
    this.removed = []; // [conversation, where it was]
    Object.assign(this, { store, act });
    find("search").addEventListener("input", () => this.show());
    find("undo").onclick = () => act.restore(...this.removed.pop());
    find("toggle-list").onclick = () => this.toggle(!find("list").classList.contains("open"));
  }

  get searched() {
    return find("search").value.trim();
  }

  show(current = this.current) {
    this.current = current;
    const buttons = () => [...find("conversations").querySelectorAll("button")];
    const focused = buttons().indexOf(document.activeElement);
    const found = this.store.all.filter((each) => contains(each, this.searched));
    find("conversations").replaceChildren(...found.map((each) => this.item(each)));
    find("found").textContent = this.searched ? `${found.length || "None"} found` : "";
    buttons()[focused]?.focus();
    const others = this.store.all.filter((each) => each !== current);
    find("toggle-list").replaceChildren(...this.mark(others.find((each) => each.news) ?? others.find(this.act.isAnswering)), "Chats");
    find("undo").hidden = !this.removed.length;
    find("undo").textContent = `Undo: bring back “${this.removed.at(-1)?.[0].title}”`;
  }

  item(conversation) {
    const { title } = conversation;
    const open = element("button", { title, onclick: () => this.act.open(conversation) }, ...this.mark(conversation), title);
    const remove = element("button", { className: "delete", textContent: "×", ariaLabel: `Delete ${title}`, onclick: () => this.remove(conversation) });
    const item = element("li", {}, open, remove);
    if (conversation === this.current) item.setAttribute("aria-current", "true");
    return item;
  }

  mark(conversation) {
    const kind = conversation && (this.act.isAnswering(conversation) ? "answering" : conversation.news);
    return MARKS[kind] ? [element("span", { className: `mark ${kind}`, title: MARKS[kind] }), element("span", { className: "hidden", textContent: `${MARKS[kind]}: ` })] : [];
  }

  remove(conversation) {
    const index = this.store.all.indexOf(conversation);
    if (conversation.messages.length) this.removed.push([conversation, index]);
    this.store.all.splice(index, 1);
    this.act.remove(conversation);
    find(this.removed.length ? "undo" : "prompt").focus();
  }

  // On a phone it lies over the chat.
  toggle(isOpen) {
    find("list").classList.toggle("open", isOpen);
    find("toggle-list").setAttribute("aria-expanded", isOpen);
  }

  // The conversation before (-1) or behind (1) the current one.
  neighbour(offset) {
    return this.store.all[this.store.all.indexOf(this.current) + offset];
  }
}
