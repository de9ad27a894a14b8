/** Put a text on the clipboard; say what became of that, and where it can be had instead. */
export async function copy(text: string, elsewhere = ""): Promise<string> {
  try {
    await navigator.clipboard.writeText(text);
    return "copied";
  } catch {
    return `not allowed here${elsewhere && `: ${elsewhere}`}`;
  }
}
