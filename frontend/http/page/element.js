export const find = (id) => document.getElementById(id);

export function element(tag, fields = {}, ...children) {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children);
  return made;
}

// A button whose text says for a moment what came of it.
export function copyButton(text, fields = {}) {
  const button = element("button", { type: "button", textContent: "Copy", ...fields });
  button.onclick = async () => {
    const told = await navigator.clipboard?.writeText(text()).then(() => "Copied", () => null);
    button.textContent = told ?? "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  return button;
}
