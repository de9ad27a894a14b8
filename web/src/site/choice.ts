/** A line below the page: which model is open, the site's others, and a file of the reader's own, chosen or dropped. */
import type { Entry, Opening } from "./messages";

/** What the line leads to. */
export interface Chosen {
  open(file: File): void;
  /** Stop the opening that is under way. */
  cancel(): void;
}

export class Choice {
  readonly element = element("footer", "site");
  readonly #told = element("span", "told");
  readonly #stop = element("button");

  constructor(models: readonly Entry[], opened: Entry, { open, cancel }: Chosen) {
    this.#told.setAttribute("role", "status");
    Object.assign(this.#stop, { type: "button", textContent: "Cancel", onclick: cancel, hidden: true });
    this.element.append(this.#told, this.#stop);
    for (const { name, bytes } of models.filter((one) => one !== opened)) {
      const link = element("a");
      link.href = `?model=${encodeURIComponent(name)}`;
      link.textContent = `Open ${name} (${(bytes / 1e6).toFixed(1)} MB)`;
      this.element.append(link);
    }
    const label = element("label");
    const input = Object.assign(element("input"), { type: "file", accept: ".gguf" });
    label.append("Open a GGUF file, or drop one here: ", input);
    this.element.append(label);
    const take = (files: FileList | null | undefined): void => {
      const [file] = files ?? [];
      if (file) open(file);
    };
    input.addEventListener("change", () => {
      take(input.files);
      input.value = ""; // else the same file could not be chosen again
    });
    addEventListener("dragover", (event) => event.preventDefault()); // else a browser leaves the page for the file
    addEventListener("drop", (event) => {
      event.preventDefault();
      take(event.dataTransfer?.files);
    });
  }

  /** Say how the opening of a model goes on, beside the one that is open. */
  show({ name, state, progress, message, isFinal }: Opening, open: string): void {
    this.#told.classList.toggle("failed", state === "failed");
    const wayOn = open ? ` ${open} stays open.` : isFinal ? "" : " Open another model:";
    this.#told.textContent = {
      loading: `Opening ${name}: ${Math.round(100 * progress)} %.`,
      computing: `Opening ${name}: computing the text.`,
      open: `${name}, computed in this browser. Nothing is sent.`,
      failed: `${message}.${wayOn}`,
    }[state];
    this.#stop.hidden = state === "open" || state === "failed";
  }
}

/** After the first visit the page can be opened with the headers that threads need. */
export function offerThreads(line: HTMLElement, count: number): void {
  const again = element("button");
  again.textContent = `Reload to compute with ${count} threads`;
  again.addEventListener("click", () => location.reload());
  line.append(again);
}

function element<K extends keyof HTMLElementTagNameMap>(name: K, className = ""): HTMLElementTagNameMap[K] {
  return Object.assign(document.createElement(name), { className });
}
