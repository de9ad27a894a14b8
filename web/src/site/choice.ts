/** A line below the page: which model is open, the site's others, and a file of the reader's own. */
import type { Entry } from "./messages";

export function choice(models: readonly Entry[], opened: Entry, take: (file: File) => void): HTMLElement {
  const line = element("footer", "site");
  line.append(`${opened.name}, computed in this browser. Nothing is sent. `);
  const others = models.filter((one) => one !== opened);
  for (const { name, bytes } of others) {
    const link = element("a");
    link.href = `?model=${encodeURIComponent(name)}`;
    link.textContent = `Open ${name} (${(bytes / 1e6).toFixed(1)} MB)`;
    line.append(link, " ");
  }
  const label = element("label");
  const input = element("input");
  Object.assign(input, { type: "file", accept: ".gguf" });
  label.append("Open a GGUF file: ", input);
  line.append(label);
  input.addEventListener("change", () => {
    const [file] = input.files ?? [];
    if (!file) return;
    line.firstChild?.replaceWith(`${file.name}, computed in this browser. Nothing is sent. `);
    take(file);
  });
  return line;
}

/** After the first visit the page can be opened with the headers that threads need. */
export function offerThreads(line: HTMLElement, count: number): void {
  const again = element("button");
  again.textContent = `Reload to compute with ${count} threads`;
  again.addEventListener("click", () => location.reload());
  line.append(" ", again);
}

function element<K extends keyof HTMLElementTagNameMap>(name: K, className = ""): HTMLElementTagNameMap[K] {
  return Object.assign(document.createElement(name), { className });
}
