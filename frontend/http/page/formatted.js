// Markdown as elements. An answer is foreign text: nothing of it but formatting, code and formulae reaches the page.
import { copyButton, element } from "./element.js";

const KEPT = {
  FORBID_TAGS: ["style", "img", "form", "input", "button", "svg", "math", "video", "audio"],
  FORBID_ATTR: ["style", "class", "id"],
  RETURN_DOM_FRAGMENT: true,
};
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
const MATH = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 };
const MOST_COLOURED = 30_000; // characters of a block of code
const LETTERS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

const escaped = (text) => text.replace(/[&<>"]/g, (letter) => LETTERS[letter]);
const math = (kind) => ({ tex }) => `<code data-math="${kind}">${escaped(tex)}</code>`;
const firstOf = (text, pattern) => {
  const at = text.search(pattern);
  return at < 0 ? undefined : at;
};

const mathBlock = {
  name: "mathBlock",
  level: "block",
  start: (text) => firstOf(text, /^ {0,3}(?:\$\$|\\\[)/m),
  tokenizer(text) {
    const found = /^ {0,3}(?:\$\$([^]{1,9999}?)\$\$|\\\[([^]{1,9999}?)\\\])[ \t]*(?:\n|$)/.exec(text);
    return found ? { type: "mathBlock", raw: found[0], tex: found[1] ?? found[2] } : undefined;
  },
  renderer: (token) => `<p>${math("block")(token)}</p>`,
};
// Dollars are mostly money: between two of them no space at the edges, and no digit behind.
const mathInline = {
  name: "mathInline",
  level: "inline",
  start: (text) => firstOf(text, /\$|\\[([]/),
  tokenizer(text) {
    const found = /^(?:\$\$([^]{1,9999}?)\$\$|\\\[([^]{1,9999}?)\\\]|\\\(([^]{1,9999}?)\\\)|\$(?![\s$])((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d))/.exec(text);
    return found ? { type: "mathInline", raw: found[0], tex: found[1] ?? found[2] ?? found[3] ?? found[4] } : undefined;
  },
  renderer: math("inline"),
};
const code = ({ text, lang }) => `<pre data-language="${escaped((lang ?? "").match(/^[\w+#.-]*/)[0])}"><code>${escaped(text)}</code></pre>`;
const markdown = new marked.Marked({ breaks: true, extensions: [mathBlock, mathInline], renderer: { code } });

function elements(tokens) {
  const made = DOMPurify.sanitize(markdown.parser(tokens), KEPT);
  for (const link of made.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noreferrer noopener" });
  for (const formula of made.querySelectorAll("code[data-math]")) showFormula(formula);
  for (const pre of made.querySelectorAll("pre")) showCode(pre);
  return [...made.childNodes];
}

function showFormula(formula) {
  const isBlock = formula.dataset.math === "block";
  const shown = element("span", { className: isBlock ? "formula" : "" });
  if (isBlock) shown.tabIndex = 0; // it may be wider than the page
  try {
    katex.render(formula.textContent, shown, { ...MATH, displayMode: isBlock });
    formula.replaceWith(shown);
  } catch {
    // no TeX that is known: it stays as it was written
  }
}

function showCode(pre) {
  const { language } = pre.dataset;
  const text = pre.textContent;
  pre.tabIndex = 0;
  if (language && text.length <= MOST_COLOURED && hljs.getLanguage(language)) {
    const { value } = hljs.highlight(text, { language, ignoreIllegals: true });
    pre.replaceChildren(element("code", {}, DOMPurify.sanitize(value, COLOURS)));
  }
  const frame = element("div", { className: "code" });
  pre.replaceWith(frame);
  frame.append(element("div", { className: "code-head" }, element("span", { textContent: language ?? "" }), copyButton(() => text)), pre);
}

const shown = new WeakMap(); // from a box to its blocks: [source, elements]

// Fills the box with the text. Blocks that are there already stay, so that a text can grow under the reader's cursor.
export function showFormatted(box, text) {
  const tokens = markdown.lexer(text);
  const html = tokens.findIndex(({ type }) => type === "html"); // it may hold what follows
  const blocks = (html < 0 ? tokens : tokens.slice(0, html)).map((token) => [token.raw, [token]]);
  if (html >= 0) blocks.push([tokens.slice(html).map(({ raw }) => raw).join(""), tokens.slice(html)]);
  const before = shown.get(box) ?? [];
  let same = 0;
  while (same < before.length && before[same][0] === blocks[same]?.[0]) same++;
  for (const [, old] of before.slice(same)) for (const node of old) node.remove();
  const after = blocks.slice(same).map(([raw, parts]) => [raw, elements(parts)]);
  box.append(...after.flatMap(([, made]) => made));
  shown.set(box, [...before.slice(0, same), ...after]);
}
