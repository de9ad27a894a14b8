/** Light or dark: as the system says, unless the reader chooses. */
import { recall, remember } from "./memory";

const KEY = "llamarium-theme";

class Theme {
  chosen = $state<"auto" | "light" | "dark">("auto");
  #system = $state(false);

  constructor() {
    const query = matchMedia("(prefers-color-scheme: dark)");
    this.#system = query.matches;
    query.addEventListener("change", (event) => (this.#system = event.matches));
    const stored = recall(KEY);
    if (stored === "light" || stored === "dark") this.choose(stored);
  }

  get dark(): boolean {
    return this.chosen === "auto" ? this.#system : this.chosen === "dark";
  }

  choose(theme: "auto" | "light" | "dark"): void {
    this.chosen = theme;
    remember(KEY, theme === "auto" ? undefined : theme);
    document.documentElement.dataset["theme"] = theme;
  }
}

export const theme = new Theme();
