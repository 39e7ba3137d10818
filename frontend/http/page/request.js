// A conversation as the API takes it.
import { parsed } from "./tools.js";
import { asBlock } from "./transfer.js";

const NAMES = { max_tokens: "max_output_tokens" }; // those of the API, where they are others
const NOT_RUN = "This call was not run.";

// `settings` are texts, as their fields have them.
export function requestOf(messages, { model, system, ...sampling }) {
  const given = Object.entries(sampling).filter(([, value]) => value !== "");
  return {
    ...(model && { model }),
    ...(system?.trim() && { instructions: system }),
    ...Object.fromEntries(given.map(([name, value]) => [NAMES[name] ?? name, Number(value)])),
    input: messages.flatMap(items),
  };
}

function items({ role, content, images = [], files = [], calls = [] }) {
  if (role === "user") {
    const text = [...files.map(asBlock), content].filter(Boolean).join("\n\n");
    const pictures = images.map((image_url) => ({ type: "input_image", image_url }));
    if (!pictures.length) return [{ role, content: text }];
    return [{ role, content: text ? [...pictures, { type: "input_text", text }] : pictures }];
  }
  const spoken = content || !calls.length ? [{ role, content }] : [];
  const made = calls.map(({ id, name, arguments: given }) => ({ type: "function_call", call_id: id, name, arguments: JSON.stringify(parsed(given) ?? {}) }));
  const results = calls.map(({ id, result }) => ({ type: "function_call_output", call_id: id, output: result?.text ?? NOT_RUN }));
  return [...spoken, ...made, ...results];
}
