// Pictures of the next message: chosen, pasted or dropped. A large one is scaled down in the browser, so that
// conversations fit where it keeps them.
const MOST_BYTES = 400_000;
const LONGEST = 1280;
const KEPT = ["image/png", "image/jpeg", "image/webp"];

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

export class Attached {
  // `list` shows them; `say` tells what went wrong.
  constructor(list, say) {
    this.urls = [];
    this.list = list;
    this.say = say;
  }

  async add(files) {
    for (const file of files) {
      try {
        this.urls.push(await pictureUrl(file));
        this.say("");
      } catch {
        this.say(`${file.name || "The file"} is no picture that this browser can read.`, true);
      }
    }
    this.show();
  }

  set(urls) {
    this.urls = [...urls];
    this.show();
  }

  take() {
    const taken = this.urls;
    this.set([]);
    return taken;
  }

  show() {
    const items = this.urls.map((url, index) => {
      const name = `Picture ${index + 1}`;
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: "×", ariaLabel: `Remove ${name}` });
      button.onclick = () => this.set(this.urls.filter((_, other) => other !== index));
      const item = document.createElement("li");
      item.append(thumbnail(url, name), button);
      return item;
    });
    this.list.replaceChildren(...items);
    this.list.hidden = !items.length;
  }
}

export function thumbnail(url, name) {
  return Object.assign(document.createElement("img"), { src: url, alt: name, className: "thumbnail" });
}

// A message as the API takes it.
export function content(message) {
  if (!message.images?.length) return message.content;
  const parts = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return message.content ? [...parts, { type: "text", text: message.content }] : parts;
}
