// Light or dark, before anything is drawn: this script is no module, so the page waits for it.
(() => {
  const KEY = "engine-core.theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const show = (theme) => {
    const isDark = theme === "dark" || (theme !== "light" && system.matches);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    dispatchEvent(new Event("themechange"));
  };
  const kept = () => {
    try {
      return localStorage.getItem(KEY) ?? "system";
    } catch {
      return "system"; // the browser keeps nothing
    }
  };
  show(kept());
  system.addEventListener("change", () => show(kept()));
  addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("theme");
    select.value = kept();
    select.addEventListener("change", () => {
      try {
        localStorage.setItem(KEY, select.value);
      } catch {
        // for this page only
      }
      show(select.value);
    });
  });
})();
