// Pictures and text files of the next message: chosen, pasted or dropped. A large picture is scaled down in the browser,
// so that conversations fit where it keeps them.
import { element } from "./element.js";

const MOST_BYTES = 400_000;
const LONGEST = 1280; // pixels
const KEPT = ["image/png", "image/jpeg", "image/webp"];
const MOST_CHARACTERS = 200_000;
const MOST_FILES = 20;

function asUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

export async function pictureUrl(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MOST_BYTES && KEPT.includes(file.type)) return asUrl(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

const counted = (count) => count.toLocaleString("en");

// Throws an Error that says why it cannot be attached.
async function read(file, takesPictures) {
  const name = file.name || "The file";
  if (file.type.startsWith("image/")) {
    if (!takesPictures) throw new Error(`${name} is a picture, and this model takes none.`);
    const url = await pictureUrl(file).catch(() => null);
    if (!url) throw new Error(`${name} is no picture that this browser can read.`);
    return { url };
  }
  const isPdf = file.type === "application/pdf" || (await file.slice(0, 5).text()) === "%PDF-";
  if (isPdf) throw new Error(`${name} is a PDF, which models cannot read. Save it as text, or paste the part that matters.`);
  const tooLong = (size) => new Error(`${name} has ${size}, the limit is ${counted(MOST_CHARACTERS)} characters. Attach a part of it.`);
  if (file.size > 4 * MOST_CHARACTERS) throw tooLong(`${counted(file.size)} bytes`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    // no UTF-8
  }
  if (text === undefined || text.includes("\0")) throw new Error(`${name} is neither text in UTF-8 nor a picture.`);
  if (text.length > MOST_CHARACTERS) throw tooLong(`${counted(text.length)} characters`);
  return { name, text };
}

export class Attached {
  // `list` shows them; `say` tells what went wrong; `takesPictures()` of the model.
  constructor(list, say, takesPictures) {
    this.all = []; // {url} or {name, text}
    Object.assign(this, { list, say, takesPictures });
  }

  async add(files) {
    this.say("");
    for (const file of files) {
      try {
        if (this.all.length === MOST_FILES) throw new Error(`A message has at most ${MOST_FILES} files; ${file.name} is left out.`);
        this.all.push(await read(file, this.takesPictures()));
      } catch (error) {
        this.say(error.message, true);
      }
    }
    this.show();
  }

  set({ images = [], files = [] } = {}) {
    this.all = [...images.map((url) => ({ url })), ...files];
    this.show();
  }

  // Fields of a message.
  take() {
    const images = this.all.filter(({ url }) => url).map(({ url }) => url);
    const files = this.all.filter(({ url }) => !url);
    this.set();
    return { ...(images.length && { images }), ...(files.length && { files }) };
  }

  show() {
    const items = this.all.map((each, index) => {
      const name = each.name ?? `Picture ${index + 1}`;
      const button = element("button", { type: "button", textContent: "×", ariaLabel: `Remove ${name}` });
      button.onclick = () => {
        this.all.splice(index, 1);
        this.show();
      };
      return element("li", {}, each.url ? thumbnail(each.url, name) : element("span", { className: "file", textContent: name }), button);
    });
    this.list.replaceChildren(...items);
    this.list.hidden = !items.length;
  }
}

export function thumbnail(url, name) {
  return element("img", { src: url, alt: name, className: "thumbnail" });
}

// What came with a message.
export function attachments({ images = [], files = [] }) {
  const texts = files.map(({ name, text }) => {
    const summary = element("summary", { textContent: `${name} (${counted(text.length)} characters)` });
    return element("details", { className: "file" }, summary, element("pre", { textContent: text, tabIndex: 0 }));
  });
  return [...images.map((url, index) => thumbnail(url, `Picture ${index + 1}`)), ...texts];
}
