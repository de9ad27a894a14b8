/** What a view shows, as a file: Nothing leaves the page but to the reader's disk. */

/** A name of a file: letters and digits of what it is. */
export function fileName(what: string, ending: string): string {
  const plain = what.normalize("NFKD").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  return `llamarium-${plain.slice(0, 60).replace(/-$/, "") || "view"}.${ending}`;
}

export function download(blob: Blob, name: string): void {
  const address = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Numbers as JSON: arrays as lists; what is not finite is null, as in the library's own `to_dict`. */
export function json(value: unknown): Blob {
  const text = JSON.stringify(value, (_, one: unknown) => (ArrayBuffer.isView(one) ? Array.from(one as Float32Array) : one), 1);
  return new Blob([text, "\n"], { type: "application/json" });
}
