// What a conversation is asked with: model, system message, sampling. Kept with it; a new one begins with the last.
import { listModels, pull, takesPictures } from "./api.js";
import { SAMPLING, SETTINGS } from "./conversation.js";
import { element, find } from "./element.js";

const isWrong = ({ validity, step }) => validity.badInput || validity.rangeUnderflow || validity.rangeOverflow || (step === "1" && validity.stepMismatch);

export class Settings {
  // `say(text, isBad)`; `changed()` when something is to be kept or shown anew.
  constructor(store, say, changed) {
    this.lengths = new Map(); // from a model's name to its context's tokens, null where that is not known
    this.pictured = new Map(); // from a model's name to whether it takes pictures, where that is known
    Object.assign(this, { store, say, changed });
    for (const name of SETTINGS) find(name).addEventListener("change", () => this.set(name));
    find("preset").addEventListener("change", () => this.apply());
    find("save-preset").onclick = () => this.savePreset();
    find("delete-preset").onclick = () => this.deletePreset();
    find("fetch").onclick = () => this.fetch();
    find("toggle-settings").onclick = () => this.toggle(find("settings").hidden);
    this.showPresets();
  }

  toggle(isOpen) {
    find("settings").hidden = !isOpen;
    find("toggle-settings").setAttribute("aria-expanded", isOpen);
  }

  show(conversation) {
    this.conversation = conversation;
    for (const name of SETTINGS) if (name !== "model") find(name).value = conversation.settings[name] ?? "";
    this.areValid(false);
    this.showModel();
  }

  showModel() {
    const wanted = this.conversation.settings.model;
    if (this.lengths.has(wanted)) find("model").value = wanted;
    this.changed();
    this.learn(find("model").value);
    find("model").dispatchEvent(new Event("shown")); // the scheduler's view follows
  }

  async learn(model) {
    if (!model || this.pictured.has(model)) return;
    const taken = await takesPictures(model, find("key").value).catch(() => null);
    if (taken !== null) this.pictured.set(model, taken);
    this.changed();
  }

  set(name) {
    this.conversation.settings[name] = find(name).value;
    this.store.settings.first = { ...this.conversation.settings };
    if (name === "model") this.showModel();
    else if (this.areValid(false)) this.say("");
    this.changed();
  }

  get current() {
    return Object.fromEntries(SETTINGS.map((name) => [name, find(name).value]));
  }

  // Says of the first that is not what it must be; `shows` it, too.
  areValid(shows = true) {
    const fields = SAMPLING.map(find);
    for (const field of fields) field.ariaInvalid = isWrong(field);
    const wrong = fields.find(isWrong);
    if (!wrong) return true;
    const { value, min, max, step, labels } = wrong;
    const wanted = `a ${step === "1" ? "whole number" : "number"} ${max ? `from ${min} to ${max}` : `of at least ${min}`}`;
    this.say(`${labels[0].textContent.trim()} is ${value || "not a number"}; give ${wanted}, or nothing.`, true);
    if (shows) this.toggle(true);
    if (shows) wrong.focus();
    return false;
  }

  // ---------------------------------------------------------------- presets

  get preset() {
    return find("preset").value.trim();
  }

  showPresets() {
    find("presets").replaceChildren(...Object.keys(this.store.settings.presets).map((name) => element("option", { value: name })));
  }

  apply() {
    const found = Object.hasOwn(this.store.settings.presets, this.preset) && this.store.settings.presets[this.preset];
    if (!found) return;
    Object.assign(this.conversation.settings, found);
    this.show(this.conversation);
    this.say(`“${this.preset}” is set for this chat.`);
  }

  savePreset() {
    if (!this.preset) return this.say("Give the preset a name.", true);
    if (!this.areValid()) return;
    const { model, ...kept } = this.current;
    this.store.settings.presets[this.preset] = kept;
    this.showPresets();
    this.changed();
    this.say(`“${this.preset}” is saved: the system message and the numbers, without the model.`);
  }

  deletePreset() {
    if (!Object.hasOwn(this.store.settings.presets, this.preset)) return this.say(`There is no preset “${this.preset}”.`, true);
    delete this.store.settings.presets[this.preset];
    this.say(`“${this.preset}” is deleted.`);
    find("preset").value = "";
    this.showPresets();
    this.changed();
  }

  // ---------------------------------------------------------------- models

  async loadModels() {
    try {
      const models = await listModels(find("key").value);
      this.lengths = new Map(models.map(({ id, max_model_len }) => [id, max_model_len]));
      find("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
      this.say("");
      this.showModel();
      return true;
    } catch (error) {
      this.say(`No models: ${error.message}`, true);
      return false;
    }
  }

  // By name; the server says why it does not.
  async fetch() {
    const name = find("fetched").value.trim();
    if (!name) return this.say("Give the name of a model.", true);
    find("fetch").disabled = true;
    try {
      for await (const { status, total, completed } of pull(name, find("key").value)) {
        this.say(total ? `${status}: ${Math.floor((100 * (completed ?? 0)) / total)} %` : status);
      }
      this.conversation.settings.model = name;
      await this.loadModels();
      find("fetched").value = "";
      this.say(`${name} is here.`);
    } catch (error) {
      this.say(`${name} was not fetched: ${error.message}`, true);
    } finally {
      find("fetch").disabled = false;
    }
  }
}
